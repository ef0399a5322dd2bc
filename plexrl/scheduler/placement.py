"""Where the gangs of a worker group live: which GPUs, and which bytes of each.

Two ways of giving bytes. Fixed (a device without virtual addresses): an offset for a gang's life; a free gap among all
placed extents is taken if there is one, else the offset that overlaps the fewest bytes of others; gangs whose extents
overlap on a GPU are never resident together. Virtual: no offsets. In both, each single gang is to fit beside the
residual bytes of all others there; where no GPUs are left for that and engines of those that sleep may be ended
(residence.py), it is enough that it fits without.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Protocol

from plexrl.scheduler.load import ALIGN, CLASSES, ONE, Card, Placed, bounds, share
from plexrl.scheduler.seats import Node, Seats
from plexrl.scheduler.want import FITS, NEAR, Want, rank_of, refusal, spread
from plexrl.types import BadInput, DoesNotFit, Extent, Gang, GpuRole, GroupSpec, JobClass, Placement, Role, Tenant

BETTER = 0.8  # a place is clearly better if its predicted stretch is at most this share of today's (ours)
# isolated: never a GPU of another job. pack: the fewest GPUs. spread: the least load. spread_backfill places like
# spread; it differs in who may go first (admission.py). fit, ours: the fullest GPUs that have time for all that is
# there and for this, rather those of a gang as wide; where there are none, as spread. So what needs most of a GPU finds
# one that nobody uses, and gangs take turns with few others.
PLACEMENTS = ("isolated", "pack", "spread", "spread_backfill", "fit")


class Rules(Protocol):
    """What placement reads of a policy. max_stretch: class -> the largest predicted stretch of its jobs (1 or more)."""

    placement: str
    max_stretch: Mapping[JobClass, float]


@dataclass(eq=False, slots=True)
class Home:
    """A placed group: whose, where, and its gangs' duty in millionths."""

    spec: GroupSpec
    tenant: Tenant
    placement: Placement
    duty: int


