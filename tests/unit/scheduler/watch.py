"""The design's rules, checked from outside: from actions, answers and time alone, never from the scheduler's books."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from plexrl.scheduler import Build, Prefetch, Switch, Turn
from plexrl.types import Call, CallKind, Gang, JobClass, Residency, Role, SpanClass

if TYPE_CHECKING:
    from tests.unit.scheduler.executor import Engine, Executor

KINDS = list(JobClass)
HOUR = 3_600_000_000


@dataclass
class Wait:
    """A gang that has calls, or an engine to build, and no turn. starved_us: when B was over; ahead: turns, then."""

    since_us: int
    kind: JobClass
    starved_us: int | None = None
    ahead: int = 0


@dataclass
class Held:
    """A turn. cost_us: of the switch that began it, once it is over. contested_us: since when somebody waits for it.
    ahead: it went ahead of a reservation. ran, fruitful: a call has begun, has ended.
    """

    began_us: int
    opened_us: int | None = None
    cost_us: int = 0
    contested_us: int | None = None
    ahead: bool = False
    ran: bool = False
    fruitful: bool = False


@dataclass
class Longest:
    """The longest of each that rule 9 allows for, so far."""

    switch: int = 0
    piece: int = 0
    late: int = 0


class Watch:
    """Rules 1, 4, 5, 9, 10 and 11 as far as a head can see them. `now` is the scheduler's."""

    def __init__(self, pool: Executor) -> None:
        self.pool = pool
        self.now = pool.now
        self.truth = {gpu: dict.fromkeys(("busy", "switch"), 0) for gpu in pool.gpus}
        self.does = dict.fromkeys(pool.gpus, "")
        self.waits: dict[str, Wait] = {}
        self.held: dict[str, Held] = {}
        self.asked: dict[str, int] = {}
        self.pauses: dict[str, int] = {}
        self.longest = Longest()
        self.preempted: deque[int] = deque()
        self.starved = 0
        self.nearest = 0.0
        self.live: dict[str, str] = {}
        self.fruitless: dict[str, int] = {}

    def gradients(self, group: str) -> set[str]:
        """Deployments of the group whose last forward_backward no optim_step has followed."""
        return {deployment for deployment, where in self.live.items() if where == group}

    def finished(self, call: Call, gang: str) -> None:
        """Gradients are live from forward_backward to optim_step."""
        if gang in self.held:
            self.held[gang].fruitful = True
        if call.kind is CallKind.FORWARD_BACKWARD:
            self.live[call.deployment] = call.group
        elif call.kind in (CallKind.OPTIM_STEP, CallKind.LOAD_STATE):
            self.live.pop(call.deployment, None)

    def ran(self, gang: str) -> None:
        """A call began in the gang's turn."""
        self.held[gang].ran = True

    def gone(self, group: str) -> None:
        """A gang of the group died, and its gradients with it."""
        for deployment in self.gradients(group):
            del self.live[deployment]

    # ---- around every event

    def before(self) -> None:
        """An event happened; until then everything was as it was."""
        now = self.pool.scheduler.now
        for gpu, what in self.does.items():
            if what:
                self.truth[gpu][what] += now - self.now
        self.longest.late = max(self.longest.late, now - self.now)
        self.now = now
        for name in list(self.asked):
            engine = self.pool.engines.get(name)
            if not engine or not engine.order:
                self.longest.switch = max(self.longest.switch, now - self.asked.pop(name))
        for name in list(self.pauses):
            engine = self.pool.engines.get(name)
            if not engine or not engine.pausing:
                self.longest.piece = max(self.longest.piece, now - self.pauses.pop(name))

    def after(self) -> None:
        """The event's actions are carried out."""
        for name, turn in self.held.items():
            both = [self.pool.engines[one] for one in (name, self.pool.peers.get(name, name))]
            if turn.opened_us is None and all(one.on_device and not one.order for one in both):
                turn.opened_us, turn.cost_us = self.now, self.now - turn.began_us
        self.does = {gpu: self._does(gpu) for gpu in self.pool.gpus}
        self._memory()
        self._waits()
        self._turns()

    # ---- single actions

    def ordered(self, engine: Engine, action: Build | Switch | Prefetch) -> None:
        """A victim is one that shares a GPU where the bytes are short (virtual), or bytes (fixed offsets)."""
        self.asked[action.gang] = self.now
        coming = [engine, *(self.pool.engines[f"{c.peer}/0"] for c in self._unions(engine))]
        near = {gpu for one in coming for gpu in one.gang.gpus}
        crowded = any(one.crowded for one in coming)
        if (
            crowded
            or not self.pool.policy.lazy
            or any(e.unsure and near & set(e.gang.gpus) for e in self.pool.engines.values())
        ):
            return
        for victim in action.evict:
            other = self.pool.engines[victim]
            due = bool(set(self._short(coming)) & set(other.gang.gpus))
            if not self.pool.virtual:
                due |= any(overlap(one.gang, other.gang) for one in coming)
            assert due, f"{victim} need not go for {action.gang}"
        away = [self.pool.engines[victim] for victim in action.evict]
        for name in () if isinstance(action, Prefetch) else action.end:
            other = self.pool.engines[name]
            assert other.spec.residual_bytes, f"{name} keeps nothing, and is ended for {action.gang}"
            assert set(self._short(coming, away)) & set(other.gang.gpus), f"{name} need not be ended for {action.gang}"

    def _short(self, coming: list[Engine], away: Sequence[Engine] = ()) -> list[str]:
        """GPUs that cannot take those that come as they are, and when these have left."""
        return [
            gpu
            for gpu, capacity in self.pool.gpus.items()
            if self._bytes(gpu)
            + sum(e.gang.extents[0].size - held(e) for e in coming if gpu in e.gang.gpus)
            - sum(held(e) - e.spec.residual_bytes for e in away if gpu in e.gang.gpus)
            > capacity
        ]

    def _unions(self, engine: Engine) -> list[Call]:
        """Outstanding calls of its group that want another group's gang too."""
        return [c for c in self.pool.outstanding.values() if c.peer and c.group == engine.gang.group]

    def turn_began(self, action: Turn) -> None:
        """Rule 9 ends here; the turn's own clock begins."""
        self.waits.pop(action.gang, None)
        self.held[action.gang] = Held(self.now, ahead=action.reason == "backfill")

    def turn_ended(self, action: Turn) -> None:
        """Rule 10, and the interactive class's budget of any hour."""
        held = self.held.pop(action.gang)
        if held.ran:
            self.fruitless[action.gang] = 0 if held.fruitful else self.fruitless.get(action.gang, 0) + 1
        if action.reason == "preempted":
            self.preempted.append(self.now)
            while self.preempted[0] <= self.now - HOUR:
                self.preempted.popleft()

    def paused(self, engine: Engine) -> None:
        """Rule 10: a turn lasts at least k times its switch, but where others have the better right to its GPUs."""
        turn, policy, name = self.held[engine.gang.id], self.pool.policy, engine.gang.id
        self.pauses[name] = self.now
        rivals = [
            e for n, e in self.pool.engines.items() if (n in self.waits or self._waiting(n)) and self._share(engine, e)
        ]
        assert rivals, f"{name} is paused for nobody"
        opened_us, cost_us = turn.opened_us, turn.cost_us
        if opened_us is None:  # in this very event
            opened_us, cost_us = self.now, self.now - turn.began_us
        early = self.now < opened_us + int(policy.min_turn_factor * cost_us)
        excused = (
            turn.ahead
            or self._kind(engine) is JobClass.SCAVENGER
            or any(self._kind(other) is JobClass.INTERACTIVE for other in rivals)
            or (engine.spec.role is Role.SAMPLE and policy.gather_share < 1)
        )
        assert not early or excused, f"rule 10: {name} is paused {self.now - opened_us} us after it opened"

    # ---- rule 11

    def _does(self, gpu: str) -> str:
        """What runs hides what moves; what moves and is not hidden is a switch, whoever waits for it."""
        pool = self.pool
        name = pool.turns.get(gpu, "")
        holder = pool.engines.get(name)
        opened = holder and self.held[name].opened_us is not None
        if opened and (holder.running or holder.unreported):
            return "busy"
        if holder and (holder.pausing or not opened):
            return "switch"  # stopping for another is part of it
        for engine in pool.engines.values():
            leaving = [pool.engines[victim].gang.gpus for victim in engine.leaving]
            if engine.order and any(gpu in gpus for gpus in (engine.gang.gpus, *leaving)):
                return "switch"
        return ""

    def check_spans(self) -> None:
        """Busy and exposed switch in the ledger are what was seen, to the microsecond."""
        told = {gpu: dict.fromkeys(("busy", "switch"), 0) for gpu in self.pool.gpus}
        for span in self.pool.spans:
            if span.kind.value in ("busy", "switch"):
                told[span.gpu][span.kind.value] += span.end_us - span.start_us
            charged = span.kind in (SpanClass.BUSY, SpanClass.SWITCH, SpanClass.KEPT)
            assert bool(span.gang) == charged and bool(span.shares) == charged, f"rule 11: who pays for {span}?"
        assert told == self.truth, f"rule 11: the ledger says {told}, and it was {self.truth}"

    # ---- rule 5

    def _bytes(self, gpu: str) -> int:
        """The most that may be on the GPU now: what is there, plus what comes in crossing what makes way for it."""
        engines, total = self.pool.engines, 0
        crossing = {v for e in engines.values() if e.order and gpu in e.gang.gpus for v in e.leaving + e.ending}
        for name, engine in engines.items():
            if gpu not in engine.gang.gpus:
                continue
            if engine.order:
                names = dict.fromkeys(engine.leaving + engine.ending)
                away = [engines[v] for v in names if gpu in engines[v].gang.gpus]
                stay = sum(v.spec.residual_bytes for v in away if v.gang.id not in engine.ending)
                total += max(sum(held(v) for v in away), stay + engine.gang.extents[0].size)
            elif name not in crossing:
                total += held(engine)
        return total

    def _memory(self) -> None:
        engines = self.pool.engines
        for gpu, capacity in self.pool.gpus.items():
            assert self._bytes(gpu) <= capacity, f"rule 5: {self._bytes(gpu)} bytes on {gpu}, which has {capacity}"
        if not self.pool.virtual:
            there = [e for e in engines.values() if e.on_device or e.order]
            for i, one in enumerate(there):
                for other in there[:i]:
                    agreed = one.gang.id in other.leaving or other.gang.id in one.leaving
                    assert agreed or not overlap(one.gang, other.gang), (
                        f"rule 5: {one.gang.id} and {other.gang.id} overlap and both are, or come, on the device"
                    )
        for node, budget in self.pool.hosts.items():
            held = sum(
                e.spec.host_bytes * sum(gpu.rpartition(":")[0] == node for gpu in e.gang.gpus) for e in engines.values()
            )
            assert held <= budget, f"rule 5: {held} bytes of host memory promised on {node}, which has {budget}"

    # ---- rules 9 and 10

    def _kind(self, engine: Engine) -> JobClass:
        """The best class among the gang's calls, running or queued there; without calls, of whom it served last."""
        pool = self.pool
        state = pool.scheduler.gangs.get(engine.gang.id)
        calls = [*engine.running, *engine.unreported, *(state.queue if state else ())]
        kinds = {pool.kinds[call] for call in calls} or {engine.served or engine.owner}
        return next(kind for kind in KINDS if kind in kinds)

    def _share(self, one: Engine, other: Engine) -> bool:
        return bool(self._reach(one) & self._reach(other))

    def _reach(self, engine: Engine) -> set[str]:
        """The GPUs of its turn, or of the one that it waits for; a union's are those of both."""
        waiter = self.pool.scheduler.line.get(engine.gang.id)
        held = {gpu for gpu, name in self.pool.turns.items() if name == engine.gang.id}
        return held or set(waiter.gpus if waiter else engine.gang.gpus)

    def _waits(self) -> None:
        """Who waits is asked of the books (which replica has a sample); since when and how long, is kept here."""
        pool, limit = self.pool, self.pool.policy.starvation_us
        waiting = {name: self._kind(e) for name, e in pool.engines.items() if not e.moving and self._waiting(name)}
        for name, kind in waiting.items():
            if name not in self.waits or self.waits[name].kind is not kind:
                self.waits[name] = Wait(self.now, kind)
        for name in self.waits.keys() - waiting.keys():
            del self.waits[name]
        for name, wait in self.waits.items():
            if wait.kind is JobClass.SCAVENGER or pool.scheduler.draining or self.now - wait.since_us < limit:
                continue
            if wait.starved_us is None:
                wait.starved_us, wait.ahead = self.now, self._ahead(name, wait)
                self.starved += 1
            waited, allowed = self.now - wait.starved_us, (wait.ahead + 1) * self._slice()
            self.nearest = max(self.nearest, waited / allowed)
            assert waited <= allowed, (
                f"rule 9: {name} waited {self.now - wait.since_us} us; with {wait.ahead} turns ahead of it "
                f"{limit} us and {allowed} us are the most"
            )

    def _waiting(self, name: str) -> bool:
        state = self.pool.scheduler.gangs.get(name)
        if state is None or name in self.pool.turns.values() or state.residency is Residency.LOST:
            return False
        engine = self.pool.engines[name]
        if not engine.built:
            return not engine.order and (not state.unbuilt or state.wanted or bool(state.queue))
        peers = [self.pool.engines[peer.id] for peer in state.peers]
        if not all(peer.built and not peer.moving for peer in peers):
            return False  # for its peer's engine first
        return bool(state.queue) and not (engine.spec.role is Role.TRAIN and engine.unreported)

    def _ahead(self, name: str, wait: Wait) -> int:
        """Turns that are open, and starving gangs that have waited longer, as far as they hang together with it."""
        older = {n for n, w in self.waits.items() if w.since_us <= wait.since_us and w.kind is not JobClass.SCAVENGER}
        left, found = (older | self.held.keys()) - {name}, [name]
        for one in found:
            near = {n for n in left if self._share(self.pool.engines[one], self.pool.engines[n])}
            left -= near
            found += near
        return len(found) - 1

    def _quantum(self, engine: Engine) -> int:
        """A sampler's is its own, doubled after every turn in which none of its calls ended: 8 times or ten minutes."""
        if engine.spec.role is Role.TRAIN:
            return self.pool.policy.quantum_us
        quantum = self.pool.policy.sample_quantum_us
        return min(quantum << min(30, self.fruitless.get(engine.gang.id, 0)), max(8 * quantum, 600_000_000))

    def _slice(self) -> int:
        """Rule 9's quantum + switch + longest piece, as seen; a policy lets a turn overrun to reach its optim_step."""
        policy, longest = self.pool.policy, self.longest
        switch = max([longest.switch, *(self.now - at for at in self.asked.values())])
        piece = max([longest.piece, *(self.now - at for at in self.pauses.values())])
        quantum = max(map(self._quantum, self.pool.engines.values()), default=0)
        turn = max(quantum, int(policy.min_turn_factor * switch)) + policy.gradient_anticipation_us
        return turn + switch + piece + longest.late

    def _turns(self) -> None:
        """Rule 10: when the quantum is over and somebody of no lower class waits, the turn has ended or is pausing."""
        policy, pool = self.pool.policy, self.pool
        for name, turn in self.held.items():
            engine = pool.engines[name]
            kinds = list(JobClass)
            rank = kinds.index(self._kind(engine))
            contested = any(
                kinds.index(w.kind) <= rank and self._share(engine, pool.engines[n]) for n, w in self.waits.items()
            )
            if not contested:
                turn.contested_us = None
                continue
            if turn.contested_us is None:
                turn.contested_us = self.now
            if turn.opened_us is None or engine.pausing or pool.scheduler.draining:
                continue
            end = turn.opened_us + max(self._quantum(engine), int(policy.min_turn_factor * turn.cost_us))
            if engine.spec.role is Role.TRAIN:
                end += policy.gradient_anticipation_us
            assert self.now <= max(end, turn.contested_us), f"rule 10: {name} goes on after its quantum"
            idle = not engine.running and not engine.unreported
            assert not idle or pool.scheduler.wake_at() is not None, f"rule 3: {name} is kept, and nothing ends it"


def held(engine: Engine) -> int:
    """Device bytes on each of its GPUs; what its processes keep while they live is part of its size."""
    if engine.on_device:
        return engine.gang.extents[0].size
    return engine.spec.residual_bytes if engine.built else 0


def overlap(one: Gang, other: Gang) -> bool:
    """Whether two gangs share a byte of a GPU (by brute force over GPUs, not the scheduler's own function)."""
    mine = {gpu: range(e.offset, e.offset + e.size) for gpu, e in zip(one.gpus, one.extents, strict=True)}
    for gpu, extent in zip(other.gpus, other.extents, strict=True):
        if gpu in mine:
            r = mine[gpu]
            if max(r.start, extent.offset) < min(r.stop, extent.offset + extent.size):
                return True
    return False
