"""One of the two processes of bench.switch on the cpu device: `python -m bench.switch_rank SETTINGS`, told by lines.

SETTINGS and every line are JSON objects, as is every answer. It ends with its stdin. Times are of CLOCK_MONOTONIC,
which all processes of a machine share.
"""

import ctypes
import gc
import json
import os
import sys
import time
import tracemalloc
from pathlib import Path

import torch
import xxhash
from torch.profiler import ProfilerActivity, profile

from bench.switch_serve import serve
from plexrl.memory.arena import ArenaMap
from plexrl.memory.device import CpuDevice
from plexrl.memory.gate import Gate
from plexrl.memory.manifest import Manifest, TensorSpec
from plexrl.memory.resident import CLEAN, DIRTY, ZERO, ResidentState
from plexrl.memory.transfer import CHUNK, Memcpy
from plexrl.types import Extent, Slab

BUCKETS = ("first", "weights", "grads", "moment1", "moment2")
"""first: the first layer's weights, which a forward pass can begin with."""
LAYERS = 32
PIECE = 64 << 20
PYTHON_NOISE = 4096
"""Bytes. Counters and the Moved record are Python objects of some dozen bytes; a buffer is larger than this."""


def layout(total: int, tensors: int) -> Manifest:
    """`tensors` float32 tensors of uneven sizes that fill `total` bytes with their padding, in four equal parts."""
    parts = []
    for part in range(4):
        each, size = tensors // 4 + (part < tensors % 4), total // 4
        unit = size // (4 * each * (each + 1) // 2)
        specs = [TensorSpec(f"t{i}", (unit * (i + 1),), "float32") for i in range(each - 1)]
        rest = size - Manifest.build({"": specs}).size
        parts.append([*specs, TensorSpec(f"t{each - 1}", (rest // 4,), "float32")])
    cut = 1
    while Manifest.build({"": parts[0][: cut + 1]}).size <= total // 4 // LAYERS:
        cut += 1
    parts[:1] = [parts[0][:cut], parts[0][cut:]]
    return Manifest.build(dict(zip(BUCKETS, parts, strict=True)))


def allocations(step) -> int:
    """How many buffers torch's CPU allocator and Python made while step() ran."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step()
    # The raw records: seen.events() folds them into the operators, where what an operator made and freed is net 0.
    raw = seen.profiler.kineto_results.events()
    made = sum(1 for event in raw if event.name() == "[memory]" and event.nbytes() > 0)
    tracemalloc.start()
    step()
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    step()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return made + (1 if peak - before > PYTHON_NOISE else 0)


def differing(buffer: torch.Tensor, byte: int) -> int:
    """How many bytes of `buffer` differ from `byte`; counted in pieces of 64 MiB."""
    return sum(int(torch.count_nonzero(piece != byte)) for piece in buffer.split(PIECE))


class Counting(Memcpy):
    """Counts what is really copied."""

    copied = 0

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """As Mover."""
        super().copy(target, source)
        self.copied += target.numel()


class Rank:
    """A state of `bytes` that lies on the same bytes of the device as the other rank's."""

    def __init__(self, settings: dict) -> None:
        self.manifest = layout(settings["bytes"], settings["tensors"])
        self.size = self.manifest.size
        seat, name = settings["seat"], f"rank {settings['seat']}"
        self.device = CpuDevice(settings["device"], settings["device_bytes"])
        self.region = self.device.reserve(Extent(0, self.size))
        arena = ArenaMap(settings["arena"], settings["arena_bytes"])
        self.slab = arena.view(Slab(name, settings["slab"], self.size, 0))
        self.seat = Gate(settings["gate"]).seat(seat, name, self.region.extent)
        self.mover = Counting()
        self.state = ResidentState(
            self.manifest, self.region.buffer, self.slab, mover=self.mover, chunk=settings.get("chunk", CHUNK)
        )

    def ready(self) -> dict:
        """How large it is."""
        return {"bytes": self.size, "tensors": sum(len(bucket.tensors) for bucket in self.manifest.buckets)}

    def enter(self) -> dict:
        """Come onto the device; first_ms: until the first layer could compute."""
        begun = time.monotonic()
        self.seat.come()
        self.device.map(self.region)
        first = self.state.load(BUCKETS[:1], self.seat)
        usable = time.monotonic()
        rest = self.state.pull(*BUCKETS, seat=self.seat)
        self.seat.held()
        return {
            "begun": begun,
            "ended": time.monotonic(),
            "bytes": first.bytes_in + rest.bytes_in,
            "waited_s": first.waited_s + rest.waited_s,
            "first_ms": (usable - begun) * 1e3,
        }

    def leave(self, dirty: tuple[str, ...] = BUCKETS, zero: tuple[str, ...] = ()) -> dict:
        """Leave the device after something has written to these buckets and zeroed those."""
        for bucket in dirty:
            self.state.mark(bucket, DIRTY)
        for bucket in zero:
            self.state.mark(bucket, ZERO)
        begun = time.monotonic()
        self.seat.leave()
        moved = self.state.offload(self.seat)
        self.device.unmap(self.region)
        self.seat.gone()
        return {"begun": begun, "ended": time.monotonic(), "bytes": moved.bytes_out}

    def write(self, seed: int) -> dict:
        """New contents on the device; their digest."""
        words = self.region.buffer.view(torch.int64)
        # Each word differs from all others of both ranks, and from what any other place would hold.
        torch.arange(seed, seed + 2 * words.numel(), 2, out=words).mul_(0x9E3779B1)
        for bucket in BUCKETS:
            self.state.mark(bucket, DIRTY)
        return self.digest("device")

    def digest(self, where: str) -> dict:
        """where: "device" or "host"."""
        there = self.region.buffer if where == "device" else self.slab
        return {"digest": xxhash.xxh3_64_hexdigest(there.numpy())}

    def adopt(self) -> dict:
        """The slab holds what the other rank left there: it is this one's state now."""
        for bucket in BUCKETS:
            self.state.mark(bucket, CLEAN)
        return {}

    def plain(self) -> dict:
        """One memcpy of the whole size, slab to device, which both have the same bytes: on the device and clean."""
        begun = time.monotonic()
        ctypes.memmove(self.region.buffer.data_ptr(), self.slab.data_ptr(), self.size)
        return {"begun": begun, "ended": time.monotonic(), "bytes": self.size}

    def allocations(self) -> dict:
        """Buffers made by leaving and entering."""

        def switch() -> None:
            self.leave()
            self.enter()

        return {"count": allocations(switch)}

    def step(self) -> dict:
        """Leave after a training step, gradients zeroed, and enter: bytes that were copied and that had to be."""
        sizes = {bucket.name: bucket.size for bucket in self.manifest.buckets}
        self.region.buffer[self.manifest.buckets[2].offset :][: sizes["grads"]].zero_()
        before = self.mover.copied
        self.leave(("first", "weights", "moment1", "moment2"), ("grads",))
        self.enter()
        return {"moved": self.mover.copied - before, "minimum": 2 * (self.size - sizes["grads"])}

    def clean(self) -> dict:
        """Leave with nothing written: bytes of the slab that were written although the device's are no newer."""
        self.slab.fill_(0xA5)
        counted = self.leave(())["bytes"]
        zeros = next(bucket for bucket in self.manifest.buckets if bucket.name == "grads")
        self.slab[zeros.offset : zeros.offset + zeros.size].fill_(0xA5)
        return {"bytes": max(counted, differing(self.slab, 0xA5))}

    def usage(self) -> dict:
        """What this process holds of the machine; host_bytes: its own, without the arena and shared files."""
        gc.collect()
        rollup = dict(line.split(":") for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
        return {
            "descriptors": len(os.listdir("/proc/self/fd")),
            "mappings": len(Path("/proc/self/maps").read_text().splitlines()),
            "host_bytes": int(rollup["Anonymous"].split()[0]) * 1024,
        }


class Naive:
    """The same tensors, each for itself in the process's own memory: what `.to()` does to them."""

    def __init__(self, settings: dict) -> None:
        manifest = layout(settings["bytes"], settings["tensors"])
        shapes = [spec.shape for bucket in manifest.buckets for spec, _ in bucket.tensors]
        self.tensors = [torch.empty(shape).fill_(1.0) for shape in shapes]

    def ready(self) -> dict:
        """How many there are."""
        return {"tensors": len(self.tensors)}

    def switch(self) -> dict:
        """Every tensor into fresh memory, the old one dropped, and the same again."""
        begun = time.monotonic()
        for _ in range(2):
            for i, tensor in enumerate(self.tensors):
                self.tensors[i] = tensor.to(tensor.device, copy=True)
        return {"seconds": time.monotonic() - begun}


if __name__ == "__main__":
    torch.set_num_threads(1)
    told = json.loads(sys.argv[1])
    serve(Naive(told) if "seat" not in told else Rank(told))
