"""What the scheduler knows of one gang."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from plexrl.scheduler.costs import Learned
from plexrl.types import Call, CallKind, Gang, GroupSpec, JobClass, Residency, Role, Tenant

if TYPE_CHECKING:
    from plexrl.scheduler.residence import Arrival

# Rule 7. HOST -> LOST and the like: a rank may die anywhere. OFFLOADING -> LOADING: a switch was broken off, nobody
# knows how far it came, and the gang is told to load, which is idempotent. LOADING -> HOST or COLD and OFFLOADING ->
# DEVICE: it was undone. HOST -> COLD: its engine was ended while it slept.
LEGAL = {
    Residency.COLD: {Residency.LOADING, Residency.LOST},
    Residency.LOADING: {Residency.DEVICE, Residency.HOST, Residency.COLD, Residency.LOST},
    Residency.DEVICE: {Residency.OFFLOADING, Residency.LOST},
    Residency.OFFLOADING: {
        Residency.HOST,
        Residency.DEVICE,
        Residency.LOADING,
        Residency.OFFLOADING,
        Residency.LOST,
    },
    Residency.HOST: {Residency.LOADING, Residency.COLD, Residency.LOST},
    Residency.LOST: {Residency.COLD},
}
RANKS = {JobClass.INTERACTIVE: 0, JobClass.NORMAL: 1, JobClass.SCAVENGER: 2}
NORMAL, SCAVENGER = RANKS[JobClass.NORMAL], RANKS[JobClass.SCAVENGER]


class Entry(NamedTuple):
    """A call in the books. number: in order of arrival. due_us: when it should have begun, if anybody cares."""

    call: Call
    tenant: Tenant
    number: int
    since_us: int
    due_us: int | None

    @property
    def rank(self) -> int:
        """Of its class; 0 goes first."""
        return RANKS[self.tenant.kind]


@dataclass(eq=False, slots=True)
class GangState:
    """A gang with its calls, and what was learnt of it. Times in microseconds.

    owner: the tenant for whom it is built. queue: eligible calls, the next first. active: calls that the executor has.
    begun: calls in the queue whose partial work lies in an engine. since, since_us: the gang's place in line does not
    fall below this ticket and time. used, used_us: its last turn's end, as ticket and time. rivals: gangs whose extents
    overlap (fixed extents only). arrival: the coming in under way. evictor: the coming in for which this gang leaves;
    OFFLOADING without one means that it was broken off: not usable, its bytes may be there. peers, reach: the other
    gangs that a union turn for its first call would hold, and all the GPUs then. seqs: deployment -> [outstanding
    training calls, newest seq]. building: its engine is being started. moving: it is being placed anew. ranks: how many
    of its calls are of each class. fruitless: turns since one in which a call ended. ending: the coming in for which
    its engine is ended while it sleeps. unbuilt: COLD by that: it is built again when a call, or somebody (wanted),
    needs it.

    Learnt: switch: coming in, victims' leaving included. finished_us, last: when which kind of call ended last. think:
    by that kind, the time until the next call. service: a turn's length. cycle: from a forward_backward to its
    optim_step. active_us: since when calls run. busy_us, idle_us: with calls, and between the last result and the next
    call: its duty alone. steps: optim_steps, or rollouts, that have ended. builds: how long they took.
    """

    gang: Gang
    spec: GroupSpec
    owner: Tenant
    residency: Residency
    since: int
    since_us: int
    used: int
    switch: Learned
    queue: dict[str, Entry] = field(default_factory=dict)
    active: dict[str, Entry] = field(default_factory=dict)
    begun: set[str] = field(default_factory=set)
    rivals: dict[str, GangState] = field(default_factory=dict)
    arrival: Arrival | None = None
    evictor: Arrival | None = None
    peers: tuple[GangState, ...] = ()
    reach: tuple[str, ...] = ()
    units: int = 0
    seqs: dict[str, list[int]] = field(default_factory=dict)
    finished_us: int | None = None
    last: CallKind | None = None
    think: dict[CallKind, Learned] = field(default_factory=dict)
    service: Learned = field(default_factory=Learned)
    cycle: Learned = field(default_factory=Learned)
    used_us: int = 0
    active_us: int = 0
    busy_us: int = 0
    idle_us: int = 0
    steps: int = 0
    fruitless: int = 0
    moving: bool = False
    building: bool = False
    ending: Arrival | None = None
    unbuilt: bool = False
    wanted: bool = False
    builds: Learned = field(default_factory=Learned)
    ranks: list[int] = field(default_factory=lambda: [0, 0, 0])

    def __post_init__(self) -> None:
        self.reach = self.gang.gpus

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
    def members(self) -> tuple[GangState, ...]:
        """The gangs of its next turn: itself, and for a union turn its peers."""
        return (self, *self.peers)

    @property
    def eligible(self) -> bool:
        """Has something to do that needs its GPUs."""
        if self.moving:
            return False
        if self.residency is Residency.COLD:
            return bool(self.queue) or self.wanted or not self.unbuilt
        if not all(peer.built for peer in self.peers):
            return False
        return bool(self.queue) and self.residency is not Residency.LOST and not (self.trains and self.active)

    @property
    def built(self) -> bool:
        """Its engine is there, wherever its state is."""
        return not self.moving and self.residency not in (Residency.COLD, Residency.LOST) and not self.building

    @property
    def new(self) -> bool:
        """It was never built, or has nothing of what it was: it is built whether or not a call waits."""
        return self.residency is Residency.COLD and not self.unbuilt

    @property
    def occupies(self) -> bool:
        """Its bytes are, or may be, on the device."""
        return self.residency in (Residency.DEVICE, Residency.LOADING, Residency.OFFLOADING)

    @property
    def first(self) -> Entry | None:
        """The next call."""
        return next(iter(self.queue.values()), None)

    @property
    def tenant(self) -> Tenant:
        """For whom the gang would run next, else its owner."""
        first = self.first
        return first.tenant if first else self.owner

    @property
    def rank(self) -> int:
        """The best class among its calls, active or not; without calls, its owner's."""
        for rank, count in enumerate(self.ranks):
            if count:
                return rank
        return RANKS[self.owner.kind]

    @property
    def size(self) -> int:
        """Bytes on each GPU when resident."""
        return self.gang.extents[0].size

    @property
    def duty(self) -> float | None:
        """The share of time that it would be busy alone, as seen so far."""
        total = self.busy_us + self.idle_us
        return self.busy_us / total if total and self.steps else None

    def move(self, to: Residency) -> None:
        """Rule 7: only legal transitions. Raises AssertionError otherwise, which is a fault of the scheduler."""
        if to is not self.residency:
            assert to in LEGAL[self.residency], f"rule 7: {self.id} from {self.residency} to {to}"
            self.residency = to

    def accept(self, entry: Entry) -> None:
        """Take a new call, or one of another gang of the group."""
        call = entry.call
        self.queue[call.id] = entry
        self.units += call.units
        self.ranks[entry.rank] += 1
        if call.seq is not None:
            count = self.seqs.setdefault(call.deployment, [0, call.seq])
            count[0] += 1
            count[1] = call.seq

    def forget(self, entry: Entry) -> None:
        """The call ended or left, wherever it was."""
        call = entry.call
        self.queue.pop(call.id, None)
        self.active.pop(call.id, None)
        self.begun.discard(call.id)
        self.units -= call.units
        self.ranks[entry.rank] -= 1
        if call.seq is not None:
            count = self.seqs[call.deployment]
            count[0] -= 1
            if not count[0]:
                del self.seqs[call.deployment]

    def start(self, peer: str) -> list[Entry]:
        """Move to `active` what may run now in a turn with this peer: the next training call, or every sample."""
        if self.trains:
            first = self.first
            entries = [first] if first and not self.active and first.call.peer == peer else []
        else:
            entries = list(self.queue.values())
        for entry in entries:
            self.active[entry.call.id] = self.queue.pop(entry.call.id)
            self.begun.discard(entry.call.id)
        return entries

    def put_back(self, unfinished: set[str]) -> list[Entry]:
        """Active calls that were not finished return to the front, in the order in which they were started."""
        back = [entry for id, entry in self.active.items() if id in unfinished]
        for entry in back:
            del self.active[entry.call.id]
            self.begun.add(entry.call.id)
        self.queue = {entry.call.id: entry for entry in back} | self.queue
        return back

    def next_use(self, now: int) -> int:
        """When it is expected to be wanted again, for the choice of victims.

        By its think times; unseen, as far ahead as it has been unused already, which makes it least recently used. Who
        waits goes late, and last of all who would have to compute again what it has begun.
        """
        if self.queue or self.active:
            return now - len(self.begun)
        think = self.think.get(self.last) if self.last else None
        if think and think.count and self.finished_us is not None:
            expected = self.finished_us + think.mean
            if expected >= now:
                return expected
        return now + (now - self.used_us)


def rivals(one: Gang, other: Gang) -> bool:
    """Whether the two gangs' fixed extents overlap on any GPU. Extents without offsets never do."""
    others: Mapping[str, tuple[int, int]] = dict(_ranges(other))
    for gpu, (start, end) in _ranges(one):
        there = others.get(gpu)
        if there and start < there[1] and there[0] < end:
            return True
    return False


def _ranges(gang: Gang) -> Iterator[tuple[str, tuple[int, int]]]:
    for gpu, extent in zip(gang.gpus, gang.extents, strict=True):
        if extent.offset is not None:
            yield gpu, (extent.offset, extent.offset + extent.size)
