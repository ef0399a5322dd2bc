"""Jobs as closed loops on a pool whose engines take time: for cases where only the course of hours tells."""

from collections.abc import Callable, Generator, Iterable
from heapq import heappop, heappush

from plexrl.scheduler import Build, Prefetch, Relocate, Run, Switch, Turn
from plexrl.types import CallKind, SpanClass
from tests.unit.scheduler.executor import Engine, Executor

PAUSE = "pause"
Job = Generator[int | Iterable[str], None, None]


class Player:
    """Plays jobs against an executor.

    A job is a generator: it yields a time to think (microseconds) or the ids of calls to wait for. switch_us: of every
    Switch and Prefetch. build_us: of every Build. pause_us: until a running call can stop; None: only at its end.
    A paused call goes on where it stopped.
    """

    def __init__(self, ex: Executor, *, switch_us: int, build_us: int = 0, pause_us: int | None = 0) -> None:
        self.ex, self.switch_us, self.build_us, self.pause_us = ex, switch_us, build_us, pause_us
        self.left: dict[str, int] = {}
        self.submitted: dict[str, int] = {}
        self.done: dict[str, int] = {}
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._number = 0
        self._waiting: list[tuple[Job, set[str]]] = []
        self._seen: dict[tuple[str, object], int] = {}
        self._seqs: dict[str, int] = {}
        self._began: dict[str, int] = {}

    # ---- jobs

    def start(self, job: Job, at: int = 0) -> None:
        """Let a job begin."""
        self.at(at, lambda: self._advance(job))

    def submit(
        self,
        group: str,
        deployment: str,
        kind: CallKind,
        us: int,
        job: str = "",
        units: int = 1,
        cost_us: int = 0,
        peer: str = "",
    ) -> str:
        """A call that takes so long; its seq is the next of its deployment."""
        seq = self._seqs[deployment] = self._seqs.get(deployment, 0) + 1
        name = f"{deployment}:{seq}"
        self.left[name], self.submitted[name] = us, self.ex.now
        return self.ex.submit(group, deployment, kind, seq, job, units, cost_us, peer)

    def at(self, at: int, what: Callable[[], None]) -> None:
        """Do something at a time."""
        self._number += 1
        heappush(self._heap, (at, self._number, what))

    # ---- time

    def run(self, until: int) -> None:
        """Play until then."""
        ticked = 0
        while True:
            self._look()
            wake = self.ex.scheduler.wake_at()
            due = min([at for at in (wake, self._heap[0][0] if self._heap else None) if at is not None], default=until)
            if due > until or (wake is None and not self._heap):
                self.ex.now = max(self.ex.now, until)
                return
            if due > self.ex.now:
                self.ex.now, ticked = due, 0
            if wake is not None and wake <= self.ex.now:
                ticked += 1
                assert ticked < 20, f"at {self.ex.now} the scheduler wants ticks for ever"
                self.ex.tick()
            else:
                heappop(self._heap)[2]()

    def _advance(self, job: Job) -> None:
        for want in job:
            if isinstance(want, int):
                self.at(self.ex.now + want, lambda: self._advance(job))
                return
            missing = {call for call in want if call not in self.done}
            if missing:
                self._waiting.append((job, missing))
                return

    def _look(self) -> None:
        """Give every order, pause and call that engines have got by now its time."""
        seen = {}
        for engine in list(self.ex.engines.values()):
            for what in (engine.order, engine.moving, PAUSE if engine.pausing else None, *engine.running):
                if what is not None:
                    key = engine.gang.id, what
                    seen[key] = self._seen[key] if key in self._seen else self._plan(engine, what)
        for key in self._seen.keys() - seen.keys():
            if key[1] in self.left and key[1] not in self.done:  # a paused call
                self.left[key[1]] = self._rest(key[1])
        self._seen = seen

    def _plan(self, engine: Engine, what: object) -> int:
        """Answer it when its time is over, unless it has ended otherwise; the number of this plan."""
        if isinstance(what, Build | Relocate):
            took = self.build_us
        elif isinstance(what, Switch | Prefetch):
            took = self.switch_us
        elif what == PAUSE:
            took = self.pause_us if self.pause_us is not None else max(map(self._rest, engine.running), default=0)
        else:
            took, self._began[what] = self.left[what], self.ex.now
        plan = self._number + 1
        key = engine.gang.id, what
        self.at(self.ex.now + took, lambda: self._answer(engine, what) if self._seen.get(key) == plan else None)
        return plan

    def _answer(self, engine: Engine, what: object) -> None:
        if isinstance(what, Relocate):
            self.ex.relocate(engine)
        elif what == PAUSE:
            self.ex.pause(engine)
        elif isinstance(what, str):
            self.done[what] = self.ex.now
            self.ex.finish(what)
            for waiting in list(self._waiting):
                waiting[1].discard(what)
                if not waiting[1]:
                    self._waiting.remove(waiting)
                    self._advance(waiting[0])
        else:
            self.ex.answer(engine)

    def _rest(self, call: str) -> int:
        return max(0, self.left[call] - (self.ex.now - self._began[call]))

    # ---- what came of it

    def waits(self) -> dict[str, int]:
        """How long each call that has begun waited for it."""
        first: dict[str, int] = {}
        for at, run in self.ex.all(Run):
            for call in run.calls:
                first.setdefault(call, at)
        return {call: at - self.submitted[call] for call, at in first.items()}

    def share(self, kind: SpanClass) -> float:
        """The share of all GPUs' time that went to a class."""
        self.ex.close()
        spent = sum(span.end_us - span.start_us for span in self.ex.spans if span.kind is kind)
        return spent / ((self.ex.scheduler.now - self.ex.start) * len(self.ex.gpus))

    def turns(self, gang: str) -> list[tuple[int, Turn]]:
        """When the gang's turns began and ended."""
        return [(at, turn) for at, turn in self.ex.all(Turn) if turn.gang == gang]
