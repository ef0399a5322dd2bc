"""What the scheduler knows of one gang."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from plexrl.types import Call, Gang, GroupSpec, Residency, Role

if TYPE_CHECKING:
    from plexrl.scheduler.turn import OpenTurn

# Rule 7. HOST -> LOST and the like: a rank may die anywhere. OFFLOADING -> LOADING: a switch was broken off, nobody
# knows how far it came, and the gang is told to load, which is idempotent.
LEGAL = {
    Residency.COLD: {Residency.LOADING, Residency.LOST},
    Residency.LOADING: {Residency.DEVICE, Residency.LOST},
    Residency.DEVICE: {Residency.OFFLOADING, Residency.LOST},
    Residency.OFFLOADING: {Residency.HOST, Residency.LOADING, Residency.LOST},
    Residency.HOST: {Residency.LOADING, Residency.LOST},
    Residency.LOST: {Residency.COLD},
}


@dataclass(eq=False, slots=True)
class GangState:
    """A gang with its calls.

    queue: eligible calls, the next first. active: calls that the executor has. since: the ticket below which the
    gang's place in line does not fall. used: the ticket of its last turn's end, for the choice of victims.
    rivals: gangs whose extents overlap. evictor: the turn whose switch offloads this gang now; OFFLOADING without one
    means that the switch was broken off: not usable, and its bytes may still be there.
    seqs: deployment -> [outstanding training calls, newest seq].
    """

    gang: Gang
    spec: GroupSpec
    residency: Residency
    since: int
    used: int
    queue: dict[str, Call] = field(default_factory=dict)
    active: dict[str, Call] = field(default_factory=dict)
    rivals: dict[str, GangState] = field(default_factory=dict)
    evictor: OpenTurn | None = None
    units: int = 0
    seqs: dict[str, list[int]] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return self.gang.id

    @property
    def gpus(self) -> tuple[str, ...]:
        return self.gang.gpus

    @property
    def trains(self) -> bool:
        """Training calls run one at a time, samples together."""
        return self.spec.role is Role.TRAIN

    @property
    def eligible(self) -> bool:
        """Has something to do that needs its GPUs."""
        if self.residency is Residency.COLD:
            return True
        return bool(self.queue) and self.residency is not Residency.LOST and not (self.trains and self.active)

    @property
    def occupies(self) -> bool:
        """Its bytes are, or may be, on the device."""
        return self.residency in (Residency.DEVICE, Residency.LOADING, Residency.OFFLOADING)

    @property
    def job(self) -> str:
        """The job for which the gang would run next, else its owner."""
        return next(iter(self.queue.values())).job if self.queue else self.spec.owner

    def move(self, to: Residency) -> None:
        """Rule 7: only legal transitions. Raises AssertionError otherwise, which is a fault of the scheduler."""
        if to is not self.residency:
            assert to in LEGAL[self.residency], f"rule 7: {self.id} from {self.residency} to {to}"
            self.residency = to

    def accept(self, call: Call) -> None:
        """Take a new call."""
        self.queue[call.id] = call
        self.units += call.units
        if call.seq is not None:
            count = self.seqs.setdefault(call.deployment, [0, call.seq])
            count[0] += 1
            count[1] = call.seq

    def forget(self, call: Call) -> None:
        """The call ended, wherever it was."""
        self.queue.pop(call.id, None)
        self.active.pop(call.id, None)
        self.units -= call.units
        if call.seq is not None:
            count = self.seqs[call.deployment]
            count[0] -= 1
            if not count[0]:
                del self.seqs[call.deployment]

    def start(self) -> list[Call]:
        """Move to `active` what may run now: the next training call, or every sample."""
        if self.trains:
            calls = [next(iter(self.queue.values()))] if self.queue and not self.active else []
        else:
            calls = list(self.queue.values())
        for call in calls:
            self.active[call.id] = self.queue.pop(call.id)
        return calls

    def put_back(self, unfinished: set[str]) -> list[Call]:
        """Active calls that were not finished return to the front, in the order in which they were started."""
        back = [call for call in self.active.values() if call.id in unfinished]
        for call in back:
            del self.active[call.id]
        self.queue = {call.id: call for call in back} | self.queue
        return back


def rivals(one: Gang, other: Gang) -> bool:
    """Whether the two gangs' extents overlap on any GPU."""
    for gpu, a in zip(one.gpus, one.extents, strict=True):
        for other_gpu, b in zip(other.gpus, other.extents, strict=True):
            if gpu == other_gpu and a.offset < b.offset + b.size and b.offset < a.offset + a.size:
                return True
    return False
