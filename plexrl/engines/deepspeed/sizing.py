"""How many bytes a DeepSpeed trainer takes, by stage, world and dtype. No torch and no DeepSpeed here."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from msgspec import structs

from plexrl.engines import layout, sizing
from plexrl.engines.deepspeed.partition import buckets
from plexrl.types import BadInput, Role

if TYPE_CHECKING:
    from plexrl.engines.footprint import Trained, Use

REDUCE_ELEMENTS = 1 << 24
"""Gradients that ranks sum up at once (`reduce_bucket_size`), float32."""


def sizes(use: Use) -> sizing.Sizes:
    """One rank of a worker group; the base's slab is the torch engine's.

    Raises BadInput for a stage that is not served and a folder that is no model.
    """
    if use.zero_stage not in (1, 2, 3):
        raise BadInput(
            f"zero_stage {use.zero_stage} is not served: without ZeRO, DeepSpeed's ranks share nothing out",
            "Use 1, 2 or 3, or the torch engine",
        )
    plain = sizing.sizes(
        use.model_dir, use.dtype, Role.TRAIN, use.kind, use.lora_slots, use.lora_max_rank, 0, use.micro_batch_tokens
    )
    arch = layout.architecture(use.model_dir)
    if use.kind == "lora":
        own = plain.base_bytes + use.lora_slots * slot_bytes(
            use.model_dir, use.lora_max_rank, use.zero_stage, use.world
        )
        trained = layout.adapter_specs(arch, use.lora_max_rank, True, True, True)
    else:
        trained = layout.base_specs(arch, use.dtype)
        parts = layout.staged(arch, trained, "weights")
        own = layout.packed_all(buckets(trained, parts, use.zero_stage, use.world))
    return structs.replace(
        plain, device_bytes=own, workspace=plain.workspace + _passing(trained, use.zero_stage, use.world)
    )


def slot_bytes(model_dir: str, lora_max_rank: int, stage: int, world: int) -> int:
    """A device slot: the state of one adapter of the largest rank on all projections and the head."""
    if lora_max_rank < 1:
        raise BadInput(f"lora max_rank {lora_max_rank} is below 1", "Give a positive rank")
    weights = layout.adapter_specs(layout.architecture(model_dir), lora_max_rank, True, True, True)
    return layout.packed_all(buckets(weights, None, stage, world))


def state_bytes(use: Use, trained: Trained) -> int:
    """A deployment's host slab, on each rank; the same on all."""
    sizing.snapshot_bytes(
        use.model_dir, use.dtype, use.kind, trained.lora_rank, trained.attn, trained.mlp, trained.unembed
    )
    arch = layout.architecture(use.model_dir)
    weights = layout.weight_specs(arch, use.dtype, trained.lora_rank, trained.attn, trained.mlp, trained.unembed)
    parts = layout.staged(arch, weights, "weights") if trained.lora_rank is None else None
    return layout.packed_all(buckets(weights, parts, use.zero_stage, use.world))


def _passing(trained: list[layout.Spec], stage: int, world: int) -> int:
    """What DeepSpeed allocates while a call runs and gives back: gradients on their way, a part's gradients in float32.

    Stage 3: all gathered parameters too, at worst.
    """
    elements = sum(math.prod(shape) for _, shape, _ in trained)
    item = layout.ITEMSIZE[trained[0][2]]
    gathered = elements * item if stage == 3 else 0
    return 2 * 4 * min(REDUCE_ELEMENTS, elements) + 4 * -(-elements // world) + gathered
