"""What plexrl.yaml asks for and no pool could ever place or build: told before one starts."""

from plexrl.config import Model, PoolConfig, Problem
from plexrl.pool.needs import beside_extent, group_sizes, host_bytes
from plexrl.types import BadInput, Role

_KINDS = {"lora": "with adapters", "full": "with all parameters"}


def problems(config: PoolConfig) -> list[Problem]:
    """Roles of models whose engine serves neither adapters nor all parameters in the memory there is."""
    found: list[Problem] = []
    for name, model in config.models.items():
        for role in Role:
            whys = {kind: _why_not(config, model, role, kind) for kind in _KINDS}
            if all(whys.values()):
                what = "; ".join(f"{_KINDS[kind]}: {what}" for kind, (what, _) in whys.items())
                mend = next(mend for _, mend in whys.values())
                found.append((("models", name, role.value), f"{model.engine_of(role)} cannot {role}: {what}", mend))
    return found


def gangs(config: PoolConfig, gpus: int) -> list[Problem]:
    """Trainers that want more GPUs than the pool is to have."""
    return [
        (("models", name, "train", "gpus"), f"{model.train.gpus} GPUs, and the pool has {gpus}", "Give it more GPUs")
        for name, model in config.models.items()
        if model.train.gpus > gpus
    ]


def _why_not(config: PoolConfig, model: Model, role: Role, kind: str) -> tuple[str, str] | None:
    """(what, mend); None when a group of this kind fits an empty pool."""
    try:
        sizes, host = group_sizes(model, role, kind), host_bytes(model, role, kind)
    except BadInput as error:
        return error.what, error.mend
    device = sizes.device_bytes + beside_extent(config.device.kind, sizes, 0)
    if device > config.device.bytes:
        return f"{device} bytes of each GPU, and device.bytes is {config.device.bytes}", "Raise device.bytes"
    if sizes.base_bytes + host > config.host.bytes:
        what = f"{sizes.base_bytes + host} bytes of host memory, and host.bytes is {config.host.bytes}"
        return what, "Raise host.bytes"
    return None
