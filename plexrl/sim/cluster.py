"""Virtual workers: carry out what the scheduler says on a virtual clock, and answer. Times in integer microseconds.

One heap of what comes next; what is due at one time goes in the order in which it was set. No randomness. The clock
jumps from event to event, and every event reaches the scheduler: nothing is skipped or merged.
"""

from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from typing import Any

from plexrl.scheduler import (
    Action,
    Build,
    Closed,
    Dropped,
    Gather,
    Pause,
    Placed,
    Prefetch,
    Relocate,
    Run,
    Scheduler,
    Switch,
    Turn,
)
from plexrl.scheduler.costs import SwitchModel
from plexrl.sim.copies import move_us
from plexrl.sim.engine import Engine
from plexrl.sim.held import Held
from plexrl.sim.result import Bar, TurnMark
from plexrl.sim.tasks import SampleTask, TrainTask
from plexrl.types import Call, Placement, PlexrlError, SpanClass

_ENDLESS = 10_000  # ticks at one instant before we say that the scheduler does not come to rest


class VirtualCluster:
    """The executor of the scheduler's actions, and the clock. now: the present.

    engines: by gang. on_placed, on_built: told of placements and of engines that are up. gpu_us: GPU time by class;
    charged: by (job, class). counts: switches, ends, ... ; hidden_us: GPU time of copies beside others' turns.
    """

    def __init__(self, scheduler: Scheduler, switch: SwitchModel, *, keep_timeline: bool = False) -> None:
        self.scheduler = scheduler
        self.switch = switch
        self.now = 0
        self.events = 0
        self.engines: dict[str, Engine] = {}
        self.tasks: dict[str, SampleTask | TrainTask] = {}
        self.on_placed: Callable[[Placed], None]
        self.on_built: Callable[[Engine], None]
        self.gpu_us = {kind.value: 0 for kind in SpanClass}
        self.charged: dict[tuple[str, str], int] = {}
        self.switches = self.prefetches = self.builds = self.pauses = self.gathers = self.relocations = self.ends = 0
        self.hidden_us = 0
        self.train_busy_us = 0
        self._held = Held()
        self._train_held = Held()
        self.timeline: list[Bar] = []
        self.marks: list[TurnMark] = []
        self._keep = keep_timeline
        self._heap: list[tuple[int, int, Callable[[Any], None], Any]] = []
        self._number = 0
        self._ticked = (0, 0)  # when, and how often then
        self._does: dict[type, Callable[[Any], None]] = {
            Closed: self._close,
            Run: self._run,
            Turn: self._mark if keep_timeline else _ignore,
            Switch: self._switch,
            Pause: self._pause,
            Build: self._build,
            Prefetch: self._prefetch,
            Gather: self._gather,
            Relocate: self._relocate,
            Placed: self._placed,
            Dropped: self._dropped,
        }

    # ---- the clock

    def next(self) -> int:
        """A number above all before."""
        self._number += 1
        return self._number

    def at(self, us: int, what: Callable[[Any], None], about: Any) -> None:
        """Call `what(about)` at `us`, or now if that is past."""
        self._number += 1
        heappush(self._heap, (us if us > self.now else self.now, self._number, what, about))

    def step(self) -> bool:
        """Go to what comes next and do it. False when nothing will come any more."""
        wake = self.scheduler.wake_at()
        if self._heap and (wake is None or self._heap[0][0] <= wake):
            self.now, _, what, about = heappop(self._heap)
            what(about)
        elif wake is not None:
            if wake > self.now:
                self.now = wake
            self._rest()
            self.events += 1
            self.do(self.scheduler.tick(self.now))
        else:
            return False
        return True

    def _rest(self) -> None:
        """Raises PlexrlError when the scheduler wants to be called again and again without time passing."""
        at, ticks = self._ticked
        self._ticked = self.now, ticks + 1 if at == self.now else 0
        if ticks > _ENDLESS:
            raise PlexrlError(f"the scheduler asked for {_ENDLESS} ticks at {self.now} us", "This is a fault of it")

    # ---- engines come and go

    def install(self, engine: Engine) -> None:
        """An engine has its place; it is built when the scheduler says so."""
        self.engines[engine.id] = engine
        self._hold(engine)

    def uninstall(self, engine: Engine) -> None:
        """An engine ends."""
        del self.engines[engine.id]
        self._let_go(engine)

    @property
    def held_us(self) -> int:
        """GPU time in which a GPU belonged to an engine that has ended since."""
        return self._held.total_us

    @property
    def train_held_us(self) -> int:
        """The same of trainers."""
        return self._train_held.total_us

    def _hold(self, engine: Engine) -> None:
        self._held.take(engine.gpus, self.now)
        if engine.trains:
            self._train_held.take(engine.gpus, self.now)

    def _let_go(self, engine: Engine) -> None:
        self._held.give(engine.gpus, self.now)
        if engine.trains:
            self._train_held.give(engine.gpus, self.now)

    # ---- to the scheduler

    def submit(self, call: Call, task: SampleTask | TrainTask) -> None:
        """A job submits a call whose work is `task`."""
        self.tasks[call.id] = task
        self.events += 1
        self.do(self.scheduler.submit(self.now, call))

    def finished(self, task: SampleTask | TrainTask) -> None:
        """An engine ended a call: the scheduler is told, then the job."""
        del self.tasks[task.call]
        self.events += 1
        self.do(self.scheduler.finished(self.now, task.call, task.units))
        task.done(task)

    def do(self, actions: Iterable[Action]) -> None:
        """Carry the actions out, in order."""
        does = self._does
        for action in actions:
            does[type(action)](action)

    # ---- from the scheduler

    def _run(self, action: Run) -> None:
        tasks = self.tasks
        self.engines[action.gang].run([tasks[call] for call in action.calls])

    def _pause(self, action: Pause) -> None:
        engine = self.engines[action.gang]
        self.pauses += 1
        self.at(self.now + engine.pause_us(action.whole), self._paused, engine)

    def _paused(self, engine: Engine) -> None:
        self.events += 1
        self.do(self.scheduler.paused(self.now, engine.id, engine.pause()))

    def _build(self, action: Build) -> None:
        engine = self.engines[action.gang]
        self.builds += 1
        back = engine if engine.loads else None  # one that was ended while it slept finds its state on the host
        us = move_us(self.switch, back, self._leaving(action.evict), self._leaving(action.end))
        self.at(self.now + us + engine.build_us, self._built, action)

    def _built(self, action: Build) -> None:
        self._leave(action.evict, action.end)
        engine = self.engines[action.gang]
        first = not engine.loads
        engine.loaded()
        self.events += 1
        self.do(self.scheduler.built(self.now, action.gang, action.evict))
        if first:
            self.on_built(engine)

    def _switch(self, action: Switch) -> None:
        self.switches += 1
        coming = self.engines[action.gang]
        us = move_us(self.switch, coming, self._leaving(action.evict), self._leaving(action.end))
        self.at(self.now + us, self._switched, action)

    def _switched(self, action: Switch) -> None:
        self._leave(action.evict, action.end)
        self.engines[action.gang].loaded()
        self.events += 1
        self.do(self.scheduler.switched(self.now, action.gang, True, {}, action.evict))

    def _prefetch(self, action: Prefetch) -> None:
        engine = self.engines[action.gang]
        self.prefetches += 1
        us = move_us(self.switch, engine, self._leaving(action.evict))
        self.hidden_us += us * len(engine.gpus)
        self.at(self.now + us, self._prefetched, action)

    def _prefetched(self, action: Prefetch) -> None:
        self._leave(action.evict)
        if action.gang not in self.engines:
            return  # its job ended meanwhile
        self.engines[action.gang].loaded()
        self.events += 1
        self.do(self.scheduler.prefetched(self.now, action.gang, True, {}, action.evict))

    def _gather(self, action: Gather) -> None:
        # What was drawn is in the tasks, and no cache but the old engine's has it: the Run that follows recomputes it.
        self.gathers += 1

    def _relocate(self, action: Relocate) -> None:
        """Save what changed; the Builds that follow pay for the new engines."""
        self.relocations += 1
        us = max(self.switch.out_us(self.engines[gang.id].bytes_out()) for gang in action.placement.gangs)
        self.at(self.now + us, self._relocated, action.placement)

    def _relocated(self, placement: Placement) -> None:
        for gang in placement.gangs:
            engine = self.engines.get(gang.id)
            if engine is None:
                return  # its job ended meanwhile
            engine.offloaded()
            self._let_go(engine)
            engine.gpus = gang.gpus
            self._hold(engine)
        self.events += 1
        self.do(self.scheduler.relocated(self.now, placement.group, True))

    def _placed(self, action: Placed) -> None:
        self.on_placed(action)

    def _dropped(self, action: Dropped) -> None:
        # No virtual engine is ever lost, so nobody but the end of a job could drop calls, and a job ends without any.
        raise PlexrlError(f"the scheduler dropped {', '.join(action.calls)}", "This is a fault of it")

    def _mark(self, action: Turn) -> None:
        self.marks.append(TurnMark(self.now, action.gang, action.ended, action.reason))

    def _close(self, action: Closed) -> None:
        span = action.span
        us = span.end_us - span.start_us
        kind = span.kind.value
        self.gpu_us[kind] += us
        shares = span.shares
        if shares:
            charged = self.charged
            if kind == "busy":
                engine = self.engines.get(span.gang)
                if engine is not None and engine.trains:
                    self.train_busy_us += us
            if len(shares) == 1:
                key = shares[0][0], kind
                charged[key] = charged.get(key, 0) + us
            else:
                total, given, before = sum(weight for _, weight in shares), 0, 0
                for job, weight in shares:  # cumulative rounding: the parts add up to the whole
                    given += weight
                    part = us * given // total - before
                    before += part
                    charged[job, kind] = charged.get((job, kind), 0) + part
        if self._keep:
            self.timeline.append(
                Bar(span.gpu, span.start_us, span.end_us, kind, span.gang, shares[0][0] if shares else "")
            )

    # ---- copies

    def _leaving(self, victims: Sequence[str]) -> list[Engine]:
        """Their engines; those of jobs that have ended meanwhile are gone."""
        return [engine for victim in victims if (engine := self.engines.get(victim)) is not None]

    def _leave(self, victims: Sequence[str], sleepers: Sequence[str] = ()) -> None:
        for engine in self._leaving(victims):
            engine.offloaded()
        for engine in self._leaving(sleepers):
            self.ends += 1
            self.events += 1
            self.do(self.scheduler.unbuilt(self.now, engine.id))


def _ignore(action: Action) -> None:
    pass