class Floor:
    """All GPUs and what is placed on them.

    gpus: name -> bytes. roles: GPU -> which groups it takes (absent: any). hosts: node -> host memory for state that is
    off the device, bytes (absent: unbounded). over: engines that sleep may be ended. room: rises when something may fit
    that did not before.
    """

    def __init__(
        self,
        gpus: Mapping[str, int],
        *,
        roles: Mapping[str, GpuRole] = {},
        hosts: Mapping[str, int] = {},
        virtual: bool = False,
        over: bool = False,
    ) -> None:
        self.gpus = dict(gpus)
        self._over = over
        self.virtual = virtual
        self.room = 0
        self._roles, self._hosts = dict(roles), dict(hosts)
        self._homes: dict[str, Home] = {}
        self._jobs: dict[str, dict[Card, int]] = {}  # job -> its GPUs -> how many of its gangs are there
        self._nodes: dict[str, Node] = {}
        self._cards: dict[str, Card] = {}
        self._empty: Floor | None = None
        for gpu, size in self.gpus.items():
            name = gpu.rpartition(":")[0]
            node = self._nodes.setdefault(name, Node(name, len(self._nodes), self._hosts.get(name)))
            card = self._cards[gpu] = Card(gpu, len(self._cards), size, self._roles.get(gpu, GpuRole.ANY), node)
            for role in Role:
                if card.role in FITS[role]:
                    node.cards[role].append(card)
        self._seats = Seats(list(self._nodes.values()), lazy=virtual)

    # --- what is there ------------------------------------------------------------------------------------------------

    def on(self, gpu: str) -> list[Placed]:
        """What is placed on a GPU, by offset."""
        return self._cards[gpu].placed

    def residual(self, gpu: str) -> int:
        """Bytes that the processes placed on a GPU keep whether or not they are resident."""
        return self._cards[gpu].residual

    def crowded(self, gpu: str) -> bool:
        """Whether one of the gangs there does not fit beside what all others keep while they sleep."""
        card = self._cards[gpu]
        return card.need + card.residual > card.bytes

    def host_used(self, node: str) -> int:
        """Host bytes promised to the gangs on a node."""
        return self._nodes[node].used

    def has(self, job: str) -> bool:
        """Whether anything of the job is placed."""
        return job in self._jobs

    def where(self, group: str) -> Placement | None:
        """The place of a group, if it has one."""
        home = self._homes.get(group)
        return home and home.placement

    def predicted_stretch(self, gpu: str) -> float:
        """The predicted stretch of the member of the GPU that suffers most; 1 on an empty one."""
        return self._cards[gpu].worst

    def stretch_of(self, job: str) -> float:
        """The predicted stretch of a job: the worst over its GPUs; 1 for a job that has none."""
        return max((card.stretch(job) for card in self._jobs.get(job, ())), default=1.0)

    def usable(self, spec: GroupSpec) -> list[str]:
        """The GPUs on which the group could ever be, by role and size."""
        size = self._size(spec)
        return [c.name for c in self._cards.values() if c.role in FITS[spec.role] and c.bytes >= size]

    def set_paces(self, bands: Mapping[str, int]) -> None:
        """How slow nodes' links are (`Bandwidth.bands`): of two equal places the faster is taken. Unknown: skipped."""
        for name, band in bands.items():
            if name in self._nodes:
                self._nodes[name].pace = band

    # --- placing ------------------------------------------------------------------------------------------------------

    def choose(self, spec: GroupSpec, policy: Rules, tenant: Tenant) -> Placement:
        """Place every gang of the group and keep it. Raises DoesNotFit, keeping nothing; BadInput if it is placed."""
        placement = self._choose(spec, policy, tenant, ())
        if placement is None:
            want = replace(self._want(spec, policy, tenant, ()), over=self._over)
            raise refusal(want, spec, self._cards.values(), self._nodes.values())
        return placement

    def choose_all(
        self, specs: Sequence[GroupSpec], policy: Rules, tenant: Tenant, *, avoid: Collection[str] = ()
    ) -> tuple[Placement, ...] | None:
        """Place all groups of a job, answered in the order of `specs`, or none (None: no room now).

        avoid: GPUs not to be used.
        """
        if self._all(specs, policy, tenant, avoid) is not None:
            return None
        return tuple(self._homes[spec.group].placement for spec in specs)

    def possible(self, specs: Sequence[GroupSpec], policy: Rules, tenant: Tenant) -> None:
        """Raises DoesNotFit when the groups would not fit together even if the pool were empty."""
        if self._empty is None:
            self._empty = Floor(self.gpus, roles=self._roles, hosts=self._hosts, virtual=self.virtual, over=self._over)
        missing = self._empty._all(specs, policy, tenant, ())
        if missing is None:
            for spec in specs:
                self._empty.vacate(spec.group)
            return
        self._empty.choose(missing, policy, tenant)  # says why if it fits not even alone
        self._empty.vacate(missing.group)
        raise DoesNotFit(
            f"the {len(specs)} worker groups of job {tenant.job} do not fit the empty pool together: no place is left "
            f"for {missing.group}",
            "Ask for fewer or smaller groups, or for a pool with more GPUs or host memory",
        )

    def occupy(self, placement: Placement, spec: GroupSpec, tenant: Tenant) -> None:
        """Keep a placement made earlier. Raises BadInput if a GPU or its size is not the same."""
        self._check_new(spec)
        for gang in placement.gangs:
            for gpu, extent in zip(gang.gpus, gang.extents, strict=True):
                outside = (extent.offset or 0) + extent.size > self.gpus.get(gpu, 0)
                if outside or (extent.offset is None) != self.virtual:
                    raise BadInput(
                        f"gang {gang.id} was placed on {gpu} at {extent.offset} with {extent.size} bytes, and that GPU "
                        f"has {self.gpus.get(gpu, 0)}{' at virtual addresses' if self.virtual else ''}",
                        "Start the pool with the GPUs and the device size that its journal was written with",
                    )
        home = self._homes[spec.group] = Home(spec, tenant, placement, share(spec.duty, spec.role))
        for gang in placement.gangs:
            self._put(gang, home)

    def vacate(self, group: str) -> None:
        """Give back what the group has. Raises KeyError for a group that is not placed."""
        self._leave(group)
        self._opened()

    # --- after profiling ----------------------------------------------------------------------------------------------

    def set_duty(self, group: str, duty: float) -> None:
        """A gang of the group was measured to be busy this share of the time (0 to 1)."""
        home = self._homes[group]
        new = share(duty, home.spec.role)
        for gang in home.placement.gangs:
            for card in map(self._cards.__getitem__, gang.gpus):
                card.shift(home.tenant.job, new - home.duty)
                self._seats.changed(card.node)
        if new < home.duty:
            self._opened()
        home.duty = new

    def better(self, group: str, policy: Rules, tenant: Tenant) -> Placement | None:
        """A place on other GPUs with at most `BETTER` of the predicted stretch that the group's GPUs have now, or None.

        It is the place that the policy would choose today, were the group not there. Keeps nothing.
        """
        home = self._homes[group]
        here = [gpu for gang in home.placement.gangs for gpu in gang.gpus]
        now = max(map(self.predicted_stretch, here))
        self._leave(group)
        spec = _with_duty(home)
        placement = self._choose(spec, policy, tenant, set(here), over=False)
        found = None
        if placement:
            there = max(self.predicted_stretch(gpu) for gang in placement.gangs for gpu in gang.gpus)
            found = placement if there <= BETTER * now else None
            self._leave(group)
        self._homes[group] = home
        for gang in home.placement.gangs:
            self._put(gang, home)
        return found

    def move(self, group: str, placement: Placement) -> None:
        """The group lives elsewhere from now on. Raises BadInput, and moves nothing, as `occupy` does."""
        home = self._homes[group]
        self._leave(group)
        try:
            self.occupy(placement, _with_duty(home), home.tenant)
        except BadInput:
            self.occupy(home.placement, _with_duty(home), home.tenant)
            raise
        self._opened()

    # --- inside -------------------------------------------------------------------------------------------------------

    def _opened(self) -> None:
        self.room += 1
        self._seats.opened()

    def _size(self, spec: GroupSpec) -> int:
        return spec.device_bytes if self.virtual else -(-spec.device_bytes // ALIGN) * ALIGN

    def _check_new(self, spec: GroupSpec) -> None:
        if spec.group in self._homes:
            raise BadInput(f"worker group {spec.group} is placed already", "Remove it first")

    def _all(
        self, specs: Sequence[GroupSpec], policy: Rules, tenant: Tenant, avoid: Collection[str]
    ) -> GroupSpec | None:
        """Place all or nothing, the largest gangs first while whole nodes are left. Returns what did not fit.

        Under `fit` what is busiest goes first, while there are GPUs with time for it.
        """
        done: list[GroupSpec] = []
        busiest = policy.placement == "fit"
        for spec in sorted(specs, key=lambda s: (-share(s.duty, s.role) if busiest else 0, -s.gang_size)):
            if self._choose(spec, policy, tenant, avoid) is None:
                for placed in done:
                    self._leave(placed.group)
                return spec
            done.append(spec)
        return None

    def _choose(
        self, spec: GroupSpec, policy: Rules, tenant: Tenant, avoid: Collection[str], over: bool = True
    ) -> Placement | None:
        self._check_new(spec)
        want = self._want(spec, policy, tenant, avoid)
        alike = policy.placement == "fit"
        home = Home(spec, tenant, Placement(spec.group, ()), want.duty)
        gangs: list[Gang] = []
        for replica in range(spec.replicas):
            cards = self._seats.find(want, alike)
            if cards is None and over and self._over and self._crowded(want):
                cards = self._seats.find(replace(want, over=True))
            if cards is None:
                for gang in gangs:
                    self._take(gang, home)
                return None
            extents = tuple(
                Extent(None if self.virtual else card.offset(want.size, tenant.job), want.size) for card in cards
            )
            gang = Gang(f"{spec.group}/{replica}", spec.group, tuple(card.name for card in cards), extents)
            for card in cards:
                want.taken[card] = want.taken.get(card, 0) + 1
                want.partners |= dict.fromkeys(card.duties)
            self._put(gang, home)
            gangs.append(gang)
            want.own = self._jobs[tenant.job]
        home.placement = Placement(spec.group, tuple(gangs))
        self._homes[spec.group] = home
        return home.placement

    def _crowded(self, want: Want) -> bool:
        """Whether there are GPUs that lack no more than what sleepers keep there."""
        cards = chain.from_iterable(node.cards[want.role] for node in self._nodes.values())
        return any(card.bytes >= want.size and not card.holds(want) for card in cards)

    def _want(self, spec: GroupSpec, policy: Rules, tenant: Tenant, avoid: Collection[str]) -> Want:
        own = self._jobs.get(tenant.job, {})
        partners = {tenant.job: None}
        for card in own:
            partners |= dict.fromkeys(card.duties)
        near = dict.fromkeys(card.node for card in own)
        rank = rank_of(policy.placement, self.virtual)
        if rank is spread:  # the nodes of the job and of its partners, a few
            cards = chain.from_iterable(self._jobs.get(job, ()) for job in partners)
            near = dict.fromkeys(islice(dict.fromkeys(card.node for card in cards), NEAR))
        return Want(
            job=tenant.job,
            role=spec.role,
            count=spec.gang_size,
            duty=share(spec.duty, spec.role),
            size=self._size(spec),
            residual=spec.residual_bytes,
            host=spec.host_bytes,
            bounds=bounds(policy.max_stretch),
            mask=1 << CLASSES.index(tenant.kind),
            rank=rank,
            isolated=policy.placement == "isolated",
            own=own,
            near=near,
            partners=partners,
            taken={},
            avoid=avoid,
        )

    def _put(self, gang: Gang, home: Home) -> None:
        job, kind = home.tenant.job, home.tenant.kind
        cards = self._jobs.setdefault(job, {})
        for gpu, extent in zip(gang.gpus, gang.extents, strict=True):
            card, start = self._cards[gpu], extent.offset or 0
            placed = Placed(gang.id, gang.group, job, start, start + extent.size, home.spec.residual_bytes)
            card.put(placed, kind, home.duty)
            card.node.used += home.spec.host_bytes
            cards[card] = cards.get(card, 0) + 1
            self._seats.changed(card.node)
        self._seats.joined(home.spec.role, tuple(map(self._cards.__getitem__, gang.gpus)))

    def _take(self, gang: Gang, home: Home) -> None:
        cards = self._jobs[home.tenant.job]
        self._seats.left(home.spec.role, tuple(map(self._cards.__getitem__, gang.gpus)))
        for gpu in gang.gpus:
            card = self._cards[gpu]
            card.take(gang.id, home.duty)
            card.node.used -= home.spec.host_bytes
            cards[card] -= 1
            if not cards[card]:
                del cards[card]
            self._seats.changed(card.node)
        if not cards:
            del self._jobs[home.tenant.job]

    def _leave(self, group: str) -> None:
        home = self._homes.pop(group)
        for gang in home.placement.gangs:
            self._take(gang, home)


def _with_duty(home: Home) -> GroupSpec:
    """The group's spec with the duty that is known by now."""
    fields = {name: getattr(home.spec, name) for name in home.spec.__struct_fields__}
    return GroupSpec(**fields | {"duty": home.duty / ONE})
