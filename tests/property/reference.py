"""Who is granted, said slowly: from a picture of the whole state, all waiters, nothing incremental, no backfill.

What the class under test keeps by GPU and by mark, this computes anew: the place in line of all who wait, by its
definition in the docs, then one pass over them after another until nothing changes.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from plexrl.scheduler import Scheduler, Turn
from plexrl.scheduler.costs import CALL_PRIOR_US
from plexrl.scheduler.line import Waiter
from plexrl.types import JobClass, Residency, Tenant

RANK = {JobClass.INTERACTIVE: 0, JobClass.NORMAL: 1, JobClass.SCAVENGER: 2}
THERE = (Residency.DEVICE, Residency.LOADING, Residency.OFFLOADING)
DEAD = (Residency.COLD, Residency.LOST)


@dataclass(eq=False)
class Member:
    """A gang. stuck: has its turn, comes in, leaves or moves, so that it may not be sent away."""

    gpus: tuple[str, ...]
    residency: Residency
    stuck: bool
    leaving: bool
    coming: bool
    size: int
    residual: int
    rivals: tuple[str, ...]


@dataclass
class Waiting:
    """A gang in line. places: the smallest goes first; as it is not resident, and as it is. members: itself, and the
    other gang of a union turn.
    """

    gpus: tuple[str, ...]
    members: tuple[str, ...]
    places: tuple[tuple[float, ...], tuple[float, ...]]
    starves: bool
    ticket: int
    scavenger: bool


class Picture:
    """All that a decision depends on, copied."""

    def __init__(self, s: Scheduler) -> None:
        self.virtual, self.bytes = s.virtual, dict(s.floor.gpus)
        self.free = set(s.free)
        self.reserved = {gpu: w.state.id for gpu, w in s.line.reserved.items()}
        self.gangs = {
            g.id: Member(
                g.gpus,
                g.residency,
                stuck=bool(g.id in s.turns or g.arrival or g.evictor or g.moving),
                leaving=bool(g.evictor),
                coming=bool(g.arrival),
                size=g.gang.extents[0].size,
                residual=g.spec.residual_bytes,
                rivals=tuple(g.rivals),
            )
            for g in s.gangs.values()
        }
        self.line = {
            w.state.id: Waiting(
                w.gpus,
                (w.state.id, *(peer.id for peer in w.state.peers)),
                (place(s, w, False), place(s, w, True)),
                starves(s, w),
                w.ticket,
                rank(w) == RANK[JobClass.SCAVENGER],
            )
            for w in s.line
        }

    def place(self, name: str) -> tuple[float, ...]:
        """Where a gang is in line now: one that was told to leave has a switch before it again."""
        gang = self.gangs[name]
        return self.line[name].places[gang.residency is Residency.DEVICE and not gang.leaving]


def decide(p: Picture, away: Mapping[str, tuple[str, ...]]) -> tuple[list[str], dict[str, str]]:
    """Who is granted, and for whom GPUs are kept then, while nobody has starved. Changes the picture.

    After every decision all are asked again, the first in line first. away: whom the class under test sends away for
    those that it grants. That they may leave is checked; the choice among those who may is not made here.
    """
    granted: list[str] = []
    while True:
        for name in sorted(p.line, key=p.place):
            w = p.line[name]
            if not set(w.gpus) & p.free:
                continue
            if any(p.reserved.get(gpu, name) != name for gpu in w.gpus):
                continue
            if set(w.gpus) <= p.free and room(p, w):
                grant(p, name, away.get(name, ()))
                granted.append(name)
                break
            if not w.scavenger and p.reserved.get(w.gpus[0]) != name:
                p.reserved.update(dict.fromkeys(w.gpus, name))
                break
        else:
            return granted, p.reserved


def overtaken(p: Picture, began: list[str]) -> list[tuple[str, str]]:
    """Starved gangs that could have been granted, and who was on their GPUs instead without having starved longer."""
    return [
        (name, other)
        for name, w in p.line.items()
        if w.starves and name not in began and set(w.gpus) <= p.free and room(p, w)
        if not any(p.place(n) < p.place(name) and set(o.gpus) & set(w.gpus) for n, o in p.line.items())
        for other in began
        if set(w.gpus) & set(p.line[other].gpus) and p.place(other) > p.place(name)
    ]


def grant(p: Picture, name: str, away: tuple[str, ...]) -> None:
    """It has its GPUs, comes in, and others leave for it."""
    w = p.line.pop(name)
    p.free -= set(w.gpus)
    p.reserved = {gpu: owner for gpu, owner in p.reserved.items() if owner != name}
    for victim in away:
        assert not p.gangs[victim].stuck, f"{victim} may not leave for {name}"
        p.gangs[victim].stuck = p.gangs[victim].leaving = True
    for member in w.members:
        p.gangs[member].stuck = True
        if p.gangs[member].residency is not Residency.DEVICE:
            p.gangs[member].residency = Residency.LOADING
        p.line.pop(member, None)  # the other gang of a union turn waits for nothing else now


def room(p: Picture, w: Waiting) -> bool:
    """Whether all of its gangs could be there once everybody has left who may."""
    members = [p.gangs[name] for name in w.members]
    if any(m.leaving or m.residency is Residency.LOST for m in members):
        return False
    if any(m.residency is Residency.COLD for m in members[1:]):
        return False
    coming = [m for m in members if m.residency is not Residency.DEVICE and not m.coming]
    stay = [g for name, g in p.gangs.items() if g.residency in THERE and (g.stuck or name in w.members)]
    for m in coming:
        if any(p.gangs[r] in stay and p.gangs[r] is not m for r in m.rivals):
            return False
        for gpu in m.gpus if p.virtual else ():
            there = [g for g in p.gangs.values() if gpu in g.gpus and (g in stay or g in coming)]
            asleep = [g for g in p.gangs.values() if gpu in g.gpus and g not in there and g.residency not in DEAD]
            if sum(g.size for g in there) + sum(g.residual for g in asleep) > p.bytes[gpu]:
                return False
    return True


# ---- the place in line


def place(s: Scheduler, w: Waiter, resident: bool) -> tuple[float, ...]:
    """Starved, by arrival; class; a deadline that is near; priority; the policy's order; arrival."""
    if starves(s, w):
        return (0, w.ticket)
    state = w.state
    tenant = next((entry.tenant for entry in state.queue.values()), state.owner)
    switch = 0 if resident else state.switch.mean
    if w.due_us is not None and s.now + s.policy.quantum_us + switch >= w.due_us:
        return (1, rank(w), 0, w.due_us, w.ticket)
    return (1, rank(w), 1, -tenant.priority, *ordered(s, w, tenant, switch), w.ticket)


