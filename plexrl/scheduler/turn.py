"""A turn: one gang has its GPUs for a while. When it must end is decided here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain

from plexrl.scheduler.gang import GangState
from plexrl.scheduler.policy import Policy
from plexrl.types import Call, CallKind


class Phase(StrEnum):
    """What happens in a turn."""

    BUILD = "build"
    SWITCH = "switch"
    OPEN = "open"
    PAUSING = "pausing"


@dataclass(eq=False, slots=True)
class OpenTurn:
    """A granted turn. Times in microseconds.

    job: who pays for the switch and for keeping. switch_us: what the switch that began it took.
    drained_us: since when there is nothing to run. gradients: deployment -> end of its last forward_backward
    that no optim_step has followed yet. deadline: when a tick is due for it; None while nothing bounds it.
    """

    state: GangState
    phase: Phase
    granted_us: int
    job: str
    evicting: list[GangState] = field(default_factory=list)
    opened_us: int = 0
    switch_us: int = 0
    ran: bool = False
    drained_us: int | None = None
    gradients: dict[str, int] = field(default_factory=dict)
    deadline: int | None = None

    def open(self, now: int) -> None:
        """The gang is resident: calls may run from now on."""
        self.phase, self.opened_us, self.switch_us = Phase.OPEN, now, now - self.granted_us
        self.note_drained(now)

    def note_drained(self, now: int) -> None:
        """Keep `drained_us` true after any change of the gang's calls."""
        if self.state.active or self.state.queue:
            self.drained_us = None
        elif self.drained_us is None:
            self.drained_us = now

    def note_finished(self, now: int, call: Call) -> None:
        """Remember for whom the turn would be kept, and whether gradients are live."""
        self.job = call.job
        if call.kind is CallKind.FORWARD_BACKWARD:
            self.gradients[call.deployment] = now
        elif call.kind in (CallKind.OPTIM_STEP, CallKind.LOAD_STATE):
            self.gradients.pop(call.deployment, None)

    def hold_until(self, policy: Policy, waiters: Iterable[GangState]) -> int:
        """Until when a drained turn is kept for the next call (rule 10). Only for a drained turn."""
        # Nobody's next call is awaited when it has come already, to another gang: one job alone hands itself over.
        others = (waiter.job for waiter in waiters)
        answered = next(others, None) == self.job and all(job == self.job for job in others)
        hold = self.drained_us + (0 if answered else policy.anticipation_us)
        if self.gradients:
            hold = max(hold, max(self.gradients.values()) + policy.gradient_anticipation_us)
        return hold

    def ends_at(self, policy: Policy, waiters: Iterable[GangState]) -> int | None:
        """When the turn must end, or be paused, for those who wait for its GPUs. None while nothing asks for it."""
        waiters = iter(waiters)
        first = next(waiters, None)
        if self.phase is not Phase.OPEN or first is None:
            return None
        end = self.opened_us + max(policy.quantum_us, int(policy.min_turn_factor * self.switch_us))
        if self.gradients:
            # Its natural end is after optim_step, when no gradients need to move: give it the time to get there.
            end = max(end, min(end, max(self.gradients.values())) + policy.gradient_anticipation_us)
        if self.drained_us is not None:
            end = min(end, self.hold_until(policy, chain([first], waiters)))
        return end
