"""A turn: one gang has its GPUs for a while. When it must end is decided here."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from plexrl.scheduler.costs import Learned, anticipation_us
from plexrl.scheduler.gang import SCAVENGER, Entry, GangState
from plexrl.scheduler.policy import Policy
from plexrl.scheduler.spans import Use
from plexrl.types import Call, CallKind

_MANY_YEARS = 1 << 62
GIVE_WAY = 24  # ours: a sampler gives way to a gang that keeps GPUs free after this part of its quantum
_READ_AGAIN_US = 600_000_000  # ours: no sampler takes longer to compute its prefixes again
_UNSEEN = Learned()


def patient_us(quantum_us: int, fruitless: int) -> int:
    """A sampler's quantum after so many turns in a row in which no call ended."""
    return min(quantum_us << min(fruitless, 30), max(quantum_us << 3, _READ_AGAIN_US))


class Others(NamedTuple):
    """Those who wait for a turn's GPUs.

    best: the best class among them. answered: its job's next call is theirs, and nobody else waits. preempt_us: from
    when on an interactive one may break it off. owed: a reservation that it went ahead of waits for nothing but it.
    idle: GPUs are kept free for a gang that waits for this turn.
    """

    best: int
    answered: bool
    preempt_us: int
    owed: bool
    idle: bool


class Phase(StrEnum):
    """What happens in a turn."""

    BUILD = "build"
    SWITCH = "switch"
    OPEN = "open"
    PAUSING = "pausing"


