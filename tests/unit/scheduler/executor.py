"""A pool without machines: carries out the scheduler's actions, believes nothing, and answers in any order."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random

from plexrl.scheduler import Action, Build, Closed, Dropped, Pause, Policy, Run, Scheduler, Switch, Turn
from plexrl.types import Call, CallKind, Gang, GroupSpec, Moved, Placement, Role, Span

US = 1
MS = 1000
S = 1_000_000


@dataclass
class Engine:
    """What is true of one gang: where its state is, what it executes, and which ends of calls it has yet to report."""

    gang: Gang
    spec: GroupSpec
    built: bool = False
    on_device: bool = False
    running: list[str] = field(default_factory=list)
    unreported: list[str] = field(default_factory=list)
    order: Build | Switch | None = None
    pausing: bool = False


class Executor:
    """The head's side of the contract. Checks each action against what is true, and each span against time."""

    def __init__(self, gpus: dict[str, int], policy: Policy, start: int = 0) -> None:
        self.scheduler = Scheduler(gpus, policy)
        self.scheduler.start(start)
        self.start = self.now = start
        self.engines: dict[str, Engine] = {}
        self.calls: dict[str, Call] = {}
        self.ended: dict[str, str] = {}
        self.started: list[str] = []
        self.turns: dict[str, str] = {}
        self.trace: list[tuple[int, Action]] = []
        self.spans: list[Span] = []
        self.tiled = dict.fromkeys(gpus, start)
        self.events = 0

    # ---- what a head does

    def place(
        self, group: str, role: Role, owner: str, size: int, gpus: int = 1, replicas: int = 1, build: bool = True
    ) -> Placement:
        """Place a group; with `build`, wait until all its gangs are built."""
        spec = GroupSpec(group=group, role=role, owner=owner, gang_size=gpus, replicas=replicas, device_bytes=size)
        placement = self.scheduler.place(self.now, spec)
        self.events += 1
        for gang in placement.gangs:
            self.engines[gang.id] = Engine(gang, spec)
        assert self.scheduler.wake_at() == self.scheduler.now
        self.tick()
        while build and not all(self.engines[gang.id].built for gang in placement.gangs):
            ordered = [engine for engine in self.engines.values() if isinstance(engine.order, Build)]
            if ordered:
                self.answer(ordered[0])
            else:
                self.wait(self.scheduler.wake_at() - self.now)
        return placement

    def submit(self, group: str, deployment: str, kind: CallKind, seq: int, job: str = "", units: int = 1) -> str:
        """Submit a call, perhaps once more after it was dropped; its id is `<deployment>:<seq>`."""
        call = Call(
            id=f"{deployment}:{seq}",
            kind=kind,
            group=group,
            deployment=deployment,
            job=job or deployment,
            seq=None if kind is CallKind.SAMPLE else seq,
            units=units,
        )
        self.calls[call.id] = call
        if self.ended.get(call.id) == "dropped":
            del self.ended[call.id]
        self.do(self.scheduler.submit(self.now, call))
        return call.id

    def finish(self, call: str, units: int = 1) -> None:
        """The engine ends a call."""
        engine = next(e for e in self.engines.values() if call in e.running + e.unreported)
        (engine.running if call in engine.running else engine.unreported).remove(call)
        self._end(call, "done")
        self.do(self.scheduler.finished(self.now, call, units))

    def answer(self, engine: Engine, ok: bool = True) -> None:
        """The engine answers the Build or Switch that it was given."""
        order, engine.order = engine.order, None
        evicted = order.evict if ok else order.evict[::2]
        for victim in evicted:
            if victim in self.engines:
                self.engines[victim].on_device = False
        if ok:
            engine.built = engine.on_device = True
            self._check_memory()
        else:
            engine.built = engine.on_device = False
            engine.unreported.clear()
        if isinstance(order, Build):
            told = self.scheduler.built if ok else self.scheduler.build_failed
            self.do(told(self.now, order.gang, evicted))
        else:
            moved = {gpu: Moved(seconds=0.1) for gpu in engine.gang.gpus}
            self.do(self.scheduler.switched(self.now, order.gang, ok, moved, evicted))

    def pause(self, engine: Engine, unfinished: Iterable[str] | None = None) -> None:
        """The engine answers the Pause; the ends of calls not in `unfinished` are reported later."""
        named = tuple(engine.running if unfinished is None else unfinished)
        engine.pausing = False
        engine.unreported += [call for call in engine.running if call not in named]
        engine.running.clear()
        self.do(self.scheduler.paused(self.now, engine.gang.id, named))

    def lose(self, engine: Engine, random: Random) -> None:
        """A rank dies; an offload under way for it got somewhere."""
        if engine.order:
            for victim in engine.order.evict:
                if victim in self.engines and random.random() < 0.5:
                    self.engines[victim].on_device = False
        engine.built = engine.on_device = engine.pausing = False
        engine.order = None
        engine.running.clear()
        engine.unreported.clear()
        self.do(self.scheduler.lost(self.now, engine.gang.id))

    def remove(self, group: str) -> None:
        """The group and its engines end."""
        for name in [name for name, e in self.engines.items() if e.gang.group == group]:
            del self.engines[name]
        self.do(self.scheduler.remove(self.now, group))

    def tick(self) -> None:
        self.do(self.scheduler.tick(self.now))

    def wait(self, us: int) -> None:
        """Let time pass, with a tick whenever one is wanted."""
        until = self.now + us
        while (wake := self.scheduler.wake_at()) is not None and wake <= until:
            self.now = max(self.now, wake)
            self.tick()
        self.now = until

    def step(self, random: Random) -> bool:
        """Some engine answers something. False if none had anything to answer."""
        choices = [
            (what, engine, call)
            for engine in self.engines.values()
            for what, call in [
                ("order", ""),
                ("pause", ""),
                *(("finish", call) for call in engine.running + engine.unreported),
            ]
            if what == "finish" or (engine.order if what == "order" else engine.pausing)
        ]
        if not choices:
            return False
        what, engine, call = random.choice(choices)
        if what == "order":
            self.answer(engine, ok=random.random() > 0.04)
        elif what == "pause":
            self.pause(engine, [call for call in engine.running if random.random() < 0.9])
        else:
            self.finish(call, random.randrange(20))
        return True

    # ---- what a head gets

    def do(self, actions: list[Action]) -> None:
        """Carry the actions out, as far as they are not answered later."""
        self.events += 1
        for action in actions:
            self.trace.append((self.scheduler.now, action))
            match action:
                case Build() | Switch():
                    self._order(action)
                case Run():
                    self._run(action)
                case Pause():
                    engine = self.engines[action.gang]
                    assert self.turns[engine.gang.gpus[0]] == action.gang and not engine.pausing
                    engine.pausing = True
                case Turn():
                    self._turn(action)
                case Dropped():
                    for call in action.calls:
                        assert not any(call in e.running for e in self.engines.values()), f"{call} dropped, and runs"
                        self._end(call, "dropped")
                case Closed():
                    span = action.span
                    assert span.start_us == self.tiled[span.gpu] < span.end_us, f"gap, overlap or nothing: {span}"
                    self.tiled[span.gpu] = span.end_us
                    self.spans.append(span)

    def close(self) -> None:
        """Close all spans; they must tile all GPUs' time."""
        self.do(self.scheduler.spans(self.now))
        assert set(self.tiled.values()) == {self.scheduler.now}

    # ---- what must be true

    def _order(self, action: Build | Switch) -> None:
        engine = self.engines[action.gang]
        assert engine.order is None and not engine.running
        assert engine.built == isinstance(action, Switch), f"{action} on an engine with built={engine.built}"
        assert all(self.turns.get(gpu) == action.gang for gpu in engine.gang.gpus), "rule 3: not its whole gang"
        for victim in action.evict:
            assert victim not in self.turns.values(), f"rule 2: {victim} is offloaded in its turn"
            assert overlap(engine.gang, self.engines[victim].gang), f"{victim} need not go for {action.gang}"
        engine.order = action

    def _run(self, action: Run) -> None:
        engine = self.engines[action.gang]
        assert engine.on_device and not engine.order, f"rule 2: {action.gang} runs and is not there"
        assert all(self.turns.get(gpu) == action.gang for gpu in engine.gang.gpus), "rule 1: a GPU serves another"
        assert not engine.pausing, "a call was started between Pause and its answer"
        assert action.calls, "nothing to run"
        for name in action.calls:
            call = self.calls[name]
            assert name not in self.ended, f"rule 8: {name} ended and runs again"
            assert name not in engine.running, f"{name} runs twice"
            if engine.spec.role is Role.TRAIN:
                busy = engine.running + engine.unreported
                assert not busy, f"rule 6: {name} while {busy} runs"
                older = [c for c in self.calls.values() if c.deployment == call.deployment and c.seq < call.seq]
                assert all(c.id in self.ended for c in older), f"rule 6: {name} overtook"
            engine.running.append(name)
            self.started.append(name)

    def _turn(self, action: Turn) -> None:
        if action.ended:
            assert action.gang in self.turns.values()
            self.turns = {gpu: gang for gpu, gang in self.turns.items() if gang != action.gang}
        else:
            for gpu in self.engines[action.gang].gang.gpus:
                assert gpu not in self.turns, f"rule 1: {gpu} serves {self.turns[gpu]} and {action.gang}"
                self.turns[gpu] = action.gang

    def _end(self, call: str, how: str) -> None:
        assert call not in self.ended, f"rule 8: {call} is {self.ended[call]} and {how}"
        self.ended[call] = how

    def _check_memory(self) -> None:
        there = [engine.gang for engine in self.engines.values() if engine.on_device]
        for i, one in enumerate(there):
            for other in there[:i]:
                assert not overlap(one, other), f"rule 5: {one.id} and {other.id} are both resident and overlap"

    # ---- what tests ask

    def count(self, kind: type) -> int:
        """Actions of a kind so far."""
        return sum(isinstance(action, kind) for _, action in self.trace)

    def last(self, kind: type) -> Action:
        """The last action of a kind."""
        return next(action for _, action in reversed(self.trace) if isinstance(action, kind))


def overlap(one: Gang, other: Gang) -> bool:
    """Whether two gangs share a byte of a GPU (by brute force over GPUs, not the scheduler's own function)."""
    mine = {gpu: range(e.offset, e.offset + e.size) for gpu, e in zip(one.gpus, one.extents, strict=True)}
    for gpu, extent in zip(other.gpus, other.extents, strict=True):
        if gpu in mine:
            r = mine[gpu]
            if max(r.start, extent.offset) < min(r.stop, extent.offset + extent.size):
                return True
    return False
