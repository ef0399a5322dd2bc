"""A deployment's tensors under ZeRO at one place: views of its buckets."""

from __future__ import annotations

import torch
from torch import Tensor

from plexrl.engines import layout
from plexrl.engines.deepspeed.partition import FLAT, TAIL, Partition
from plexrl.engines.torch.files import SPARE
from plexrl.engines.torch.form import weight_buckets
from plexrl.engines.torch.home import slices
from plexrl.engines.torch.pieces import Piece, whole
from plexrl.memory.manifest import Manifest


class ZeroHeld:
    """torch.form.Held.

    flat: all weights (stage 3: this rank's part of them). own: of the weights, the elements that this rank steps.
    master: the same in float32; own itself where weights are float32.
    """

    def __init__(self, plan: Manifest, place: Tensor, specs: list[layout.Spec], cuts: Partition, rank: int) -> None:
        """specs: of the weights."""
        self.cuts = cuts
        self.rank = rank
        self._specs = specs
        found = plan.views(place)
        self._flats = slices(plan, place)
        stages = weight_buckets(plan)
        size = sum(len(self._flats[stage]) for stage in stages)
        held = place[plan.buckets[0].offset :][:size]
        flat = held.view(getattr(torch, specs[0][2]))
        if cuts.stage == 3:
            self.weights = None
            self.flat = self.own = flat[: cuts.part]
        else:
            self.weights = held[: layout.packed(specs)]
            self.flat = flat[: cuts.total]
            self.own = self.flat[rank * cuts.part : (rank + 1) * cuts.part]
            self.named = {name: view for stage in stages for name, view in found[stage].items() if name != TAIL}
        self.grads = self._flats["grads"].view(torch.float32)
        self.grad_views = found["grads"]
        self.master = found["master"][FLAT] if "master" in found else self.own
        self.moments = tuple(found[part][FLAT] for part in ("moment1", "moment2"))
        self.counter = found["steps"]["step"]
        self._generator = found["rng"]["generator"]

    def pieces(self, part: str) -> dict[str, Piece]:
        """See Held."""
        if part == "weights":
            return whole(self.named) if self.cuts.stage < 3 else self._cut(self.own)
        return self._cut({"moment1": self.moments[0], "moment2": self.moments[1], "master": self.master}[part])

    def stepping(self) -> dict[str, Piece]:
        """See Held."""
        parts = ("moment1", "moment2") if self.master is self.own else ("moment1", "moment2", "master")
        named = {f"{part}.{name}": piece for part in parts for name, piece in self.pieces(part).items()}
        return named | whole({"step": self.counter, "rng": self._generator})

    def clear(self, part: str) -> None:
        """See Held."""
        self._flats[part].zero_()

    def renew(self, read: set[str]) -> None:
        """See Held. The float32 copy, unless it was read too."""
        if self.master is not self.own and not any(name.startswith(SPARE) for name in read):
            self.master.copy_(self.own)

    def _cut(self, values: Tensor) -> dict[str, Piece]:
        ranks = range(self.cuts.world)
        pieces = {}
        for name, shape, _ in self._specs:
            cut = self.cuts.cut(name, self.rank)
            counts = tuple(self.cuts.cut(name, rank).count for rank in ranks) if len(ranks) > 1 else ()
            pieces[name] = Piece(shape, values[cut.at : cut.at + cut.count], cut.start, counts)
        return pieces
