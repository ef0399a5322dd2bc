"""A pool without machines: carries out the scheduler's actions, believes nothing, and answers in any order."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from plexrl.scheduler import (
    Action,
    Build,
    Closed,
    Dropped,
    Gather,
    Pause,
    Placed,
    Policy,
    Prefetch,
    Relocate,
    Run,
    Scheduler,
    Switch,
    Turn,
)
from plexrl.types import (
    Call,
    CallKind,
    Extent,
    Gang,
    GpuRole,
    GroupSpec,
    JobClass,
    Moved,
    Placement,
    Role,
    Span,
    Tenant,
)
from tests.unit.scheduler.watch import Watch

US = 1
MS = 1000
S = 1_000_000


@dataclass
class Engine:
    """What is true of one gang.

    running: calls under way. unreported: calls that ended, which the scheduler was not told yet. partial: paused calls
    whose drawn tokens are here. order: what it was told and has not answered. leaving: the order's victims that live.
    ending: of those whose engines it ends, the ones that have not.
    owner: its class; served: that of the call that ended last. unsure: its way off the device was broken off, and the
    scheduler cannot know how far it came. crowded: its coming in was undone because host memory was short. whole: it
    pauses when its call has ended.
    """

    gang: Gang
    spec: GroupSpec
    built: bool = False
    on_device: bool = False
    running: list[str] = field(default_factory=list)
    unreported: list[str] = field(default_factory=list)
    partial: list[str] = field(default_factory=list)
    order: Build | Switch | Prefetch | None = None
    leaving: list[str] = field(default_factory=list)
    ending: list[str] = field(default_factory=list)
    pausing: bool = False
    moving: Relocate | None = None
    owner: JobClass = JobClass.NORMAL
    served: JobClass | None = None
    unsure: bool = False
    crowded: bool = False
    whole: bool = False

    @property
    def pauses(self) -> bool:
        """It could answer a Pause now."""
        return self.pausing and not (self.whole and self.running)

    def die(self) -> None:
        """Its processes are gone, and all that they held."""
        self.built = self.on_device = self.pausing = False
        self.order = self.moving = None
        self.served, self.unsure, self.crowded = None, False, False
        for calls in (self.running, self.unreported, self.partial, self.leaving, self.ending):
            calls.clear()


class Executor:
    """The head's side of the contract. Checks each action against what is true, and each span against time."""

    def __init__(
        self,
        gpus: dict[str, int],
        policy: Policy,
        start: int = 0,
        *,
        roles: Mapping[str, GpuRole] | None = None,
        hosts: Mapping[str, int] | None = None,
        virtual: bool = False,
        kind: type[Scheduler] = Scheduler,
    ) -> None:
        self.gpus, self.policy, self.virtual = gpus, policy, virtual
        self.roles, self.hosts = dict(roles or {}), dict(hosts or {})
        self.scheduler = kind(gpus, policy, roles=self.roles, hosts=self.hosts, virtual=virtual)
        self.scheduler.start(start)
        self.start = self.now = start
        self.engines: dict[str, Engine] = {}
        self.tenants: dict[str, Tenant] = {}
        self.requests: dict[str, dict[str, GroupSpec]] = {}
        self.relocated: dict[str, Relocate] = {}
        self.calls: dict[str, Call] = {}
        self.kinds: dict[str, JobClass] = {}
        self.outstanding: dict[str, Call] = {}
        self.ended: dict[str, str] = {}
        self.started: list[str] = []
        self.turns: dict[str, str] = {}
        self.peers: dict[str, str] = {}
        self.trace: list[tuple[int, Action]] = []
        self.spans: list[Span] = []
        self.tiled = dict.fromkeys(gpus, start)
        self.events = self.unions = 0
        self.watch = Watch(self)

    # ---- what a head does

    def enroll(self, job: str, kind: JobClass = JobClass.NORMAL, **who: object) -> None:
        """Say who a job is."""
        self.tenants[job] = Tenant(job=job, kind=kind, **who)
        self.do(self.scheduler.enroll(self.now, self.tenants[job]))

    def dismiss(self, job: str) -> None:
        """The job has ended."""
        self.requests.pop(job, None)
        self.tenants.pop(job, None)
        self.do(self.scheduler.dismiss(self.now, job))

    def place(
        self,
        group: str,
        role: Role,
        owner: str,
        size: int,
        gpus: int = 1,
        replicas: int = 1,
        build: bool = True,
        **more: int | float,
    ) -> Placement:
        """Place a group; with `build`, wait until all its gangs are built."""
        spec = GroupSpec(
            group=group, role=role, owner=owner, gang_size=gpus, replicas=replicas, device_bytes=size, **more
        )
        placement = self.scheduler.place(self.now, spec)
        self.events += 1
        self._take(placement, spec)
        assert self.scheduler.wake_at() == self.scheduler.now
        self.tick()
        while build and not all(self.engines[gang.id].built for gang in placement.gangs):
            ordered = [engine for engine in self.engines.values() if isinstance(engine.order, Build)]
            if ordered:
                self.answer(ordered[0])
            else:
                self.wait(self.scheduler.wake_at() - self.now)
        return placement

    def put(
        self,
        group: str,
        role: Role,
        owner: str,
        gpus: Sequence[str] | Sequence[Sequence[str]],
        size: int,
        offset: int = 0,
        resident: bool = False,
        **more: int | float,
    ) -> None:
        """Take up a group that is built already, on exactly these GPUs (one list of GPUs per replica)."""
        rows = [gpus] if isinstance(gpus[0], str) else gpus
        spec = GroupSpec(
            group=group, role=role, owner=owner, gang_size=len(rows[0]), replicas=len(rows), device_bytes=size, **more
        )
        extent = Extent(None if self.virtual else offset, size)
        gangs = tuple(Gang(f"{group}/{i}", group, tuple(row), (extent,) * len(row)) for i, row in enumerate(rows))
        actions = self.scheduler.restore(self.now, Placement(group, gangs), spec, resident)
        for gang in gangs:
            self.engines[gang.id] = Engine(gang, spec, True, resident, owner=self._kind(owner))
        self.do(actions)

    def request(self, job: str, specs: Sequence[GroupSpec]) -> None:
        """Ask for all groups of a job; they are placed now or later, together."""
        self.requests[job] = {spec.group: spec for spec in specs}
        try:
            actions = self.scheduler.request(self.now, job, specs)
        except Exception:
            del self.requests[job]
            raise
        self.do(actions)

    def withdraw(self, job: str) -> None:
        """The job does not want its groups any more."""
        self.requests.pop(job, None)
        self.do(self.scheduler.withdraw(self.now, job))

    def submit(
        self,
        group: str,
        deployment: str,
        kind: CallKind,
        seq: int,
        job: str = "",
        units: int = 1,
        cost_us: int = 0,
        peer: str = "",
    ) -> str:
        """Submit a call, perhaps once more after it was dropped; its id is `<deployment>:<seq>`."""
        call = Call(
            id=f"{deployment}:{seq}",
            kind=kind,
            group=group,
            deployment=deployment,
            job=job or deployment,
            seq=None if kind is CallKind.SAMPLE else seq,
            units=units,
            cost_us=cost_us,
            peer=peer,
        )
        actions = self.scheduler.submit(self.now, call)
        self.calls[call.id] = self.outstanding[call.id] = call
        self.kinds[call.id] = self._kind(call.job)
        if self.ended.get(call.id) == "dropped":
            del self.ended[call.id]
        self.do(actions)
        return call.id

    def finish(self, call: str, units: int = 1) -> None:
        """The engine ends a call."""
        engine = next(e for e in self.engines.values() if call in e.running + e.unreported)
        (engine.running if call in engine.running else engine.unreported).remove(call)
        self._end(call, "done")
        engine.served = self.kinds[call]
        self.watch.finished(self.calls[call], engine.gang.id)
        self.do(self.scheduler.finished(self.now, call, units))

    def answer(self, engine: Engine, ok: bool = True) -> None:
        """The engine answers the Build, Switch or Prefetch that it was given."""
        for victim in engine.ending[:] if ok else engine.ending[1::2]:
            self.end(engine, victim)
        engine.ending = []
        order, engine.order = engine.order, None
        evicted = tuple(engine.leaving if ok else engine.leaving[::2])
        for victim in engine.leaving:
            self.engines[victim].unsure = victim not in evicted
            self.engines[victim].on_device &= victim not in evicted
        engine.leaving = []
        if ok:
            engine.built = engine.on_device = True
            engine.unsure = engine.crowded = False
        else:
            engine.die()
            self.watch.gone(engine.gang.group)
        if isinstance(order, Build):
            told = self.scheduler.built if ok else self.scheduler.build_failed
            self.do(told(self.now, order.gang, evicted))
        else:
            moved = {gpu: Moved(seconds=0.1) for gpu in engine.gang.gpus}
            told = self.scheduler.switched if isinstance(order, Switch) else self.scheduler.prefetched
            self.do(told(self.now, order.gang, ok, moved, evicted))

    def end(self, engine: Engine, victim: str) -> None:
        """The engine of one that sleeps, or has left for the order, ends; its state stays where it is."""
        engine.ending.remove(victim)
        if victim in engine.leaving:
            engine.leaving.remove(victim)
        gone = self.engines[victim]
        begun = gone.running or gone.unreported or (gone.partial and gone.spec.role is Role.TRAIN)
        assert not begun, f"{victim} is ended with calls that were begun"
        gone.die()
        self.do(self.scheduler.unbuilt(self.now, victim))

    def undo(self, engine: Engine, evicted: Iterable[str], crowded: bool = False) -> None:
        """The Build, Switch or Prefetch is taken back; of its victims, those in `evicted` have left all the same."""
        left = {*evicted, *(victim for victim in engine.leaving if not self.engines[victim].on_device)}
        engine.order = None
        for victim in engine.leaving:
            self.engines[victim].unsure = False
            self.engines[victim].on_device = victim not in left
        engine.leaving, engine.ending = [], []
        engine.crowded |= crowded
        self.do(self.scheduler.undone(self.now, engine.gang.id, left, crowded))

    def pause(self, engine: Engine, unfinished: Iterable[str] | None = None) -> None:
        """The engine answers the Pause; the ends of calls not in `unfinished` are reported later."""
        named = tuple(engine.running if unfinished is None else unfinished)
        engine.pausing = False
        engine.unreported += [call for call in engine.running if call not in named]
        engine.partial += [call for call in engine.running if call in named]
        engine.running.clear()
        self.do(self.scheduler.paused(self.now, engine.gang.id, named))

    def relocate(self, engine: Engine, ok: bool = True) -> None:
        """The engines of a group told to move have ended, and will be built in the new place; not ok: they stay."""
        order = engine.moving
        for gang in order.placement.gangs:
            old = self.engines[gang.id]
            old.moving = None
            if ok:
                self.engines[gang.id] = Engine(gang, old.spec, owner=old.owner)
        self.do(self.scheduler.relocated(self.now, order.group, ok))

    def lose(self, engine: Engine, random: Random) -> None:
        """A rank dies; an offload under way for it got somewhere."""
        for victim in engine.leaving:
            self.engines[victim].unsure = True
            self.engines[victim].on_device &= random.random() < 0.5
        engine.die()
        self._leave(engine.gang.id)
        self.watch.gone(engine.gang.group)
        self.do(self.scheduler.lost(self.now, engine.gang.id))

    def remove(self, group: str) -> None:
        """The group and its engines end."""
        for name in [name for name, e in self.engines.items() if e.gang.group == group]:
            del self.engines[name]
            self._leave(name)
        self.do(self.scheduler.remove(self.now, group))

    def tick(self) -> None:
        """Time passed."""
        self.do(self.scheduler.tick(self.now))

    def wait(self, us: int) -> None:
        """Let time pass, with a tick whenever one is wanted."""
        until = self.now + us
        while (wake := self.scheduler.wake_at()) is not None and wake <= until:
            self.now = max(self.now, wake)
            self.tick()
        self.now = until

    def choices(self) -> list[tuple[str, Engine, str]]:
        """What engines could answer now."""
        return [
            (what, engine, call)
            for engine in self.engines.values()
            for what, call in [
                ("order", ""),
                ("pause", ""),
                ("move", ""),
                *(("end", victim) for victim in engine.ending),
                *(("finish", call) for call in engine.running + engine.unreported),
            ]
            if what in ("finish", "end") or {"order": engine.order, "pause": engine.pauses, "move": engine.moving}[what]
        ]

    def step(self, random: Random, faults: float = 0.04) -> bool:
        """Some engine answers; some switches and builds fail or are undone. False if none had anything to answer."""
        choices = self.choices()
        if not choices:
            return False
        what, engine, call = random.choice(choices)
        if what == "order" and random.random() < faults:
            gone = [victim for victim in engine.leaving if random.random() < 0.5]
            self.undo(engine, gone, crowded=random.random() < 0.3)
        elif what == "order":
            self.answer(engine, ok=random.random() >= faults)
        elif what == "pause":
            self.pause(engine, [call for call in engine.running if random.random() < 0.9])
        elif what == "move":
            self.relocate(engine)
        elif what == "end":
            self.end(engine, call)
        else:
            self.finish(call, random.randrange(20))
        return True

    # ---- what a head gets

    def do(self, actions: list[Action]) -> None:
        """Carry the actions out, as far as they are not answered later."""
        self.events += 1
        self.watch.before()
        for action in actions:
            self.trace.append((self.scheduler.now, action))
            match action:
                case Build() | Switch() | Prefetch():
                    self._order(action)
                case Run():
                    self._run(action)
                case Pause():
                    engine = self.engines[action.gang]
                    assert self.turns[engine.gang.gpus[0]] == action.gang and not engine.pausing
                    engine.pausing, engine.whole = True, action.whole
                    self.watch.paused(engine)
                case Turn():
                    self._turn(action)
                case Dropped():
                    for call in action.calls:
                        assert not any(call in e.running for e in self.engines.values()), f"{call} dropped, and runs"
                        self._forget(call)
                        self._end(call, "dropped")
                case Gather():
                    self._gather(action)
                case Relocate():
                    self._relocate(action)
                case Placed():
                    specs = self.requests.pop(action.job)
                    assert {p.group for p in action.placements} == set(specs), "a job is placed whole"
                    for placement in action.placements:
                        self._take(placement, specs[placement.group])
                case Closed():
                    span = action.span
                    assert span.start_us == self.tiled[span.gpu] < span.end_us, f"gap, overlap or nothing: {span}"
                    self.tiled[span.gpu] = span.end_us
                    self.spans.append(span)
        self.watch.after()

    def close(self) -> None:
        """Close all spans; they must tile all GPUs' time, and agree with what was seen."""
        self.do(self.scheduler.spans(self.now))
        assert set(self.tiled.values()) == {self.scheduler.now}
        self.watch.check_spans()

    # ---- what must be true

    def _take(self, placement: Placement, spec: GroupSpec) -> None:
        for gang in placement.gangs:
            assert len(set(gang.gpus)) == spec.gang_size == len(gang.extents), f"not a gang: {gang}"
            for gpu in gang.gpus:
                role = self.roles.get(gpu, GpuRole.ANY)
                assert role is GpuRole.ANY or role.value == spec.role.value, f"{gang.id} is on {gpu}, a GPU to {role}"
            self.engines[gang.id] = Engine(gang, spec, owner=self._kind(spec.owner))

    def _kind(self, job: str) -> JobClass:
        return self.tenants.get(job, Tenant(job=job)).kind

    def _leave(self, victim: str) -> None:
        for engine in self.engines.values():
            for told in (engine.leaving, engine.ending):
                if victim in told:
                    told.remove(victim)

    def _order(self, action: Build | Switch | Prefetch) -> None:
        engine = self.engines[action.gang]
        assert engine.order is None and not engine.running, f"{action} while it does {engine.order or engine.running}"
        assert engine.built != isinstance(action, Build), f"{action} on an engine with built={engine.built}"
        assert not any(action.gang in e.leaving + e.ending for e in self.engines.values()), f"{action} while it leaves"
        holders = {self.turns.get(gpu) for gpu in engine.gang.gpus}
        if action.gang in self.peers.values():
            assert len(holders) == 1 and None not in holders, f"rule 3: {action.gang} has not its whole gang: {holders}"
        elif isinstance(action, Prefetch):
            assert action.gang not in holders, f"{action} in its own turn"
        else:
            assert holders == {action.gang}, f"rule 3: {action.gang} has not its whole gang: {holders}"
        for victim in action.evict:
            other = self.engines[victim]
            at_work = victim in self.turns.values() or victim in self.peers.values()
            assert not at_work, f"rule 2: {victim} is offloaded in its turn"
            assert not other.order and not other.running, f"{victim} is offloaded while it does something"
            assert not any(victim in e.leaving for e in self.engines.values()), f"{victim} is offloaded twice"
        end = [] if isinstance(action, Prefetch) else list(action.end)
        for name in end:
            other = self.engines[name]
            assert other.built and not other.order, f"{name} has no engine to end"
            assert name not in self.turns.values() and name not in self.peers.values(), f"{name} is ended in its turn"
            assert name in action.evict or not other.on_device, f"{name} is ended and has not left"
            assert not any(name in e.ending for e in self.engines.values()), f"{name} is ended twice"
        self.watch.ordered(engine, action)
        engine.order, engine.leaving, engine.ending = action, list(action.evict), end

    def _run(self, action: Run) -> None:
        engine = self.engines[action.gang]
        assert engine.on_device and not engine.order, f"rule 2: {action.gang} runs and is not there"
        assert all(self.turns.get(gpu) == action.gang for gpu in engine.gang.gpus), "rule 1: a GPU serves another"
        assert not engine.pausing, "a call was started between Pause and its answer"
        assert action.calls, "nothing to run"
        for name in action.calls:
            call = self.calls[name]
            assert name not in self.ended, f"rule 8: {name} ended and runs again"
            assert call.group == engine.gang.group, f"rule 2: {name} runs on another group"
            doing = [e.gang.id for e in self.engines.values() if name in e.running + e.unreported]
            assert not doing, f"{name} runs on {action.gang} and {doing}"
            held = [e.gang.id for e in self.engines.values() if name in e.partial]
            assert held in ([], [action.gang]), f"{name} was paused on {held}, and runs on {action.gang}"
            self._forget(name)
            if engine.spec.role is Role.TRAIN:
                busy = engine.running + engine.unreported
                assert not busy, f"rule 6: {name} while {busy} runs"
                older = [c for c in self.outstanding.values() if c.deployment == call.deployment and c.seq < call.seq]
                assert not older, f"rule 6: {name} overtook {older}"
            if call.peer:
                peer = self.engines[f"{call.peer}/0"]
                assert peer.on_device and not peer.order and not peer.running, f"union: {call.peer} is not there"
                self._claim(action.gang, peer)
                self.unions += 1
            self.watch.ran(action.gang)
            engine.running.append(name)
            self.started.append(name)

    def _gather(self, action: Gather) -> None:
        old, new = self.engines[action.gang], self.engines[action.to]
        assert old is not new and old.gang.group == new.gang.group, f"not two replicas of a group: {action}"
        assert new.built and action.calls, f"gathered on an engine that is not: {action}"
        for call in action.calls:
            assert call in old.partial, f"{action.gang} has nothing of {call} that {action.to} could take over"
            old.partial.remove(call)
            new.partial.append(call)

    def _relocate(self, action: Relocate) -> None:
        assert action.group not in self.relocated, f"{action.group} is moved twice"
        self.relocated[action.group] = action
        engines = [e for e in self.engines.values() if e.gang.group == action.group]
        assert {e.gang.id for e in engines} == {gang.id for gang in action.placement.gangs}
        for engine in engines:
            assert engine.built and not (engine.order or engine.running or engine.unreported), f"{action} at work"
            assert not self.watch.gradients(action.group), f"{action} while gradients are live"
            engine.moving = action

    def _turn(self, action: Turn) -> None:
        if action.ended:
            assert action.gang in self.turns.values(), f"{action} of a turn that never began"
            self.turns = {gpu: gang for gpu, gang in self.turns.items() if gang != action.gang}
            self.peers.pop(action.gang, None)
            self.watch.turn_ended(action)
        else:
            for gpu in self.engines[action.gang].gang.gpus:
                assert gpu not in self.turns, f"rule 1: {gpu} serves {self.turns[gpu]} and {action.gang}"
                self.turns[gpu] = action.gang
            turn = self.scheduler.turns.get(action.gang)
            for peer in turn.peers if turn else ():  # no action says so before the call runs
                self._claim(action.gang, self.engines[peer.id])
            self.watch.turn_began(action)

    def _claim(self, gang: str, peer: Engine) -> None:
        """A union turn has the GPUs of both."""
        for gpu in peer.gang.gpus:
            assert self.turns.setdefault(gpu, gang) == gang, f"union: {gpu} serves {self.turns[gpu]}, not {gang}"
        self.peers[gang] = peer.gang.id

    def _forget(self, call: str) -> None:
        for engine in self.engines.values():
            if call in engine.partial:
                engine.partial.remove(call)

    def _end(self, call: str, how: str) -> None:
        assert call not in self.ended, f"rule 8: {call} is {self.ended[call]} and {how}"
        self.ended[call] = how
        del self.outstanding[call]

    # ---- what tests ask

    def count(self, kind: type) -> int:
        """Actions of a kind so far."""
        return sum(isinstance(action, kind) for _, action in self.trace)

    def last(self, kind: type) -> Action:
        """The last action of a kind."""
        return next(action for _, action in reversed(self.trace) if isinstance(action, kind))

    def all(self, kind: type) -> list[tuple[int, Action]]:
        """All actions of a kind, with their times."""
        return [(at, action) for at, action in self.trace if isinstance(action, kind)]
