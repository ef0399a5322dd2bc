"""How many bytes a worker group, a deployment and a snapshot take. The head asks before it places; no torch here."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from plexrl.engines import layout
from plexrl.types import BadInput, Role


class Sizes(Struct, frozen=True, kw_only=True):
    """Bytes of one rank of a worker group.

    device_bytes: its extent on the device: base or weights, adapter slots or training state, KV.
    base_bytes: the shared host slab with the base weights, one per node, dtype and model.
    park_bytes: the host slab in which a sampler's KV waits while it is off the device (0 for trainers).
    workspace: estimate of what autograd and logits take beside the extent while a call runs. Nothing of it stays.
    base_form: how the base's bytes lie in that slab; groups of one model, dtype and form share it. "": as parameters
        of the checkpoint, in the order of a forward pass (`layout.base_specs`).
    """

    device_bytes: int
    base_bytes: int
    park_bytes: int
    workspace: int
    base_form: str = ""


def sizes(
    model_dir: str,
    dtype: Literal["float32", "bfloat16"],
    role: Role,
    kind: Literal["lora", "full"],
    lora_slots: int,
    lora_max_rank: int,
    kv_bytes: int,
    tokens: int = 2048,
) -> Sizes:
    """Sizes of a group; tokens: padded tokens of a micro-batch. Raises BadInput for a folder that is no model."""
    arch = layout.architecture(model_dir)
    base = layout.base_specs(arch, dtype)
    base_bytes = layout.packed(base)
    slot = slot_bytes(model_dir, role, lora_max_rank) if kind == "lora" else 0
    if role == Role.TRAIN:
        own = base_bytes + lora_slots * slot if kind == "lora" else layout.packed_all(layout.state_buckets(base))
        park = 0
    else:
        park = layout.packed(layout.kv_specs(arch, dtype, kv_bytes))
        own = base_bytes + lora_slots * slot + park
    return Sizes(
        device_bytes=own, base_bytes=base_bytes, park_bytes=park, workspace=_workspace(arch, dtype, role, tokens)
    )


def slot_bytes(model_dir: str, role: Role, lora_max_rank: int) -> int:
    """A device slot: one adapter of the largest rank on all projections and the head (a sampler: its weights only)."""
    if lora_max_rank < 1:
        raise BadInput(f"lora max_rank {lora_max_rank} is below 1", "Give a positive rank")
    weights = layout.adapter_specs(layout.architecture(model_dir), lora_max_rank, True, True, True)
    return layout.packed_all(layout.state_buckets(weights)) if role == Role.TRAIN else layout.packed(weights)


def state_bytes(
    model_dir: str,
    dtype: Literal["float32", "bfloat16"],
    kind: Literal["lora", "full"],
    lora_rank: int | None,
    attn: bool,
    mlp: bool,
    unembed: bool,
) -> int:
    """A deployment's host slab: weights, gradients, both Adam moments, step counter, random state."""
    return layout.packed_all(layout.state_buckets(_weights(model_dir, dtype, kind, lora_rank, attn, mlp, unembed)))


def snapshot_bytes(
    model_dir: str,
    dtype: Literal["float32", "bfloat16"],
    kind: Literal["lora", "full"],
    lora_rank: int | None,
    attn: bool,
    mlp: bool,
    unembed: bool,
) -> int:
    """The slab of one published version."""
    return layout.packed(_weights(model_dir, dtype, kind, lora_rank, attn, mlp, unembed))


def _weights(
    model_dir: str, dtype: str, kind: str, lora_rank: int | None, attn: bool, mlp: bool, unembed: bool
) -> list[layout.Spec]:
    if (kind == "lora") != (lora_rank is not None):
        raise BadInput(f"kind {kind!r} with LoRA rank {lora_rank}", "Give a rank for lora and none for full")
    if lora_rank is not None and lora_rank < 1:
        raise BadInput(f"LoRA rank {lora_rank} is below 1", "Give a positive rank")
    return layout.weight_specs(layout.architecture(model_dir), dtype, lora_rank, attn, mlp, unembed)


def _workspace(arch: layout.Architecture, dtype: str, role: Role, tokens: int) -> int:
    """Activations kept per layer (norms, q, k, v, attention, gate, up, product) and two copies of the logits."""
    hidden, vocab = arch.config["hidden_size"], arch.config["vocab_size"]
    inner = arch.config.get("intermediate_size") or 4 * hidden
    layers = arch.config["num_hidden_layers"] if role == Role.TRAIN else 1
    return tokens * layout.ITEMSIZE[dtype] * (layers * (12 * hidden + 5 * inner) + 2 * vocab)
