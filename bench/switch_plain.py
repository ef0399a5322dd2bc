"""What bench.switch_cuda compares with, in one process: `python -m bench.switch_plain BYTES TENSORS`.

Plain pinned copies out of the GPU, into it, and both at once: one buffer on each side, allocated before, no chunks; and
per-tensor `.to()` into fresh memory, out and in again. Prints one JSON object; GB/s are 1e9 bytes a second, medians.
"""

import json
import statistics
import sys
import time

import torch

from bench.switch_rank import layout

REPEATS = 7
NAIVE_REPEATS = 2
DEVICE = "cuda:0"


def plain(size: int) -> dict:
    """GB/s of each direction; checks what it moved."""
    there = [torch.full((size,), i, dtype=torch.uint8, device=DEVICE) for i in (1, 2)]
    host = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    streams = [torch.cuda.Stream(DEVICE) for _ in range(2)]

    def timed(out: bool, back: bool) -> float:
        torch.cuda.synchronize(DEVICE)
        begun = time.perf_counter()
        if out:
            with torch.cuda.stream(streams[0]):
                host[0].copy_(there[0], non_blocking=True)
        if back:
            with torch.cuda.stream(streams[1]):
                there[1].copy_(host[1], non_blocking=True)
        torch.cuda.synchronize(DEVICE)
        return size / (time.perf_counter() - begun) / 1e9

    host[1].fill_(7)
    figures = {}
    for name, ways in {"plain_out": (True, False), "plain_in": (False, True), "plain_both": (True, True)}.items():
        timed(*ways)
        figures[f"{name}_gbs"] = round(statistics.median(timed(*ways) for _ in range(REPEATS)), 2)
    if not bool((host[0] == 1).all()) or not bool((there[1] == 7).all()):
        raise SystemExit("the plain copies moved something else than they were given")
    return figures


def naive(size: int, tensors: int) -> dict:
    """Seconds for every tensor to the host and back, as frameworks do it."""
    specs = [spec for bucket in layout(size, tensors).buckets for spec, _ in bucket.tensors]
    held = [torch.ones(spec.shape, device=DEVICE) for spec in specs]
    seconds = []
    for _ in range(NAIVE_REPEATS):
        torch.cuda.synchronize(DEVICE)
        begun = time.perf_counter()
        for where in ("cpu", DEVICE):
            for i, tensor in enumerate(held):
                held[i] = tensor.to(where)
        torch.cuda.synchronize(DEVICE)
        seconds.append(time.perf_counter() - begun)
    return {"naive_seconds": round(statistics.median(seconds), 3)}


if __name__ == "__main__":
    told = [int(word) for word in sys.argv[1:]]
    measured = {**plain(told[0]), "gpu": torch.cuda.get_device_name(DEVICE)}
    torch.cuda.empty_cache()
    print(json.dumps({**measured, **naive(*told)}))
