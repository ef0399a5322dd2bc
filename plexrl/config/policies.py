"""Who may have how much of a pool: rules for accounts, users and QOS, and budgets that end jobs."""

import datetime
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, Strict

from plexrl.config.quantities import Bytes, Microseconds
from plexrl.config.section import Count, Flag, Section

EVERYBODY = "*"
"""The name of the rule for all that are not named."""


def _day(value: object) -> object:
    """A date, which YAML may have read already, as text."""
    try:
        return datetime.date.fromisoformat(str(value)).isoformat()
    except ValueError:
        raise ValueError(f"{str(value)!r} is not a day such as 2026-01-31") from None


Day = Annotated[str, BeforeValidator(_day)]
Positive = Annotated[Microseconds, Field(gt=0)]


class QosRule(Section):
    """What all jobs under a QOS may have together, and how they rank. Unset: no bound.

    jobs: attached at once. worker_groups: that hold their deployments. gang_size: GPUs of one trainer. host_bytes: host
    memory of their deployments' state. gpu_time: GPU time within any `window`, 7 days where none is written. class,
    priority, deadline: as in `tenants`, which they go before: a user's, then a QOS's, then an account's.
    """

    jobs: Count | None = None
    worker_groups: Count | None = None
    gang_size: Count | None = None
    host_bytes: Bytes | None = None
    gpu_time_us: Microseconds | None = Field(default=None, alias="gpu_time")
    window_us: Annotated[Microseconds, Field(ge=3_600_000_000)] | None = Field(default=None, alias="window")
    kind: Literal["interactive", "normal", "scavenger"] | None = Field(default=None, alias="class")
    priority: Annotated[int, Strict()] | None = None
    deadline_us: Positive | None = Field(default=None, alias="deadline")


class Rule(QosRule):
    """The same for an account or a user, and what they may keep on the pool's disk.

    checkpoint_bytes: saved states and published versions. checkpoint_age: older ones are deleted.
    """

    checkpoint_bytes: Bytes | None = None
    checkpoint_age_us: Positive | None = Field(default=None, alias="checkpoint_age")


class Policies(Section):
    """By name; `*` is for all that are not named."""

    accounts: dict[str, Rule] = {}
    users: dict[str, Rule] = {}
    qos: dict[str, QosRule] = {}


class Budget(Section):
    """gpu_time: all that may be used."""

    gpu_time_us: Microseconds = Field(alias="gpu_time")


class Budgets(Section):
    """What ends jobs when it is used up.

    from_slurm: GrpTRESMins for gres/gpu of Slurm's associations hold here too, against the pool's ledger and Slurm's
    own usage together. since: the ledger counts from this day on (UTC). grace: how long jobs may still save their state
    when a budget has run out.
    """

    from_slurm: Flag = False
    since: Day | None = None
    grace_us: Microseconds = Field(default=60_000_000, alias="grace")
    accounts: dict[str, Budget] = {}
    users: dict[str, Budget] = {}


def contradictions(policies: Policies) -> list[tuple[tuple[str, ...], str, str]]:
    """What two keys of a rule together cannot mean: (location, what, mend)."""
    return [
        (("policies", kind, name, "window"), "a window without gpu_time bounds nothing", "Add gpu_time, or take it out")
        for kind in ("accounts", "users", "qos")
        for name, rule in getattr(policies, kind).items()
        if rule.window_us is not None and rule.gpu_time_us is None
    ]
