"""What worker groups, deployments and versions need, in bytes, by what plexrl.yaml says of their models."""

from plexrl.config.schema import Model
from plexrl.engines import noop, sizing
from plexrl.memory.pages import align_up
from plexrl.types import Role, records


def group_sizes(config: Model, role: Role, kind: str) -> sizing.Sizes:
    """Of a worker group. kind: lora or full."""
    if config.engine == "noop":
        return noop.SIZES
    return sizing.sizes(
        config.path,
        config.dtype,
        role,
        kind,
        config.lora.slots,
        config.lora.max_rank,
        config.sample.kv_bytes,
        config.micro_batch_tokens,
    )


def beside_extent(kind: str, sizes: sizing.Sizes, residual: int) -> int:
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
    return _state_bytes(config, kind, None, True, True, True)


def state_bytes(config: Model, kind: str, created: records.ModelCreated) -> int:
    """A deployment's host slab, on each rank."""
    return _state_bytes(config, kind, created.lora_rank, created.attn, created.mlp, created.unembed)


def snapshot_bytes(config: Model, kind: str, created: records.ModelCreated) -> int:
    """One version of a deployment."""
    if config.engine == "noop":
        return noop.BYTES
    return sizing.snapshot_bytes(
        config.path, config.dtype, kind, created.lora_rank, created.attn, created.mlp, created.unembed
    )


def _state_bytes(config: Model, kind: str, rank: int | None, attn: bool, mlp: bool, unembed: bool) -> int:
    if config.engine == "noop":
        return noop.BYTES
    return sizing.state_bytes(config.path, config.dtype, kind, rank, attn, mlp, unembed)
