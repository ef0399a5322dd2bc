"""LoRA adapters as peft modules over device slots.

peft makes the modules and their names. A module belongs to a (slot, shape): its parameters are views of the slot for
good, and an adapter is used by being copied into the slot, so switching adapters copies bytes and builds nothing.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from types import MethodType

import torch
from msgspec import Struct
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from plexrl.engines.layout import PEFT_PREFIX, Architecture, adapted
from plexrl.engines.torch.model import parameter_over
from plexrl.engines.torch.pieces import Pieces

# The client sends no alpha, and Tinker's own is not public: 32 for every rank is ours (scaling 32 / rank).
ALPHA = 32


class Shape(Struct, frozen=True):
    """What an adapter's tensors depend on."""

    rank: int
    attn: bool
    mlp: bool
    unembed: bool

    @property
    def scaling(self) -> float:
        """Factor of B A x: alpha / rank (LoRA, arXiv 2106.09685, section 4.1)."""
        return ALPHA / self.rank


class Selector:
    """Which adapter the model uses now; every adapted module reads it."""

    def __init__(self) -> None:
        self.name: str | None = None


class Adapters:
    """The adapter modules of one model."""

    def __init__(self, model: PreTrainedModel, arch: Architecture) -> None:
        self._model = model
        self._arch = arch
        self._selector = Selector()
        self._known: dict[str, dict[str, nn.Parameter]] = {}

    def use(self, slot: int | None, shape: Shape | None = None) -> None:
        """Adapt by what lies in the slot; None: the plain base."""
        self._selector.name = None if slot is None or shape is None else _name(slot, shape)

    def ensure(
        self, slot: int, shape: Shape, weights: Mapping[str, Tensor], grads: Mapping[str, Tensor] | None = None
    ) -> dict[str, nn.Parameter]:
        """Make the modules of (slot, shape) over these views, once: their parameters. With grads they train."""
        name = _name(slot, shape)
        if name in self._known:
            return self._known[name]
        made: dict[str, nn.Parameter] = {}
        targets = adapted(self._arch, shape.attn, shape.mlp, shape.unembed)
        config = LoraConfig(r=shape.rank, lora_alpha=ALPHA, lora_dropout=0.0, target_modules=list(targets), bias="none")
        with warnings.catch_warnings():
            # Several adapters and an adapter on a tied head are what we want; the head's base weight is not trained.
            warnings.filterwarnings("ignore", message="Already found a `peft_config`")
            warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True`")
            inject_adapter_in_model(config, self._model, name, low_cpu_mem_usage=True)
        for path in targets:
            layer = self._model.get_submodule(path)
            if not isinstance(layer, LoraLayer):
                raise TypeError(f"peft made no LoRA layer of {path}")
            for part in ("lora_A", "lora_B"):
                key = f"{PEFT_PREFIX}{path}.{part}.weight"
                made[key] = parameter_over(weights[key], grads[key] if grads else None)
                getattr(layer, part)[name].weight = made[key]
            layer.forward = MethodType(_forward(self._selector), layer)
        self._known[name] = made
        return made


def initialise(pieces: Pieces, seed: int) -> torch.Generator:
    """A as peft draws it (kaiming uniform with a = sqrt 5: bound 1/sqrt(in)), B zero. Returns the used generator."""
    generator = torch.Generator().manual_seed(seed % 2**63)
    for name, piece in pieces.items():
        if name.endswith(".lora_A.weight"):
            bound = 1 / math.sqrt(piece.shape[1])
            piece.take(torch.empty(piece.shape).uniform_(-bound, bound, generator=generator))
        else:
            piece.values.zero_()
    return generator


def peft_config(shape: Shape, arch: Architecture, base: str) -> dict:
    """adapter_config.json for peft."""
    targets = list(adapted(arch, shape.attn, shape.mlp, shape.unembed))
    config = LoraConfig(
        r=shape.rank,
        lora_alpha=ALPHA,
        lora_dropout=0.0,
        target_modules=targets,
        bias="none",
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        inference_mode=True,
    ).to_dict()
    return {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}


def _name(slot: int, shape: Shape) -> str:
    parts = "".join(letter for letter, on in (("a", shape.attn), ("m", shape.mlp), ("u", shape.unembed)) if on)
    return f"slot{slot}_r{shape.rank}_{parts}"


def _forward(selector: Selector):
    def forward(self: LoraLayer, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        name = selector.name
        base = self.base_layer
        if name is None or name not in self.lora_A:
            return nn.functional.linear(x, base.weight, base.bias)
        down, up = self.lora_A[name].weight, self.lora_B[name].weight
        if x.dtype == down.dtype:
            return _Adapted.apply(x, base.weight, base.bias, down, up, self.scaling[name])
        extra = nn.functional.linear(nn.functional.linear(x.to(down.dtype), down), up) * self.scaling[name]
        return nn.functional.linear(x, base.weight, base.bias) + extra.to(x.dtype)

    return forward


class _Adapted(torch.autograd.Function):
    """x W' + b + s (x A') B' with the additions inside the matrix products.

    The same as peft's forward but for rounding; peft passes over the outputs three more times.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scale: float) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        inner = flat @ down.t()
        out = nn.functional.linear(flat, weight, bias)
        out.addmm_(inner, up.t(), alpha=scale)
        ctx.save_for_backward(flat, weight, down, up, inner)
        ctx.scale = scale
        ctx.shape = x.shape
        return out.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx, grad: Tensor):
        flat, weight, down, up, inner = ctx.saved_tensors
        grad = grad.reshape(-1, grad.shape[-1])
        back = (grad @ up).mul_(ctx.scale)
        into = None
        if ctx.needs_input_grad[0]:
            into = (grad @ weight).addmm_(back, down).view(ctx.shape)
        return into, None, None, back.t() @ flat, (grad.t() @ inner).mul_(ctx.scale), None
