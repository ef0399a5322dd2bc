"""One of the two processes of bench.switch_cuda: `python -m bench.switch_gpurank SETTINGS`, told by lines."""

import json
import statistics
import sys
import time

import torch

from bench import switch_rank
from bench.switch_rank import BUCKETS, layout
from bench.switch_serve import PIECE, digest, rate, serve
from plexrl.memory.arena import ArenaMap
from plexrl.memory.cuda import CudaDevice, cuda_device
from plexrl.memory.cuda_seat import BackedSeat
from plexrl.memory.gate import Gate
from plexrl.memory.resident import DIRTY, ResidentState
from plexrl.memory.transfer import Arrival, Mover
from plexrl.types import Extent, PlexrlError, Slab


class Counting:
    """A mover that counts what is really copied."""

    def __init__(self, mover: Mover) -> None:
        self.copied = 0
        self._mover = mover

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Arrival | None:
        """As Mover."""
        self.copied += target.numel()
        return self._mover.copy(target, source)


class GpuRank(switch_rank.Rank):
    """A state of `bytes` in an extent that the other rank's overlaps whole. It is told what switch_rank.Rank is."""

    def __init__(self, settings: dict, device: CudaDevice, on: str) -> None:
        """on: where torch computes, "cuda:0" of a GPU."""
        self.on = on
        self.device = device
        self.manifest = layout(settings["bytes"], settings["tensors"])
        self.size = self.manifest.size
        seat, name = settings["seat"], f"rank {settings['seat']}"
        self.region = device.reserve(Extent(0, self.size))
        arena = ArenaMap(settings["arena"], settings["arena_bytes"], device.pins.register, device.pins.unregister)
        self.slab = arena.view(Slab(name, settings["slab"], self.size, 0))
        self.registered = arena.registrations
        self.seat = BackedSeat(Gate(settings["gate"]).seat(seat, name, self.region.extent), device)
        self.mover = Counting(device.mover)
        self.state = ResidentState(self.manifest, self.region.buffer, self.slab, mover=self.mover, chunk=device.chunk)

    def ready(self) -> dict:
        """How large it is, and what it cost to start."""
        return {
            **super().ready(),
            "register_s": self.registered.seconds,
            "residual_bytes": self.device.residual_bytes(),
        }

    def write(self, seed: int) -> dict:
        """New contents, made on the device; their digest."""
        maker = torch.Generator(self.on).manual_seed(seed)
        for piece in self.region.buffer.view(torch.int64).split(PIECE):
            piece.random_(generator=maker)
        for bucket in BUCKETS:
            self.state.mark(bucket, DIRTY)
        return {"digest": digest(self.region.buffer)}

    def digest(self, where: str) -> dict:
        """where: "device" or "host". The same sums on both, so that the device makes its own."""
        return {"digest": digest(self.region.buffer if where == "device" else self.slab)}

    def allocations(self) -> dict:
        """Buffers made by leaving and entering, on the host and on the device."""

        def made() -> int:
            return torch.cuda.memory_stats(self.on)["allocation.all.allocated"] if "cuda" in self.on else 0

        before = made()
        return {"count": super().allocations()["count"] + made() - before}

    def residual(self) -> dict:
        """Bytes of the device that this process holds now."""
        return {"residual_bytes": self.device.residual_bytes()}

    def loop(self, seconds: float) -> dict:
        """Leave and enter by turns; medians of GB/s."""
        out, back, end = [], [], time.monotonic() + seconds
        while time.monotonic() < end or not back:
            out.append(rate(self.leave()))
            back.append(rate(self.enter()))
        return {"offload_gbs": statistics.median(out), "load_gbs": statistics.median(back)}

    def work(self, seconds: float) -> dict:
        """Matrix products; how many in a second."""
        side = 4096 if "cuda" in self.on else 64
        a, b = (torch.ones(side, side, device=self.on) for _ in range(2))
        count, begun = 0, time.monotonic()
        while time.monotonic() < begun + seconds:
            for _ in range(10):
                c = a @ b
            float(c[0, 0])
            count += 10
        return {"per_second": count / (time.monotonic() - begun)}

    def mapping(self) -> dict:
        """Seconds to map and to unmap a GiB, with nothing copied. Neither rank is on the device."""
        begun = time.monotonic()
        self.device.back(self.region, 0, self.size)
        mapped = time.monotonic()
        self.device.unmap(self.region)
        gib = self.size / (1 << 30)
        return {"map_s": (mapped - begun) / gib, "unmap_s": (time.monotonic() - mapped) / gib}


if __name__ == "__main__":
    told = json.loads(sys.argv[1])
    try:
        serve(GpuRank(told, cuda_device(0, told["device_bytes"]), "cuda:0"))
    except PlexrlError as broken:
        print(json.dumps({"error": str(broken)}), flush=True)
