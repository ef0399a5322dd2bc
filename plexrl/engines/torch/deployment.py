"""A deployment's training state: its tensors at one place on the device, and how it is saved."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from plexrl.engines.torch import adam, files, header
from plexrl.engines.torch.home import Home, slices
from plexrl.engines.torch.lora import Shape, peft_config
from plexrl.memory.manifest import Manifest
from plexrl.memory.resident import CLEAN, DIRTY, ZERO, BucketState, ResidentState
from plexrl.types import BadInput, Residency, Slab

_MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


OPTIMIZER = ("moment1", "moment2", "steps")
"""What only an optimizer step and a saved state need."""


def weight_buckets(layout: Manifest) -> tuple[str, ...]:
    """The buckets that hold the weights, in their order: one, or one per stage."""
    return tuple(bucket.name for bucket in layout.buckets if bucket.name.partition(".")[0] == "weights")


class Bound:
    """The tensors at one place for one shape of state: views, made once. The module's parameters are among them."""

    def __init__(self, layout: Manifest, place: Tensor, dtype: torch.dtype) -> None:
        found = layout.views(place)
        flat = slices(layout, place)
        # The weights' buckets are the first ones, side by side.
        stages = weight_buckets(layout)
        self.views = {name: views for name, views in found.items() if name not in (*stages, "header")}
        self.views["weights"] = {name: tensor for stage in stages for name, tensor in found[stage].items()}
        self.weights = place[layout.buckets[0].offset :][: sum(len(flat[stage]) for stage in stages)]
        self.grads = flat["grads"].view(dtype)
        self.adam = adam.Adam(
            self.weights.view(dtype),
            self.grads,
            flat["moment1"].view(dtype),
            flat["moment2"].view(dtype),
            self.views["steps"]["step"],
        )

    def optimizer(self) -> dict[str, Tensor]:
        """What a saved optimizer holds, by name."""
        tensors = {f"{part}.{name}": t for part in ("moment1", "moment2") for name, t in self.views[part].items()}
        return tensors | {"step": self.views["steps"]["step"], "rng": self.views["rng"]["generator"]}


class Deployment:
    """One model's training state and where it is. shape None: full parameters."""

    def __init__(self, shape: Shape | None, state: ResidentState, memory: Tensor, slab: Slab) -> None:
        """memory: the bytes of its slab."""
        self.shape = shape
        self.state = state
        self.slab = slab
        self.half_done = False  # a call has begun and not ended
        self._memory: Tensor | None = memory
        self._weights = weight_buckets(state.manifest)
        self._form = header.form_of(state.manifest)

    @property
    def on_device(self) -> bool:
        """Whether it is on the device; of its buckets some may still be on the host."""
        return self.state.residency is Residency.DEVICE

    def buckets(self, *parts: str) -> list[str]:
        """The buckets of "weights", "grads", "moment1" and so on, in the order of their places."""
        wanted = {name for part in parts for name in (self._weights if part == "weights" else (part,))}
        return [bucket.name for bucket in self.state.manifest.buckets if bucket.name in wanted]

    def mark(self, part: str, state: BucketState) -> None:
        """state.mark of all its buckets."""
        for bucket in self.buckets(part):
            self.state.mark(bucket, state)

    def check(self, what: str) -> None:
        """Raises BadInput while the state is on NVMe."""
        if self._memory is None:
            raise BadInput(f"deployment {what!r} is spilled to NVMe", "Refill its slab first")

    def settled(self) -> None:
        """The slab is the state now, and says so."""
        zero = tuple(b.name for b in self.state.manifest.buckets if b.size and self.state.state(b.name) is ZERO)
        self._note(header.Header(self._form, zero, not self.half_done))

    def away(self) -> None:
        """The slab may no longer be the state from now on, and says so."""
        self._note(header.Header(self._form))

    def adopt(self) -> None:
        """Take the state that the slab holds. Raises PlexrlError unless it is whole and of this form."""
        zero = header.read(self._place("header"), self._form).zero
        for bucket in self.state.manifest.buckets:
            if bucket.size:
                self.state.mark(bucket.name, ZERO if bucket.name in zero else CLEAN)

    def _note(self, what: header.Header) -> None:
        header.write(self._place("header"), what)

    def _place(self, bucket: str) -> Tensor:
        return slices(self.state.host, self._memory)[bucket]

    def spill(self, what: str) -> None:
        """Let go of the slab. Raises BadInput unless the state is on the host."""
        self.check(what)
        if self.state.residency is not Residency.HOST:
            raise BadInput(f"deployment {what!r} is {self.state.residency} and cannot be spilled", "Offload it first")
        self.state.rehome(None)
        self._memory = None

    def rehome(self, memory: Tensor, slab: Slab) -> None:
        """The state's bytes are in this slab now."""
        self.state.rehome(memory)
        self._memory, self.slab = memory, slab

    def at_home(self, dtype: torch.dtype) -> Bound:
        """The tensors in the host slab. They are the state only while it is on the host."""
        return Bound(self.state.host, self._memory, dtype)

    def stored(self, bound: Bound, folder: Path, optimizer: bool) -> Iterator[tuple[Path, dict[str, Tensor]]]:
        """The files of a saved state, and the tensors that they are of."""
        yield (
            folder / ("model.safetensors" if self.shape is None else "adapter_model.safetensors"),
            bound.views["weights"],
        )
        if optimizer:
            yield folder / "optimizer.safetensors", bound.optimizer()

    def write(self, home: Home, bound: Bound, work: Path, optimizer: bool) -> None:
        """Fill a folder with the state, so that transformers or peft can load it too."""
        for path, tensors in self.stored(bound, work, optimizer):
            files.write_tensors(path, tensors, {"format": "pt"})
        if self.shape is None:
            files.copy_files(home.spec.model_dir, work, _MODEL_FILES)
        else:
            config = peft_config(self.shape, home.arch, home.spec.model_dir)
            (work / "adapter_config.json").write_text(json.dumps(config, indent=1))

    def clear_grads(self, bound: Bound) -> None:
        """Gradients to zero, where the state is."""
        if not self.on_device or self.state.present("grads"):
            bound.grads.zero_()
        self.state.mark("grads", ZERO)

    def loaded(self, bound: Bound, optimizer: bool) -> None:
        """Weights (and optimizer) were written where the state is: the rest starts at zero."""
        written = DIRTY if self.on_device else CLEAN
        self.mark("weights", written)
        for name in OPTIMIZER:
            if not optimizer and (not self.on_device or self.state.present(name)):
                for tensor in bound.views[name].values():
                    tensor.zero_()
            self.state.mark(name, written if optimizer else ZERO)
        if optimizer:
            self.state.mark("rng", written)
        self.clear_grads(bound)
