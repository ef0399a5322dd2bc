"""Who waits to be placed, and who may go now. Pure: time comes as an argument.

The queue is by class, then priority, then arrival. `isolated`, `pack` and `spread` go strictly in that order. With
`spread_backfill` and `fit` those behind the first may go ahead of it where there is room for them, until the first has
waited for the policy's admission_patience_us; from then on nobody is placed on a GPU that the first could ever use (by
role and size). So these GPUs empty as their jobs end, and the empty pool has room for it, or it would not have been let
in (ours).

Jobs that ask for the same are one line: if its first does not fit, none of it does. A line is tried again only after
something has left the floor, and one look ends after `MISSES` lines that were tried in vain (ours; Slurm bounds the
same by bf_max_job_test).
"""

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Protocol

from msgspec import Struct

from plexrl.scheduler.load import CLASSES
from plexrl.scheduler.placement import Floor, Rules
from plexrl.types import BadInput, GroupSpec, Placement, Tenant

MISSES = 32
PASSING = ("spread_backfill", "fit")  # placements under which those behind the first may go ahead of it
Granted = tuple[Tenant, tuple[GroupSpec, ...], tuple[Placement, ...]]
Key = tuple[int, str, tuple[tuple, ...]]


class AdmissionRules(Rules, Protocol):
    """What admission reads of a policy. admission_patience_us: for how long the first may be passed by."""

    admission_patience_us: int


class Waiting(Struct, frozen=True):
    """A job in the queue, since when, and what it waits for, in words."""

    job: str
    since_us: int
    why: str


@dataclass(slots=True, order=True)
class Ask:
    """A job's request for all its groups together. Compared by its place in the queue; order: minus the priority."""

    kind: int
    order: int
    ticket: int
    tenant: Tenant = field(compare=False)
    specs: tuple[GroupSpec, ...] = field(compare=False)
    since_us: int = field(compare=False)
    key: Key | None = field(compare=False, default=None)


@dataclass(eq=False, slots=True)
class Line:
    """Asks for the same, in the order of the queue.

    tried: the floor's `room` when the first did not fit. behind: for which starving ask it was kept off GPUs then (its
    ticket), None for none.
    """

    asks: list[Ask] = field(default_factory=list)
    tried: int | None = None
    behind: int | None = None


