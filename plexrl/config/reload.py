"""What of plexrl.yaml a running head takes up anew, and what stays as it was until the pool starts again."""

from plexrl.config.schema import PoolConfig

RELOADED = ("scheduler", "limits", "shares_from", "shares", "tenants", "policies", "budgets")
"""Sections that are read anew, and with them who may use a model (`models.NAME.accounts`)."""

# Of these sections two keys stay too: groups that are placed are either one job's own or everybody's, and proxies were
# told how large a body may be.
_ISOLATED = "isolated"


def kept(old: PoolConfig, new: PoolConfig) -> list[str]:
    """Dotted keys that differ and that a running head cannot change: empty when `new` can be taken up whole."""
    found = [
        name
        for name in PoolConfig.model_fields
        if name not in RELOADED and name != "models" and getattr(old, name) != getattr(new, name)
    ]
    for name in sorted(old.models.keys() | new.models.keys()):
        before, after = old.models.get(name), new.models.get(name)
        if before is None or after is None:
            found.append(f"models.{name}")
            continue
        found += [
            f"models.{name}.{field}"
            for field in type(before).model_fields
            if field != "accounts" and getattr(before, field) != getattr(after, field)
        ]
    if (old.scheduler.placement == _ISOLATED) != (new.scheduler.placement == _ISOLATED):
        found.append("scheduler.placement")
    if old.limits.body_bytes != new.limits.body_bytes:
        found.append("limits.body_bytes")
    return found
