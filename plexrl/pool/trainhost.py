"""What a training rank does with its engine: the leader decides each step, all ranks take it together.

Steps are msgpack arrays [verb, ...] told by rank 0 (`Lockstep`). Between two micro-batches of a call the leader may
leave it and come back later; nothing is in flight then, so the gang may be offloaded meanwhile.
"""

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from plexrl.engines.protocol import TrainEngine, Undone, UserError
from plexrl.pool.lockstep import Lockstep
from plexrl.pool.messages import Outcome, Work, slab_of
from plexrl.types import BadInput, CallKind, Moved, PlexrlError, Result

if TYPE_CHECKING:
    from plexrl.memory.arena import ArenaMap

log = logging.getLogger("plexrl.enginehost")
_pack = msgspec.msgpack.Encoder().encode


_SWITCHES = frozenset({"offload", "load", "undo"})
# Steps of a call; the rest are the head's orders, which may come between two of them.
_CALL = frozenset({"begin", "next", "abandon"})


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """How one rank fared in one step. done: the call has ended (a step of a call only)."""

    ok: bool = True
    error: str = ""
    category: str = ""
    done: bool = False
    cpu_us: int = 0
    moved: Moved | None = None
    result: Result | None = None


class TrainRank:
    """One rank's side of every step; the same code on all ranks."""

    def __init__(self, engine: TrainEngine, rank: int, node: str, first_on_node: bool, arena: "ArenaMap | None" = None):
        """arena: None of an engine that has no memory."""
        self._engine = engine
        self._arena = arena
        self._rank = rank
        self._node = node
        self._first_on_node = first_on_node
        self._running: Generator[None, None, Result] | None = None
        self._cpu_us = 0

    def take(self, step: list) -> Answer:
        """Do one step. Errors become answers: a rank that raised where others did not would hang the gang."""
        if step[0] not in _CALL:
            return self._order(*step)
        begun = time.process_time_ns()
        try:
            answer = getattr(self, f"_{step[0]}")(*step[1:])
        except PlexrlError as error:
            self._running = None
            answer = _failed(error)
        self._cpu_us += (time.process_time_ns() - begun) // 1000
        if answer.done:
            answer = msgspec.structs.replace(answer, cpu_us=self._cpu_us)
            self._cpu_us = 0
        return answer

    def _order(self, verb: str, args: dict) -> Answer:
        """One of the head's orders. A call that is half done stays so, whatever comes of it."""
        try:
            return Answer(done=True, moved=getattr(self, f"_{verb}")(args))
        except PlexrlError as error:
            return _failed(error)
        except Exception as error:
            if verb not in _SWITCHES:
                raise
            log.exception("%s failed", verb)
            return Answer(ok=False, error=f"{verb}: {type(error).__name__}: {error}", category="server", done=True)

    def _begin(self, kind: str, deployment: str, args: dict, body: bytes) -> Answer:
        self._cpu_us = 0
        engine, told = self._engine, b""
        match CallKind(kind):
            case CallKind.FORWARD | CallKind.FORWARD_BACKWARD as which:
                self._running = engine.forward_backward(deployment, body, which is CallKind.FORWARD)
                return Answer()
            case CallKind.OPTIM_STEP:
                return Answer(done=True, result=engine.optim_step(deployment, body))
            case CallKind.SAVE_STATE:
                moved = engine.save(deployment, Path(args["folder"]), args["optimizer"])
            case CallKind.LOAD_STATE:
                moved = engine.load(deployment, Path(args["folder"]), args["optimizer"])
            case CallKind.PUBLISH:
                # One snapshot per node: its first rank packs it. Ranks hold the same weights.
                slab = slab_of(args["slabs"][self._node]) if self._first_on_node else None
                moved = engine.publish(deployment, slab, Path(args["folder"]) if args["folder"] else None)
                if slab is not None and self._arena is not None:
                    told = self._arena.checksum(slab, args["version"]).encode()
            case other:
                raise BadInput(f"a trainer does not execute {other}")
        result = Result(
            content_type="application/json",
            body=told,
            moved_bytes=moved.bytes_in + moved.bytes_out,
            moved_us=round(moved.seconds * 1e6),
        )
        return Answer(done=True, result=result)

    def _next(self) -> Answer:
        assert self._running is not None
        try:
            next(self._running)
        except StopIteration as stop:
            self._running = None
            return Answer(done=True, result=stop.value)
        return Answer()

    def _abandon(self) -> Answer:
        """Leave the call that is half done for good: between two micro-batches nothing of it is in flight."""
        self._running = None
        return Answer(done=True)

    def _create(self, args: dict) -> None:
        self._engine.create(
            args["deployment"],
            slab_of(args["slabs"][self._rank]),
            args["lora_rank"],
            args["seed"],
            args["attn"],
            args["mlp"],
            args["unembed"],
            bool(args.get("adopt")),
        )
        if args["folder"]:
            self._engine.load(args["deployment"], Path(args["folder"]), args["optimizer"])

    def _drop(self, args: dict) -> None:
        self._engine.drop(args["deployment"])

    def _spill(self, args: dict) -> None:
        self._engine.spill(args["deployment"])

    def _rehome(self, args: dict) -> None:
        self._engine.rehome(args["deployment"], slab_of(args["slabs"][self._rank]))

    def _offload(self, args: dict) -> Moved:
        return self._engine.offload()

    def _load(self, args: dict) -> Moved:
        return self._engine.load_device()

    def _undo(self, args: dict) -> Moved:
        return self._engine.undo()


