"""What all ranks of bench.switch share: how they are told what to do, digests of what they hold, rates."""

import json
import sys

import torch

from plexrl.types import PlexrlError

PIECE = 8 << 20
"""Words that are digested at once."""


def digest(buffer: torch.Tensor) -> int:
    """64 bits of where each 8 bytes of `buffer` stand and what they are; the same on any device."""
    words, total = buffer.view(torch.int64), 0
    for start in range(0, words.numel(), PIECE):
        piece = words[start : start + PIECE]
        places = torch.arange(start, start + piece.numel(), device=buffer.device).mul_(2).add_(1)
        total += int((piece * places).sum())
    return total & (2**64 - 1)


def rate(moved: dict) -> float:
    """GB/s: 1e9 bytes a second."""
    return moved["bytes"] / (moved["ended"] - moved["begun"]) / 1e9


def serve(rank: object) -> None:
    """Say what `rank.ready()` is, then answer lines until there are no more; each names a method and its arguments."""
    print(json.dumps(rank.ready()), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        try:
            answer = getattr(rank, order.pop("do"))(**order)
        except PlexrlError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)
