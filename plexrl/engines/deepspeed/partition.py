"""Which elements of which tensor a rank has under ZeRO: from shapes alone.

Stages 1 and 2 cut one flat buffer of all tensors into equal parts. It is laid out as `layout.packed` lays a bucket out,
so that the weights are a snapshot as they lie there. Stage 3 cuts every tensor by itself.
"""

from __future__ import annotations

import math

from msgspec import Struct

from plexrl.engines import layout

FLAT = "flat"
"""Name of the one tensor of a bucket that holds a rank's part."""
TAIL = "tail"
"""Name of the elements after the last tensor that make the parts even."""


class Cut(Struct, frozen=True):
    """Elements [start, start + count) of a flattened tensor are a rank's, and lie at `at` of its part."""

    start: int
    count: int
    at: int


class Partition:
    """All tensors of a deployment, in order, over the ranks of a gang.

    total: elements of the flat buffer. part: of a rank's part; the same for all ranks.
    gaps: elements before each tensor so that it begins on a 64-byte boundary; `after`: behind the last one.
    """

    def __init__(self, weights: list[layout.Spec], stage: int, world: int) -> None:
        """weights: of one dtype."""
        self.stage = stage
        self.world = world
        self._shapes = {name: shape for name, shape, _ in weights}
        self._starts: dict[str, int] = {}
        self.gaps: dict[str, int] = {}
        at = 0
        for name, shape, dtype in weights:
            item = layout.ITEMSIZE[dtype]
            begin = at if stage == 3 else layout.align(at * item) // item
            self.gaps[name] = begin - at
            self._starts[name] = begin
            at = begin + (-(-math.prod(shape) // world) if stage == 3 else math.prod(shape))
        item = layout.ITEMSIZE[weights[0][2]]
        packed = layout.packed(weights) // item
        # ZeRO 1 and 2 want parts whose 2-byte elements begin on 4-byte boundaries.
        self.total = at * world if stage == 3 else -(-packed // (2 * world)) * 2 * world
        self.after = 0 if stage == 3 else packed - at
        self.tail = 0 if stage == 3 else self.total - packed
        self.part = self.total // world

    def cut(self, name: str, rank: int) -> Cut:
        """What of this tensor is the rank's; count may be 0."""
        size, begin = math.prod(self._shapes[name]), self._starts[name]
        if self.stage == 3:
            each = -(-size // self.world)
            start = min(rank * each, size)
            return Cut(start, min(each, size - start), begin)
        low, high = max(begin, rank * self.part), min(begin + size, (rank + 1) * self.part)
        if low >= high:
            return Cut(0, 0, 0)
        return Cut(low - begin, high - low, low - rank * self.part)


def buckets(weights: list[layout.Spec], parts: layout.Buckets | None, stage: int, world: int) -> layout.Buckets:
    """A deployment's training state on one rank; the same sizes on all. parts: the weights in several buckets.

    Moments, and what is kept of bfloat16 weights beside them (`master`), are float32; gradients too.
    """
    cuts = Partition(weights, stage, world)
    dtype = weights[0][2]
    part = [(FLAT, (cuts.part,), "float32")]
    if stage == 3:
        held = {"weights.0000": [(FLAT, (cuts.part,), dtype)]}
    else:
        held = {name: list(specs) for name, specs in (parts or {"weights": weights}).items()}
        if cuts.tail:
            list(held.values())[-1].append((TAIL, (cuts.tail,), dtype))
    return {
        **held,
        "grads": [(name, shape, "float32") for name, shape, _ in weights] if stage == 1 else part,
        **({} if dtype == "float32" else {"master": part}),
        "moment1": part,
        "moment2": part,
        **layout.state_ends(),
    }