def _failed(error: PlexrlError) -> Answer:
    category = "user" if isinstance(error, BadInput | UserError) else "server"
    return Answer(ok=False, error=str(error), category=category, done=True)


def follow(rank: TrainRank, lockstep: Lockstep) -> None:
    """A follower's life: take the leader's steps until it says exit or goes away."""
    while True:
        step = msgspec.msgpack.decode(lockstep.tell())
        if step[0] == "exit":
            return
        lockstep.collect(_pack(rank.take(step)))


class TrainHost:
    """The leader's queue of calls over the gang. `busy` while there is a step to take."""

    def __init__(self, rank: TrainRank, lockstep: Lockstep):
        self._rank = rank
        self._lockstep = lockstep
        self._decode = msgspec.msgpack.Decoder(Answer).decode
        self._queue: deque[Work] = deque()
        self._current: Work | None = None
        self._begun_at = 0.0
        self._stopped = True
        self.deployments: set[str] = set()
        self.versions: set[str] = set()
        self.outcomes: OrderedDict[str, Outcome] = OrderedDict()

    @property
    def busy(self) -> bool:
        """Whether `step` has something to do."""
        return not self._stopped and (self._current is not None or bool(self._queue))

    def held(self) -> tuple[str, ...]:
        """Calls that have not ended, in order; the first may be half done."""
        current = (self._current.id,) if self._current else ()
        return current + tuple(work.id for work in self._queue)

    def progress(self) -> tuple[()]:
        """A training call has nothing to show before its end."""
        return ()

    def run(self, works: tuple[Work, ...]) -> list[Outcome]:
        """Start, continue or widen the turn; outcomes of calls that had ended already are given again."""
        self._stopped = False
        held = set(self.held())
        again = []
        for work in works:
            if work.id in self.outcomes:
                again.append(self.outcomes[work.id])
            elif work.id not in held:
                self._queue.append(work)
        return again

    def pause(self) -> tuple[str, ...]:
        """Stop here: this is between two steps."""
        self._stopped = True
        return self.held()

    def cancel(self, call: str) -> list[Outcome]:
        """Drop a call, begun or not; its outcome, which the scheduler waits for.

        Only the end of a deployment cancels its training calls: the gradients of one that had begun are left as they
        are.
        """
        if self._current is not None and self._current.id == call:
            self._all(["abandon"])
            self._current = None
        elif any(work.id == call for work in self._queue):
            self._queue = deque(work for work in self._queue if work.id != call)
        else:
            return []
        outcome = self.outcomes[call] = Outcome(id=call, ok=False, error="the call was cancelled", category="user")
        return [outcome]

    def order(self, verb: str, args: dict) -> dict[str, object]:
        """create, drop, spill, rehome, offload or load on all ranks. Raises what the first failing rank said.

        An offload or a load that fails on one rank is undone on all: Undone. When that fails too, PlexrlError.
        """
        if verb == "drop" and self._current is not None and self._current.deployment == args["deployment"]:
            self.cancel(self._current.id)
        answers = self._all([verb, args])
        failed = next((answer for answer in answers if not answer.ok), None)
        if failed is not None and verb in ("offload", "load"):
            broken = next((answer for answer in self._all(["undo", {}]) if not answer.ok), None)
            if broken is not None:
                raise PlexrlError(f"{failed.error}; it could not be undone: {broken.error}")
            raise Undone(failed.error)
        if failed is not None:
            raise (UserError if failed.category == "user" else PlexrlError)(failed.error)
        if verb == "create":
            self.deployments.add(args["deployment"])
        elif verb == "drop":
            self.deployments.discard(args["deployment"])
            self._queue = deque(work for work in self._queue if work.deployment != args["deployment"])
        return {"moved": [answer.moved for answer in answers]}

    def step(self) -> list[Outcome]:
        """One micro-batch or one call; the outcome of a call that ended."""
        if self._current is None:
            work = self._current = self._queue.popleft()
            self._begun_at = time.monotonic()
            answers = self._all(["begin", work.kind, work.deployment, work.args, work.body])
        else:
            answers = self._all(["next"])
        if not any(answer.done for answer in answers):
            return []
        work, self._current = self._current, None
        outcome = self._outcome(work, answers)
        self.outcomes[outcome.id] = outcome
        return [outcome]

    def exit(self) -> None:
        """Release the followers."""
        self._lockstep.tell(_pack(["exit"]))

    def _all(self, step: list) -> list[Answer]:
        self._lockstep.tell(_pack(step))
        return [self._decode(part) for part in self._lockstep.collect(_pack(self._rank.take(step)))]

    def _outcome(self, work: Work, answers: list[Answer]) -> Outcome:
        wall_us = int((time.monotonic() - self._begun_at) * 1e6)
        cpu_us = max(answer.cpu_us for answer in answers)
        failed = next((answer for answer in answers if not answer.ok), None)
        if failed is not None:
            return Outcome(
                id=work.id, ok=False, error=failed.error, category=failed.category, cpu_us=cpu_us, wall_us=wall_us
            )
        result = answers[0].result
        return Outcome(
            id=work.id,
            ok=True,
            content_type=result.content_type,
            body=result.body,
            units=result.units,
            cpu_us=cpu_us,
            wall_us=wall_us,
            moved_bytes=sum(a.result.moved_bytes for a in answers if a.result),
            moved_us=max(a.result.moved_us for a in answers if a.result),
        )
