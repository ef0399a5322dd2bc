"""The gang-aware co-scheduler: a pure core."""

from plexrl.scheduler.actions import Action, Build, Closed, Dropped, Pause, Run, Switch, Turn
from plexrl.scheduler.policy import Policy
from plexrl.scheduler.scheduler import Scheduler

__all__ = ["Action", "Build", "Closed", "Dropped", "Pause", "Policy", "Run", "Scheduler", "Switch", "Turn"]
