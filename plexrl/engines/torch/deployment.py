"""A deployment's training state: its tensors at one place on the device, and how it is saved."""

from __future__ import annotations

import json
from pathlib import Path

from torch import Tensor

from plexrl.engines.torch import files, header
from plexrl.engines.torch.form import OPTIMIZER, Form, Held, weight_buckets
from plexrl.engines.torch.home import Home, slices
from plexrl.engines.torch.lora import Shape, peft_config
from plexrl.engines.torch.pieces import Pieces
from plexrl.memory.resident import CLEAN, DIRTY, ZERO, BucketState, ResidentState
from plexrl.types import BadInput, Residency, Slab

OPTIMIZER_FILE = "optimizer.safetensors"
_MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


class Deployment:
    """One model's training state and where it is. shape None: full parameters."""

    def __init__(self, form: Form, shape: Shape | None, state: ResidentState, memory: Tensor, slab: Slab) -> None:
        """memory: the bytes of its slab."""
        self.form = form
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

    def at_home(self) -> Held:
        """The tensors in the host slab. They are the state only while it is on the host."""
        return self.form.at_home(self.state.host, self._memory, self.shape)

    def stored(self, held: Held, optimizer: bool) -> list[tuple[str, Pieces]]:
        """The files of a saved state by name, and what this rank has of their tensors."""
        name = "model.safetensors" if self.shape is None else "adapter_model.safetensors"
        return [(name, held.pieces("weights"))] + ([(OPTIMIZER_FILE, held.stepping())] if optimizer else [])

    def complete(self, home: Home, work: Path) -> None:
        """Put beside the weights in a folder what transformers or peft want to load them."""
        if self.shape is None:
            files.copy_files(home.spec.model_dir, work, _MODEL_FILES)
        else:
            config = peft_config(self.shape, home.arch, home.spec.model_dir)
            (work / "adapter_config.json").write_text(json.dumps(config, indent=1))

    def clear_grads(self, held: Held) -> None:
        """Gradients to zero, where the state is."""
        if not self.on_device or self.state.present("grads"):
            held.clear("grads")
        self.state.mark("grads", ZERO)

    def loaded(self, held: Held, optimizer: bool, read: set[str]) -> None:
        """Weights (and of the optimizer these names) were written where the state is: the rest starts at zero."""
        written = DIRTY if self.on_device else CLEAN
        held.renew(read)
        self.mark("weights", written)
        for name in self.form.optimizer:
            kept = optimizer or name not in OPTIMIZER
            if not kept and (not self.on_device or self.state.present(name)):
                held.clear(name)
            self.state.mark(name, written if kept else ZERO)
        if optimizer:
            self.state.mark("rng", written)
        self.clear_grads(held)
