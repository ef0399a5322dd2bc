"""How many bytes a worker group, its deployments and their versions take, whatever engine it is. No torch here."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from plexrl.engines import noop, sizing
from plexrl.engines.protocol import Engine, EngineSpec
from plexrl.engines.sizing import Sizes
from plexrl.types import Role


class Use(Struct, frozen=True, kw_only=True):
    """A worker group as far as its bytes depend on it; the fields are those of EngineSpec. world: ranks of its gang."""

    engine: Engine
    role: Role
    kind: Literal["lora", "full"]
    model_dir: str
    dtype: Literal["float32", "bfloat16"]
    world: int
    zero_stage: int
    lora_slots: int
    lora_max_rank: int
    kv_bytes: int
    max_batch: int
    max_context: int
    micro_batch_tokens: int


class Trained(Struct, frozen=True, kw_only=True):
    """What a deployment trains. lora_rank None: all parameters."""

    lora_rank: int | None
    attn: bool
    mlp: bool
    unembed: bool


def use_of(spec: EngineSpec) -> Use:
    """What an engine was told, as far as bytes depend on it."""
    return Use(**{name: getattr(spec, name) for name in Use.__struct_fields__})


def slot(use: Use) -> int:
    """A device slot of a group of kind lora: one adapter of the largest rank, with what its role keeps beside it."""
    if use.engine == "deepspeed":
        from plexrl.engines.deepspeed import sizing as deepspeed

        return deepspeed.slot_bytes(use.model_dir, use.lora_max_rank, use.zero_stage, use.world)
    return sizing.slot_bytes(use.model_dir, use.role, use.lora_max_rank)


def group(use: Use) -> Sizes:
    """Bytes of one rank; all ranks take the same. Raises BadInput for a folder that is no model."""
    match use.engine:
        case "noop":
            return noop.SIZES
        case "vllm":
            from plexrl.engines.vllm import sizing as vllm

            return vllm.sizes(use)
        case "deepspeed":
            from plexrl.engines.deepspeed import sizing as deepspeed

            return deepspeed.sizes(use)
    return sizing.sizes(
        use.model_dir,
        use.dtype,
        use.role,
        use.kind,
        use.lora_slots,
        use.lora_max_rank,
        use.kv_bytes,
        use.micro_batch_tokens,
    )


def state(use: Use, trained: Trained) -> int:
    """A deployment's host slab, on each rank. use: of its trainer."""
    if use.engine == "noop":
        return noop.BYTES
    if use.engine == "deepspeed":
        from plexrl.engines.deepspeed import sizing as deepspeed

        return deepspeed.state_bytes(use, trained)
    return sizing.state_bytes(
        use.model_dir, use.dtype, use.kind, trained.lora_rank, trained.attn, trained.mlp, trained.unembed
    )


def snapshot(use: Use, trained: Trained) -> int:
    """One published version: it has the same form whoever trains and whoever samples. use: of its trainer."""
    if use.engine == "noop":
        return noop.BYTES
    return sizing.snapshot_bytes(
        use.model_dir, use.dtype, use.kind, trained.lora_rank, trained.attn, trained.mlp, trained.unembed
    )
