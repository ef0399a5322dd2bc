"""Which rules of plexrl.yaml's policies hold for a job: its user's, its QOS's, its account's."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from plexrl.config import PoolConfig
from plexrl.config.policies import EVERYBODY, QosRule, Rule

_FIELD = {"users": "user", "qos": "qos", "accounts": "account"}
_NOUN = {"users": "user", "qos": "QOS", "accounts": "account"}


class Bound(NamedTuple):
    """A rule that holds for somebody. kind: accounts, users or qos. name: whose; key: where the file says it."""

    kind: str
    name: str
    key: str
    rule: Rule | QosRule

    def covers(self, who: Any) -> bool:
        """Whether a peer, a job's `JobAttached` or a `Used` counts under it."""
        return getattr(who, _FIELD[self.kind]) == self.name

    def __str__(self) -> str:
        return f"{_NOUN[self.kind]} {self.name!r}"


def bounds_of(config: PoolConfig, who: Any) -> Iterator[Bound]:
    """The rules for a peer or a job: of its user, its QOS, its account; each the one named, else that of `*`."""
    for kind, field in _FIELD.items():
        name = getattr(who, field)
        rules = getattr(config.policies, kind)
        key = name if name in rules else EVERYBODY
        if key in rules and name:
            yield Bound(kind, name, f"policies.{kind}.{key}", rules[key])
