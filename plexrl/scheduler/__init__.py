"""The gang-aware co-scheduler: a pure core."""

from plexrl.scheduler.actions import (
    Action,
    Build,
    Closed,
    Dropped,
    Gather,
    Pause,
    Placed,
    Prefetch,
    Relocate,
    Run,
    Switch,
    Turn,
)
from plexrl.scheduler.policy import Policy
from plexrl.scheduler.scheduler import Scheduler

__all__ = [
    "Action",
    "Build",
    "Closed",
    "Dropped",
    "Gather",
    "Pause",
    "Placed",
    "Policy",
    "Prefetch",
    "Relocate",
    "Run",
    "Scheduler",
    "Switch",
    "Turn",
]
