"""What a sampling replica does with its engine: a batch that newcomers join, one decode step at a time."""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

from plexrl.engines.protocol import SampleEngine, Undone, UserError
from plexrl.memory.checksum import Damaged
from plexrl.pool.messages import Outcome, Progress, Work, slab_of
from plexrl.types import Moved, PlexrlError, Slab

if TYPE_CHECKING:
    from plexrl.memory.arena import ArenaMap

log = logging.getLogger("plexrl.enginehost")
PROGRESS_S = 0.1
PROGRESS_S_PER_BYTE = 1e-6  # the whole is told each time: many long answers, more rarely


class SampleHost:
    """The calls of one replica. CPU time of a step is split evenly among the calls that were live in it."""

    def __init__(self, engine: SampleEngine, node: str, arena: "ArenaMap | None" = None):
        """arena: None of an engine that has no memory."""
        self._engine = engine
        self._arena = arena
        self._node = node
        self._live: OrderedDict[str, float] = OrderedDict()
        self._cpu_us: dict[str, float] = {}
        self._watched: dict[str, tuple[float, int]] = {}  # calls to tell the progress of: when next, what was told
        self._stopped = True
        self.deployments: set[str] = set()
        self.versions: set[str] = set()
        self.outcomes: OrderedDict[str, Outcome] = OrderedDict()

    @property
    def busy(self) -> bool:
        """Whether `step` has something to do."""
        return not self._stopped and bool(self._live)

    def held(self) -> tuple[str, ...]:
        """Calls that have not ended."""
        return tuple(self._live)

    def run(self, works: tuple[Work, ...]) -> list[Outcome]:
        """Start, continue or widen the turn; outcomes that exist already (or at once, for bad input) are given."""
        self._stopped = False
        given = []
        for work in works:
            if work.id in self.outcomes:
                given.append(self.outcomes[work.id])
            elif work.id not in self._live:
                drawn = work.args.get("drawn") or {"state": b"", "cpu_us": 0.0, "wall_us": 0.0}
                try:
                    self._engine.add(work.id, work.args["version"] or None, work.body, drawn["state"])
                except PlexrlError as error:
                    given.append(self._end(work.id, error=error))
                else:
                    self._live[work.id] = time.monotonic() - drawn["wall_us"] / 1e6
                    self._cpu_us[work.id] = drawn["cpu_us"]
                    if work.args.get("progress"):
                        self._watched[work.id] = (0.0, 0)
        return given

    def progress(self) -> list[Progress]:
        """What has been drawn since it was last told, of calls whose client watches; each a few times a second."""
        now, told = time.monotonic(), []
        for call, (at, tokens) in list(self._watched.items()):
            if call not in self._live:
                del self._watched[call]
            elif now >= at:
                drawn, body = self._engine.drawn(call)
                if drawn > tokens:
                    self._watched[call] = (now + PROGRESS_S + len(body) * PROGRESS_S_PER_BYTE, drawn)
                    told.append(Progress(call=call, tokens=drawn, body=body))
        return told

    def _take(self, call: str) -> dict[str, object]:
        """Give up a call with what it has drawn, for another replica to go on with."""
        state = self._engine.take(call)
        wall_us = (time.monotonic() - self._live.pop(call)) * 1e6
        return {"state": state, "cpu_us": self._cpu_us.pop(call), "wall_us": wall_us}

    def pause(self) -> tuple[str, ...]:
        """Stop here: this is between two tokens."""
        self._stopped = True
        return self.held()

    def cancel(self, call: str) -> list[Outcome]:
        """Drop a call and what it had drawn. Nobody waits for an outcome."""
        self._engine.cancel(call)
        self._live.pop(call, None)
        self._cpu_us.pop(call, None)
        return []

    def order(self, verb: str, args: dict) -> dict[str, object]:
        """attach, detach, take, offload or load. Raises PlexrlError; Undone for a switch that was taken back."""
        match verb:
            case "attach":
                slab = args["slabs"].get(self._node)
                if args["slabs"] and slab is None:
                    raise PlexrlError(f"version {args['version']} is not on node {self._node}")
                if slab is not None:
                    self._verify(args["version"], slab_of(slab), args.get("checksum", ""))
                self._engine.attach(
                    args["version"],
                    slab_of(slab) if slab else None,
                    args["lora_rank"],
                    args["attn"],
                    args["mlp"],
                    args["unembed"],
                )
                self.versions.add(args["version"])
            case "detach":
                self._engine.detach(args["version"])
                self.versions.discard(args["version"])
            case "take":
                return {"drawn": {call: self._take(call) for call in args["calls"] if call in self._live}}
            case "offload":
                return {"moved": [self._switch(self._engine.offload)]}
            case "load":
                return {"moved": [self._switch(self._engine.load_device)]}
            case _:
                raise PlexrlError(f"a sampler does not do {verb}")
        return {}

    def _verify(self, version: str, slab: Slab, checksum: str) -> None:
        """Before anything is drawn by it. Raises Damaged."""
        if self._arena is None or not checksum or version in self.versions:
            return
        if (found := self._arena.checksum(slab, version)) != checksum:
            raise Damaged(
                f"version {version} is damaged in the memory of {self._node}: expected {checksum}, found {found}",
                "Publish it again",
            )

    def _switch(self, move: Callable[[], Moved]) -> Moved:
        try:
            return move()
        except Exception as error:
            log.exception("a switch failed")
            try:
                self._engine.undo()
            except Exception as broken:
                raise PlexrlError(f"{error}; it could not be undone: {broken}") from error
            raise Undone(str(error)) from error

    def step(self) -> list[Outcome]:
        """One token for every live sequence."""
        begun = time.process_time_ns()
        ended = self._engine.step()
        share = (time.process_time_ns() - begun) / 1000 / max(len(self._live), 1)
        for call in self._live:
            self._cpu_us[call] += share
        return [
            self._end(call, error=what) if isinstance(what, UserError) else self._end(call, result=what)
            for call, what in ended
        ]

    def exit(self) -> None:
        """Nothing to release."""

    def _end(self, call: str, result=None, error: PlexrlError | None = None) -> Outcome:
        begun = self._live.pop(call, time.monotonic())
        wall_us = int((time.monotonic() - begun) * 1e6)
        cpu_us = int(self._cpu_us.pop(call, 0.0))
        if error is not None:
            outcome = Outcome(id=call, ok=False, error=str(error), category="user", cpu_us=cpu_us, wall_us=wall_us)
        else:
            outcome = Outcome(
                id=call,
                ok=True,
                content_type=result.content_type,
                body=result.body,
                units=result.units,
                cpu_us=cpu_us,
                wall_us=wall_us,
                moved_bytes=result.moved_bytes,
                moved_us=result.moved_us,
            )
        self.outcomes[call] = outcome
        return outcome
