"""How a deployment's tensors lie in its buckets, and what steps them: the form of a trainer's states.

`Whole` is the torch engine's: every rank has all of it. engines/deepspeed has another one.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from plexrl.engines import layout
from plexrl.engines.torch import adam, batch, microbatch
from plexrl.engines.torch.gang import Gang
from plexrl.engines.torch.home import Home, slices
from plexrl.engines.torch.lora import Adapters, Shape
from plexrl.engines.torch.model import bind
from plexrl.engines.torch.pieces import Piece, whole
from plexrl.memory.manifest import Manifest

OPTIMIZER = ("moment1", "moment2", "steps")
"""What only an optimizer step and a saved state need, and what is zero before the first step."""


def weight_buckets(plan: Manifest) -> tuple[str, ...]:
    """The buckets that hold the weights, in their order: one, or one per stage."""
    return tuple(bucket.name for bucket in plan.buckets if bucket.name.partition(".")[0] == "weights")


class Held(Protocol):
    """The tensors of a deployment at one place, on the device or at home: views.

    weights: bytes of a snapshot; None when no rank has all of it. grads: all gradients of this rank, 1-D.
    """

    weights: Tensor | None
    grads: Tensor

    def pieces(self, part: str) -> dict[str, Piece]:
        """What this rank has of "weights", "moment1" and so on, by the tensors' names, in order."""

    def stepping(self) -> dict[str, Piece]:
        """What a saved optimizer holds, by name."""

    def clear(self, part: str) -> None:
        """Zero the part."""

    def renew(self, read: set[str]) -> None:
        """The weights were written, and of `stepping` these names: make what follows from the weights."""


class Bound(Held, Protocol):
    """Held on the device, with the module wired to it. Between two calls it may have been away."""

    def ready(self) -> None:
        """Before the first computation after the state came in; with `Form.together` a collective."""

    def forward(self, work: batch.Batch, data: list[batch.Datum], train: bool) -> tuple[Tensor, Tensor]:
        """See microbatch.forward."""

    def backward(self, value: Tensor) -> None:
        """Add the gradients of a loss to those that are there."""

    def step(self, params: adam.AdamParams, gang: Gang) -> float:
        """Sum gradients over ranks, clip, step; gradients become zero. The norm before clipping.

        When it is not finite nothing is changed but gradients, which have no meaning then.
        """


class Form(Protocol):
    """optimizer: the buckets that only a step and a saved state need.

    together: ranks bring a deployment in all at once before they compute. in_step: they also run as many micro-batches,
    each in step with the others, because there are collectives inside.
    """

    optimizer: tuple[str, ...]
    together: bool
    in_step: bool

    def buckets(self, weights: list[layout.Spec], parts: layout.Buckets | None) -> layout.Buckets:
        """A state's buckets. parts: the weights in one bucket per stage."""

    def at_home(self, plan: Manifest, memory: Tensor, shape: Shape | None) -> Held:
        """A state in its slab. shape None: full parameters."""

    def on_device(
        self, plan: Manifest, place: Tensor, shape: Shape | None, slot: int | None, adapters: Adapters | None
    ) -> Bound:
        """A state at a place of the region: an adapter's slot, or (shape None) the model's. Once for each."""


class Tensors:
    """Held: every rank has all of it, in `layout.state_buckets`."""

    def __init__(self, plan: Manifest, place: Tensor, dtype: torch.dtype) -> None:
        found = plan.views(place)
        self._flat = slices(plan, place)
        # The weights' buckets are the first ones, side by side.
        stages = weight_buckets(plan)
        self.views = {name: views for name, views in found.items() if name not in (*stages, "header")}
        self.views["weights"] = {name: tensor for stage in stages for name, tensor in found[stage].items()}
        self.weights = place[plan.buckets[0].offset :][: sum(len(self._flat[stage]) for stage in stages)]
        self.grads = self._flat["grads"].view(dtype)

    def pieces(self, part: str) -> dict[str, Piece]:
        """See Held."""
        return whole(self.views[part])

    def stepping(self) -> dict[str, Piece]:
        """See Held."""
        tensors = {f"{part}.{name}": t for part in ("moment1", "moment2") for name, t in self.views[part].items()}
        return whole(tensors | {"step": self.views["steps"]["step"], "rng": self.views["rng"]["generator"]})

    def clear(self, part: str) -> None:
        """See Held."""
        self._flat[part].zero_()

    def renew(self, read: set[str]) -> None:
        """See Held. Nothing does."""


class Trained(Tensors):
    """Bound: torch.optim.AdamW over the flat buckets."""

    def __init__(self, home: Home, plan: Manifest, place: Tensor, dtype: torch.dtype) -> None:
        super().__init__(plan, place, dtype)
        self._model = home.model
        self.adam = adam.Adam(
            self.weights.view(dtype),
            self.grads,
            self._flat["moment1"].view(dtype),
            self._flat["moment2"].view(dtype),
            self.views["steps"]["step"],
        )

    def ready(self) -> None:
        """See Bound."""

    def forward(self, work: batch.Batch, data: list[batch.Datum], train: bool) -> tuple[Tensor, Tensor]:
        """See Bound."""
        return microbatch.forward(self._model, work, data, train)

    def backward(self, value: Tensor) -> None:
        """See Bound."""
        value.backward()

    def step(self, params: adam.AdamParams, gang: Gang) -> float:
        """See Bound."""
        gang.sum(self.grads)
        return self.adam.step(params)


class Whole:
    """Form: replicas."""

    optimizer = OPTIMIZER
    together = in_step = False

    def __init__(self, home: Home, gang: Gang) -> None:
        self._home = home

    def buckets(self, weights: list[layout.Spec], parts: layout.Buckets | None) -> layout.Buckets:
        """See Form."""
        return layout.state_buckets(weights, parts)

    def at_home(self, plan: Manifest, memory: Tensor, shape: Shape | None) -> Tensors:
        """See Form."""
        return Tensors(plan, memory, self._dtype(shape))

    def on_device(
        self, plan: Manifest, place: Tensor, shape: Shape | None, slot: int | None, adapters: Adapters | None
    ) -> Trained:
        """See Form."""
        made = Trained(self._home, plan, place, self._dtype(shape))
        if shape is None:
            bind(self._home.model, made.views["weights"], made.views["grads"])
        else:
            adapters.ensure(slot, shape, made.views["weights"], made.views["grads"])
        return made

    def _dtype(self, shape: Shape | None) -> torch.dtype:
        return self._home.dtype if shape is None else torch.float32
