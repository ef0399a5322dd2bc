"""What bench.switch_cuda compares with: `python -m bench.switch_plain BYTES`, one process, plain pinned copies.

Prints one JSON object: GB/s (1e9 bytes a second) out of the GPU, into it, and each way with both under way at once.
Medians of REPEATS; one buffer on each side, allocated before; no chunks.
"""

import json
import statistics
import sys
import time

import torch

REPEATS = 7


def measure(size: int) -> dict:
    """All figures; checks what it moved."""
    device = torch.device("cuda:0")
    there = [torch.full((size,), i, dtype=torch.uint8, device=device) for i in (1, 2)]
    host = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    streams = [torch.cuda.Stream(device) for _ in range(2)]

    def timed(out: bool, back: bool) -> float:
        torch.cuda.synchronize(device)
        begun = time.perf_counter()
        if out:
            with torch.cuda.stream(streams[0]):
                host[0].copy_(there[0], non_blocking=True)
        if back:
            with torch.cuda.stream(streams[1]):
                there[1].copy_(host[1], non_blocking=True)
        torch.cuda.synchronize(device)
        return size / (time.perf_counter() - begun) / 1e9

    host[1].fill_(7)
    figures = {}
    for name, ways in {"plain_out": (True, False), "plain_in": (False, True), "plain_both": (True, True)}.items():
        timed(*ways)
        figures[f"{name}_gbs"] = round(statistics.median(timed(*ways) for _ in range(REPEATS)), 2)
    if not bool((host[0] == 1).all()) or not bool((there[1] == 7).all()):
        raise SystemExit("the plain copies moved something else than they were given")
    return {**figures, "gpu": torch.cuda.get_device_name(device)}


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]))))
