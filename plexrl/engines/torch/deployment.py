"""A deployment's training state: its tensors at one place on the device, and how it is saved."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from plexrl.engines.torch import adam, files
from plexrl.engines.torch.home import Home
from plexrl.engines.torch.lora import Shape, peft_config
from plexrl.memory.manifest import Manifest
from plexrl.memory.resident import CLEAN, DIRTY, ZERO, ResidentState
from plexrl.types import Residency

_MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


class Bound:
    """The tensors at one place for one shape of state: views, made once. The module's parameters are among them."""

    def __init__(self, layout: Manifest, place: Tensor, dtype: torch.dtype) -> None:
        self.views = layout.views(place)
        flat = {b.name: place[b.offset : b.offset + b.size] for b in layout.buckets}
        self.weights = flat["weights"]
        self.grads = flat["grads"].view(dtype)
        self.adam = adam.Adam(
            flat["weights"].view(dtype),
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

    def __init__(self, shape: Shape | None, state: ResidentState, memory: Tensor) -> None:
        """memory: the bytes of its slab."""
        self.shape = shape
        self.state = state
        self._memory = memory

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
        bound.grads.zero_()
        self.state.mark("grads", ZERO)

    def loaded(self, bound: Bound, optimizer: bool) -> None:
        """Weights (and optimizer) were written where the state is: the rest starts at zero."""
        written = DIRTY if self.state.residency is Residency.DEVICE else CLEAN
        self.state.mark("weights", written)
        for name in ("moment1", "moment2", "steps"):
            if not optimizer:
                for tensor in bound.views[name].values():
                    tensor.zero_()
            self.state.mark(name, written if optimizer else ZERO)
        if optimizer:
            self.state.mark("rng", written)
        self.clear_grads(bound)