class Admission:
    """The jobs that wait for a place on a floor."""

    def __init__(self, floor: Floor) -> None:
        self._floor = floor
        self._lines: dict[Key, Line] = {}
        self._jobs: dict[str, list[Ask]] = {}
        self._ticket = 0
        self._starving: Ask | None = None  # at the last look
        self._seen: int | None = None  # the floor's room at the last look; None: the queue has changed since

    def ask(self, now: int, tenant: Tenant, specs: Sequence[GroupSpec], policy: Rules) -> None:
        """Queue groups of a job that are to be placed together. Several requests of one job wait side by side.

        Raises DoesNotFit if they would not fit the empty pool, BadInput if there are none or one has a known name.
        """
        names = {spec.group for ask in self._jobs.get(tenant.job, ()) for spec in ask.specs}
        for spec in specs:
            if spec.group in names or self._floor.where(spec.group):
                raise BadInput(f"worker group {spec.group} of job {tenant.job} waits or is placed already", "Ask once")
            names.add(spec.group)
        if not specs:
            raise BadInput(f"job {tenant.job} asks for no worker group", "Name at least one")
        self._ticket += 1
        ask = Ask(CLASSES.index(tenant.kind), -tenant.priority, self._ticket, tenant, tuple(specs), now)
        if self._key(ask) not in self._lines:  # the others in its line would fit
            self._floor.possible(specs, policy, tenant)
        self._jobs.setdefault(tenant.job, []).append(ask)
        self._enlist(ask)

    def withdraw(self, job: str) -> None:
        """The job waits no longer. Nothing happens if it does not wait."""
        for ask in self._jobs.pop(job, ()):
            self._delist(ask)

    def ready(self, now: int, policy: AdmissionRules) -> list[Granted]:
        """Place whoever may go now, and take them out of the queue."""
        if self._seen == self._floor.room:
            return []
        granted: list[Granted] = []
        heads = [(line.asks[0], key) for key, line in self._lines.items()]
        heapify(heads)
        first = starving = None
        misses = 0
        avoid: frozenset[str] = frozenset()
        while heads:
            ask, key = heappop(heads)
            line = self._lines.get(key)
            if line is None or line.asks[0] is not ask:
                continue  # it has moved since
            known = line.tried == self._floor.room and line.behind in (None, starving and starving.ticket)
            placements = None if known else self._try(line, policy, starving, avoid)
            if placements is not None:
                granted.append((ask.tenant, ask.specs, placements))
                for key in self._placed(ask):
                    heappush(heads, (self._lines[key].asks[0], key))
                continue
            misses += not known
            if policy.placement not in PASSING or misses == MISSES:
                break
            if first is None:
                first = ask
                if now - ask.since_us >= policy.admission_patience_us:
                    starving = ask
                    avoid = frozenset(gpu for spec in ask.specs for gpu in self._floor.usable(spec))
                    if len(avoid) == len(self._floor.gpus):
                        break
        self._seen, self._starving = self._floor.room, starving
        return granted

    @property
    def waiting(self) -> list[Waiting]:
        """The queue, in order, as it was found when `ready` last looked."""
        queue = sorted(ask for line in self._lines.values() for ask in line.asks)
        return [Waiting(ask.tenant.job, ask.since_us, self._why(ask, queue[0])) for ask in queue]

    def _why(self, ask: Ask, first: Ask) -> str:
        line = self._lines[ask.key]
        if line.tried == self._floor.room and line.behind is None:
            gpus = sum(spec.gang_size * spec.replicas for spec in ask.specs)
            return (
                f"no room for its {len(ask.specs)} worker groups ({gpus} GPUs) within the bytes of GPUs and hosts and "
                "the slowdown that scheduler.max_stretch allows for each class"
            )
        if ask is first:
            return "its turn is next"
        if first is self._starving:
            return f"job {first.tenant.job} has waited for so long that the GPUs are kept for it"
        return f"behind job {first.tenant.job}, the first in the queue"

    def _try(
        self, line: Line, policy: Rules, starving: Ask | None, avoid: frozenset[str]
    ) -> tuple[Placement, ...] | None:
        """Place the first of a line, or note that it was tried."""
        ask = line.asks[0]
        placements = self._floor.choose_all(ask.specs, policy, ask.tenant, avoid=avoid)
        if placements is None:
            line.tried, line.behind = self._floor.room, starving and starving.ticket
        return placements

    def _placed(self, ask: Ask) -> list[Key]:
        """The ask is over. Returns the lines that may have another first now."""
        asks = self._jobs[ask.tenant.job]
        asks.remove(ask)
        changed = [ask.key]
        self._delist(ask)
        if not asks:
            del self._jobs[ask.tenant.job]
        for other in asks:  # it has GPUs of its own now, so it is unlike others that ask for the same
            changed.append(other.key)
            self._delist(other)
            changed.append(self._enlist(other))
        return [key for key in dict.fromkeys(changed) if key in self._lines]

    def _key(self, ask: Ask) -> Key:
        job = ask.tenant.job
        like_others = not self._floor.has(job) and all(other is ask for other in self._jobs.get(job, ()))
        needs = tuple(
            (s.role, s.gang_size, s.replicas, s.device_bytes, s.host_bytes, s.residual_bytes, s.duty) for s in ask.specs
        )
        return ask.kind, "" if like_others else job, needs

    def _enlist(self, ask: Ask) -> Key:
        ask.key = self._key(ask)
        insort(self._lines.setdefault(ask.key, Line()).asks, ask)
        self._seen = None
        return ask.key

    def _delist(self, ask: Ask) -> None:
        line = self._lines[ask.key]
        line.asks.remove(ask)
        if not line.asks:
            del self._lines[ask.key]
        self._seen = None
