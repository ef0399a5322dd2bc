"""`python -m bench.switch --device cpu [--json]`: what a switch of 1 GiB in 300 tensors costs on the cpu device.

A regression guard: it holds the hot path free of allocations and of clean bytes. It says nothing about GPUs.
"""

import argparse
import json
import resource
import statistics
import sys
import time
import tracemalloc

import torch
from torch.profiler import ProfilerActivity, profile

from plexrl.memory.arena import Arena, ArenaMap
from plexrl.memory.device import CpuDevice, create_memfd
from plexrl.memory.manifest import Manifest, TensorSpec
from plexrl.memory.resident import DIRTY, ResidentState
from plexrl.types import BadInput, Extent, PlexrlError

GIB = 1 << 30
BUCKETS = ("weights", "grads", "moment1", "moment2")
TENSORS = 300
REPEATS = 7
PYTHON_NOISE = 4096
"""Bytes. Counters and the Moved record are Python objects of some dozen bytes; a buffer is larger than this."""


def layout(total: int = GIB, tensors: int = TENSORS) -> Manifest:
    """`tensors` float32 tensors of uneven sizes that fill `total` bytes with their padding, in the four buckets."""
    each, per_bucket = tensors // len(BUCKETS), total // len(BUCKETS)
    unit = per_bucket // (4 * each * (each + 1) // 2)
    specs = [TensorSpec(f"t{i}", (unit * (i + 1),), "float32") for i in range(each - 1)]
    rest = per_bucket - Manifest.build({"": specs}).size
    specs.append(TensorSpec(f"t{each - 1}", (rest // 4,), "float32"))
    return Manifest.build(dict.fromkeys(BUCKETS, specs))


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
    return sum(int(torch.count_nonzero(piece != byte)) for piece in buffer.split(64 << 20))


def measure(total: int, repeats: int, say) -> dict:
    """All figures. GB/s are 1e9 bytes copied per second, medians of `repeats`, one thread, touched memory."""
    torch.set_num_threads(1)
    manifest = layout(total)
    device_fd, arena_fd = create_memfd("bench-device", manifest.size), create_memfd("bench-arena", manifest.size)
    device, arena = CpuDevice(device_fd, manifest.size), Arena(arena_fd, manifest.size)
    region = device.reserve(Extent(0, manifest.size))
    device.map(region)
    slab = ArenaMap(arena_fd, manifest.size).view(arena.alloc("state", manifest.size, 0))
    state = ResidentState(manifest, region.buffer, slab)
    source = torch.full((manifest.size,), 1, dtype=torch.uint8)
    target = torch.full((manifest.size,), 2, dtype=torch.uint8)

    def dirty() -> None:
        for bucket in BUCKETS:
            state.mark(bucket, DIRTY)

    def switch() -> None:
        dirty()
        state.offload()
        state.load()

    state.load()
    region.buffer.copy_(source)
    switch()
    plain, out, back, faults = [], [], [], []
    for i in range(repeats):
        start = time.perf_counter()
        target.copy_(source)
        plain.append(manifest.size / (time.perf_counter() - start) / 1e9)
        dirty()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        left, came = state.offload(), state.load()
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
        out.append(left.bytes_out / left.seconds / 1e9)
        back.append(came.bytes_in / came.seconds / 1e9)
        say(f"repeat {i + 1} of {repeats}: plain {plain[-1]:.1f}, out {out[-1]:.1f}, in {back[-1]:.1f} GB/s")
    say("counting allocations")
    made = allocations(switch)
    say("counting clean bytes")
    # Nothing is dirty now. Whatever of this pattern is gone afterwards was copied out although it was clean.
    slab.fill_(0xA5)
    counted = state.offload().bytes_out
    return {
        "plain_copy_gbs": round(statistics.median(plain), 2),
        "offload_gbs": round(statistics.median(out), 2),
        "load_gbs": round(statistics.median(back), 2),
        "hot_path_allocations": made,
        "hot_path_page_faults": int(statistics.median(faults)),
        "clean_bytes_out": max(counted, differing(slab, 0xA5)),
        "bytes": manifest.size,
        "tensors": sum(len(bucket.tensors) for bucket in manifest.buckets),
        "repeats": repeats,
        "device": "cpu",
    }


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.switch", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="whose memory (default: cpu)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    args = parser.parse_args(argv)
    try:
        if args.device == "cuda":
            raise BadInput(
                "the cuda device is not built yet; it belongs to the issue 'Fast switches'", "Use --device cpu"
            )
        figures = measure(GIB, REPEATS, lambda line: print(f"bench.switch: {line}", file=sys.stderr))
    except PlexrlError as error:
        print(f"bench.switch: {error}", file=sys.stderr)
        return error.exit_code
    if args.json:
        print(json.dumps(figures))
        return 0
    print(f"Switching {figures['bytes']:,} bytes in {figures['tensors']} tensors on the cpu device, one thread")
    print("regression guard, says nothing about GPUs")
    print(f"  plain copy    {figures['plain_copy_gbs']:8.2f} GB/s (reference, same run)")
    print(f"  offload       {figures['offload_gbs']:8.2f} GB/s")
    print(f"  load          {figures['load_gbs']:8.2f} GB/s")
    print(f"  allocations   {figures['hot_path_allocations']:8d} in the hot path")
    print(f"  page faults   {figures['hot_path_page_faults']:8d} in the hot path")
    print(f"  clean bytes   {figures['clean_bytes_out']:8d} copied out")
    return 0


if __name__ == "__main__":
    sys.exit(main())