@dataclass(eq=False, slots=True)
class OpenTurn:
    """A granted turn. Times in microseconds.

    gpus: those of the gang, and of its peers in a union turn. peer: the other group of a union turn. job: who pays for
    the switch and for keeping. rank: of the class that it works for. to_load: gangs that still have to come in.
    switch_us: what the switch that began it took. limit_us: when it must have ended for a reservation that it went
    ahead of. ran, fruitful: a call has begun, has ended. drained_us: since when there is nothing to run. gradients:
    deployment -> end of its last forward_backward that no optim_step has followed yet. cycle_us: when the cycle began
    that leads to the next optim_step. cycles: how many have ended. deadline, why: when a tick is due for it, and what
    ends it then; None while nothing bounds it. gather: where its samples go when it has paused. looked: nobody new
    could be prefetched beside it. use: as metered.
    """

    state: GangState
    gpus: tuple[str, ...]
    peers: tuple[GangState, ...]
    peer: str
    phase: Phase
    granted_us: int
    job: str
    rank: int
    to_load: list[GangState] = field(default_factory=list)
    opened_us: int = 0
    switch_us: int = 0
    limit_us: int | None = None
    ran: bool = False
    fruitful: bool = False
    drained_us: int | None = None
    gradients: dict[str, int] = field(default_factory=dict)
    cycle_us: int | None = None
    cycles: int = 0
    deadline: int | None = None
    why: str = ""
    gather: GangState | None = None
    looked: bool = False
    use: Use | None = None

    def open(self, now: int) -> None:
        """The gang is resident: calls may run from now on."""
        self.phase, self.opened_us, self.switch_us = Phase.OPEN, now, now - self.granted_us
        self.note_drained(now)

    @property
    def runnable(self) -> bool:
        """Whether something runs or could. A call that wants other GPUs as well is for another turn."""
        state = self.state
        if state.active:
            return True
        first = state.first
        return first is not None and first.call.peer == self.peer

    def note_drained(self, now: int) -> None:
        """Keep `drained_us` true after any change of the gang's calls."""
        if self.runnable:
            self.drained_us = None
        elif self.drained_us is None:
            self.drained_us = now

    def note_started(self, now: int, call: Call) -> None:
        """A cycle begins with a forward_backward while no gradients are live."""
        if call.kind is CallKind.FORWARD_BACKWARD and not self.gradients:
            self.cycle_us = now

    def note_finished(self, now: int, entry: Entry) -> None:
        """Remember for whom the turn would be kept, and whether gradients are live."""
        call = entry.call
        self.job, self.rank, self.fruitful = call.job, entry.rank, True
        if call.kind is CallKind.FORWARD_BACKWARD:
            self.gradients[call.deployment] = now
        elif call.kind in (CallKind.OPTIM_STEP, CallKind.LOAD_STATE):
            self.gradients.pop(call.deployment, None)
            if call.kind is CallKind.OPTIM_STEP and self.cycle_us is not None:
                self.state.cycle.observe(now - self.cycle_us)
                self.cycle_us = None
                self.cycles += 1

    def full_us(self, policy: Policy) -> int:
        """When its quantum is over.

        A sampler's is doubled after each turn in which no call ended, up to 8 times or ten minutes (ours): to compute
        again what it had drawn before it left the device may take all that a quantum has time for, and if no turn were
        ever longer than that, nothing would ever end.
        """
        quantum = policy.quantum_us
        if not self.state.trains:
            quantum = patient_us(policy.sample_quantum_us, self.state.fruitless)
        return max(self.opened_us + quantum, self.least_us(policy))

    def least_us(self, policy: Policy) -> int:
        """When it has lasted long enough for the switch that began it (rule 10)."""
        return self.opened_us + int(policy.min_turn_factor * self.switch_us)

    def ends_before(self, now: int, policy: Policy) -> bool:
        """Whether the next call begins a cycle that would outlast the quantum: better stop where nothing moves."""
        first, cycle = self.state.first, self.state.cycle
        return (
            policy.natural_ends
            and self.cycles > 0
            and not self.gradients
            and first is not None
            and first.call.kind is CallKind.FORWARD_BACKWARD
            and now + cycle.mean > self.full_us(policy)
        )

    def hold_until(self, policy: Policy, answered: bool) -> int:
        """Until when a drained turn is kept for the next call (rule 10). Only for a drained turn.

        answered: its job's next call has come already, to a gang that waits for these GPUs, and nobody else waits.
        """
        state = self.state
        if state.queue:  # what is queued here is for another turn
            return self.drained_us
        window = 0
        if not answered:
            think = state.think.get(state.last)
            # Away and back is two switches.
            window = anticipation_us(think or _UNSEEN, policy.anticipation_us, 2 * state.switch.mean)
        hold = self.drained_us + window
        if self.gradients:
            hold = max(hold, max(self.gradients.values()) + policy.gradient_anticipation_us)
        return hold

    def ends_at(self, policy: Policy, others: Others) -> tuple[int, str]:
        """When the turn must end, or be paused, for those who wait for its GPUs, and why then."""
        end, why = self.full_us(policy), "quantum"
        if others.idle and not self.state.trains and self.limit_us is None:
            # Samples stop and go on at any token: no reason to let GPUs idle until the quantum is over. A 24th of it
            # (ours) keeps overlapping gangs from handing each other the GPUs at every token; it is doubled as the
            # quantum is while nothing ends. A trainer's quantum has no part in it: how long a gang may keep the GPUs
            # says nothing of how long it should wait for them.
            least = self.opened_us + (policy.sample_quantum_us // GIVE_WAY << min(self.state.fruitless, 6))
            end, why = min(end, max(self.least_us(policy), least)), "gang"
        if self.gradients and policy.natural_ends:
            # Its natural end is after optim_step, when no gradients need to move: give it the time to get there.
            end = max(end, min(end, max(self.gradients.values())) + policy.gradient_anticipation_us)
        start = self.opened_us
        if self.rank < SCAVENGER == others.best:
            end = _MANY_YEARS  # scavengers have what is left over
        if self.rank == SCAVENGER and others.best < SCAVENGER:
            end, why = start, "preempted"
        elif others.best == 0 < self.rank and max(start, others.preempt_us) < end:
            end, why = max(start, others.preempt_us), "preempted"
        if self.limit_us is not None:
            least = start + int(policy.min_turn_factor * self.switch_us)  # else the switch was for nothing
            limit = min(self.limit_us, least) if others.owed else self.limit_us
            if limit < end:
                end, why = limit, "reserved"
        if self.drained_us is not None:
            hold = self.hold_until(policy, others.answered)
            if hold <= end:
                end, why = hold, "drained"
        return end, why

    def expected_end(self, policy: Policy, now: int) -> int:
        """The earliest that its GPUs may be expected back, for those who plan around it."""
        if self.phase is Phase.OPEN:
            if self.drained_us is not None:
                return now
            usual = self.opened_us + self.state.service.mean
            return max(now, min(usual if self.state.service.count else _MANY_YEARS, self.full_us(policy)))
        if self.phase is Phase.SWITCH:
            left = max(0, self.granted_us + self.state.switch.mean - now)
            return now + left + min(self.state.service.mean, policy.quantum_us)
        return now
