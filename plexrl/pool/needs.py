"""What worker groups, deployments and versions need, in bytes, by what plexrl.yaml says of their models."""

from plexrl.config.schema import Model
from plexrl.engines import footprint
from plexrl.engines.sizing import Sizes
from plexrl.memory.pages import align_up
from plexrl.types import Role, records

_ALL = footprint.Trained(lora_rank=None, attn=True, mlp=True, unembed=True)


def use_of(config: Model, role: Role, kind: str) -> footprint.Use:
    """A worker group, as engines size it. kind: lora or full."""
    return footprint.Use(
        engine=config.engine_of(role),
        role=role,
        kind=kind,
        model_dir=config.path,
        dtype=config.dtype,
        world=config.train.gpus if role is Role.TRAIN else 1,
        zero_stage=config.train.zero_stage or 0,
        lora_slots=config.lora.slots,
        lora_max_rank=config.lora.max_rank,
        kv_bytes=config.sample.kv_bytes,
        max_batch=config.sample.max_batch,
        max_context=config.max_context,
        micro_batch_tokens=config.micro_batch_tokens,
    )


def group_sizes(config: Model, role: Role, kind: str) -> Sizes:
    """Of a worker group, one rank. Raises BadInput for what its engine does not serve."""
    return footprint.group(use_of(config, role, kind))


def beside_extent(kind: str, sizes: Sizes, residual: int) -> int:
    """Bytes of a GPU that a group takes beside its extent while it is there, a multiple of 64. kind: of the device.

    What its processes keep at all times and, while it runs, activations: on cpu devices these are the node's memory.
    """
    return 0 if kind == "cpu" else align_up(sizes.workspace) + residual


def host_bytes(config: Model, role: Role, kind: str) -> int:
    """What the group's arena must have for it alone; adapters and versions come with slabs of their own."""
    if role is Role.SAMPLE:
        return group_sizes(config, role, kind).park_bytes
    if kind == "lora":
        return 0
    return footprint.state(use_of(config, role, kind), _ALL)


def state_bytes(config: Model, kind: str, created: records.ModelCreated) -> int:
    """A deployment's host slab, on each rank."""
    return footprint.state(use_of(config, Role.TRAIN, kind), _trained(created))


def snapshot_bytes(config: Model, kind: str, created: records.ModelCreated) -> int:
    """One version of a deployment."""
    return footprint.snapshot(use_of(config, Role.TRAIN, kind), _trained(created))


def _trained(created: records.ModelCreated) -> footprint.Trained:
    return footprint.Trained(lora_rank=created.lora_rank, attn=created.attn, mlp=created.mlp, unembed=created.unembed)