def ordered(s: Scheduler, w: Waiter, tenant: Tenant, switch: int) -> tuple[float, ...]:
    """What the policy's order says: hrrs = F * (wait + service + switch) / (service + switch)."""
    user = tenant.user or tenant.job
    first = next((entry.call for entry in w.state.queue.values()), None)
    told = (first.cost_us or CALL_PRIOR_US[first.kind]) if first else w.state.switch.mean
    service = min(w.state.service.mean if w.state.service.count else told, s.policy.quantum_us)
    service = max(service, switch, 1)
    factor = s.factor(tenant)  # a second old at most
    score = factor * (max(0, s.now - w.since_us) + service + switch) / (service + switch)
    return {
        "fifo": lambda: (),
        "round_robin": lambda: (w.state.used,),
        "hrrs": lambda: (-score,),
        "fair": lambda: (*(-level for level in s.shares.level(s.now, tenant.account, user)), -score),
    }[s.policy.order]()


def rank(w: Waiter) -> int:
    """The best class among its calls; without calls, its owner's."""
    calls = [*w.state.active.values(), *w.state.queue.values()]
    return min((RANK[entry.tenant.kind] for entry in calls), default=RANK[w.state.owner.kind])


def starves(s: Scheduler, w: Waiter) -> bool:
    """It has waited B. Scavengers do not starve."""
    return rank(w) < RANK[JobClass.SCAVENGER] and s.now - w.since_us >= s.policy.starvation_us


# ---- beside the class under test


class Checked(Scheduler):
    """The class itself; each of its granting decisions is compared with the reference's. Only without backfill."""

    decisions = blocked = starved = 0

    def _grants(self) -> None:
        picture, at = Picture(self), len(self._actions)
        super()._grants()
        done = self._actions[at:]
        began = [action.gang for action in done if isinstance(action, Turn)]
        away = {action.gang: action.evict for action in done if hasattr(action, "evict")}
        if any(w.starves for w in picture.line.values()):
            assert not overtaken(picture, began), f"overtaken: {overtaken(picture, began)}"
            Checked.starved += len(began)
            return
        expected, reserved = decide(picture, away)
        assert sorted(began) == sorted(expected), f"granted {began}, and the reference {expected}"
        kept = {gpu: w.state.id for gpu, w in self.line.reserved.items()}
        assert kept == reserved, f"kept {kept}, and the reference {reserved}"
        Checked.decisions += len(began)
        Checked.blocked += bool(reserved)
