"""One of the two processes of bench.switch_cuda: `python -m bench.switch_cudarank SETTINGS`, told what to do by lines.

SETTINGS and every line are JSON objects, as is every answer. It ends with its stdin. Times are of CLOCK_MONOTONIC,
which all processes of a machine share.
"""

import itertools
import json
import statistics
import sys
import time

import torch

from plexrl.memory.arena import ArenaMap
from plexrl.memory.cuda import CHUNK, CudaDevice, cuda_device
from plexrl.memory.cuda_seat import BackedSeat
from plexrl.memory.gate import Gate
from plexrl.memory.manifest import Manifest, TensorSpec
from plexrl.memory.resident import DIRTY, ResidentState
from plexrl.types import Extent, PlexrlError, Slab

LAYERS = 32
PIECE = 8 << 20
"""Words that are digested at once."""


def layout(total: int, tensors: int) -> Manifest:
    """About `total` bytes of float32: a quarter of weights in LAYERS buckets, then gradients and two moments."""
    each = max(tensors // 4, LAYERS)
    specs = [TensorSpec(f"t{i}", (total // each // 16,), "float32") for i in range(each)]
    cuts = [each * i // LAYERS for i in range(LAYERS + 1)]
    stages = {f"weights.{i:02}": specs[start:end] for i, (start, end) in enumerate(itertools.pairwise(cuts))}
    return Manifest.build({**stages, **dict.fromkeys(("grads", "moment1", "moment2"), specs)})


def digest(buffer: torch.Tensor) -> int:
    """64 bits of where each 8 bytes of `buffer` stand and what they are; the same on any device."""
    words, total = buffer.view(torch.int64), 0
    for start in range(0, words.numel(), PIECE):
        piece = words[start : start + PIECE]
        places = torch.arange(start, start + piece.numel(), device=buffer.device).mul_(2).add_(1)
        total += int((piece * places).sum())
    return total & (2**64 - 1)


class Rank:
    """A state of `bytes` in an extent that the other rank's overlaps whole."""

    def __init__(self, settings: dict, device: CudaDevice, on: str) -> None:
        """on: where torch computes, "cuda:0" of a GPU."""
        self.on = on
        self.device = device
        self.manifest = layout(settings["bytes"], settings["tensors"])
        self.size = self.manifest.size
        region = device.reserve(Extent(0, self.size))
        self.buffer = region.buffer
        arena = ArenaMap(settings["arena"], settings["arena_bytes"], device.pins.register, device.pins.unregister)
        self.slab = arena.view(Slab(f"rank {settings['seat']}", settings["slab"], self.size, 0))
        self.registered = arena.registrations
        gate = Gate(settings["gate"])
        self.seat = BackedSeat(gate.seat(settings["seat"], f"rank {settings['seat']}", region.extent), device)
        self.state = ResidentState(self.manifest, self.buffer, self.slab, mover=device.mover, chunk=device.chunk)
        self.region = region

    def ready(self) -> dict:
        """What it cost to start."""
        return {
            "register_s": self.registered.seconds,
            "bytes": self.size,
            "tensors": sum(len(bucket.tensors) for bucket in self.manifest.buckets),
            "residual_bytes": self.device.residual_bytes(),
        }

    def enter(self) -> dict:
        """Come onto the device; first_ms: until the first layer could compute."""
        begun = time.monotonic()
        self.seat.come()
        first = self.state.load([self.manifest.buckets[0].name], self.seat)
        usable = time.monotonic()
        rest = self.state.load(seat=self.seat)
        self.seat.held()
        ended = time.monotonic()
        return {
            "begun": begun,
            "ended": ended,
            "bytes": first.bytes_in + rest.bytes_in,
            "waited_s": first.waited_s + rest.waited_s,
            "first_ms": (usable - begun) * 1e3,
        }

    def leave(self) -> dict:
        """All of it goes to the slab, as after a step of full-parameter training without zeroed gradients."""
        for bucket in self.manifest.buckets:
            self.state.mark(bucket.name, DIRTY)
        begun = time.monotonic()
        self.seat.leave()
        moved = self.state.offload(self.seat)
        self.seat.gone()
        return {"begun": begun, "ended": time.monotonic(), "bytes": moved.bytes_out}

    def write(self, seed: int) -> dict:
        """New contents on the device; their digest."""
        maker = torch.Generator(self.on).manual_seed(seed)
        words = self.buffer.view(torch.int64)
        for piece in words.split(PIECE):
            piece.random_(generator=maker)
        for bucket in self.manifest.buckets:
            self.state.mark(bucket.name, DIRTY)
        return {"digest": digest(self.buffer)}

    def digest(self, where: str) -> dict:
        """where: "device" or "host"."""
        return {"digest": digest(self.buffer if where == "device" else self.slab)}

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
        side = 4096 if self.on.startswith("cuda") else 64
        a, b = (torch.ones(side, side, device=self.on) for _ in range(2))
        count, begun = 0, time.monotonic()
        while time.monotonic() < begun + seconds:
            for _ in range(10):
                c = a @ b
            float(c[0, 0])
            count += 10
        return {"per_second": count / (time.monotonic() - begun)}

    def mapping(self) -> dict:
        """Seconds to map and to unmap a GiB, with nothing copied. The other rank is off the device, and so is this."""
        begun = time.monotonic()
        self.device.back(self.region, 0, self.size)
        mapped = time.monotonic()
        self.device.unmap(self.region)
        gib = self.size / (1 << 30)
        return {"map_s": (mapped - begun) / gib, "unmap_s": (time.monotonic() - mapped) / gib}


def rate(moved: dict) -> float:
    """GB/s: 1e9 bytes a second."""
    return moved["bytes"] / (moved["ended"] - moved["begun"]) / 1e9


def serve(rank: Rank) -> None:
    """Answer lines until there are no more."""
    print(json.dumps(rank.ready()), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        try:
            answer = getattr(rank, order.pop("do"))(**order)
        except PlexrlError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    told = json.loads(sys.argv[1])
    try:
        serve(Rank(told, cuda_device(0, told["device_bytes"], told.get("chunk", CHUNK)), "cuda:0"))
    except PlexrlError as broken:
        print(json.dumps({"error": str(broken)}), flush=True)
