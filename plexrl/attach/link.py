"""The proxy's one connection to whichever head its pool has now.

The registry says where the head is. It is read again twice a second while there is no head that admitted us and every
few seconds while there is, so that a head at another address, under another key or with another nonce is found; to that
one the proxy says hello again and sends again whatever was not answered. A call that reaches a pool twice runs once:
training calls and samples are known by model or session and seq_id, the rest by an idempotency key.
"""

import asyncio
import os
from collections.abc import Callable
from enum import Enum

import zmq

from plexrl.attach import holds as held
from plexrl.attach.settings import Settings
from plexrl.types import BadInput, PlexrlError, Unavailable
from plexrl.wire import messages, munge
from plexrl.wire.channel import Client
from plexrl.wire.keys import Keys
from plexrl.wire.registry import Live, Registry

Answer = tuple[int, dict[str, str], bytes]

_LOOK_S = 0.5
_LOOK_WELL_S = 5.0
_HELLO_AGAIN_S = 5.0
_SWEEP_S = 0.25
# More than the SDK ever has open (2,000 samples and 400 submits).
_MAX_PENDING = 8192


class State(Enum):
    """Where the proxy stands with the pool."""

    SEARCHING = "searching"
    GREETING = "greeting"
    ADMITTED = "admitted"
    REFUSED = "refused"


class _Pending:
    __slots__ = ("answer", "body", "frames", "kind", "since")

    def __init__(self, frames: list[bytes], kind: held.Kind, since: float, answer: "asyncio.Future[Answer]") -> None:
        self.frames = frames
        self.body = frames[1]
        self.kind = kind
        self.since = since
        self.answer = answer


class Link:
    """Finds the head, is admitted, and carries requests. Lives on one event loop, from start() to close()."""

    def __init__(self, settings: Settings) -> None:
        self.state = State.SEARCHING
        self.why = f"pool {settings.pool!r} has not answered yet"
        self.body_bytes = messages.BODY_BYTES
        self._settings = settings
        self._registry = Registry(settings.registry, frozenset(settings.pool_uids))
        self._keys = Keys.generate()
        self._ctx = zmq.Context()
        self._client: Client | None = None
        self._live: Live | None = None
        self._private = False
        self._pending: dict[int, _Pending] = {}
        self._count = 0
        self._hello_at = float("-inf")
        self._lost_at = 0.0
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to look for the head."""
        self._loop = asyncio.get_running_loop()
        self._lost_at = self._loop.time()
        self._wake = asyncio.Event()
        self._first: asyncio.Future[None] = self._loop.create_future()
        self._tasks = [self._loop.create_task(self._watch()), self._loop.create_task(self._sweep())]

    async def admitted(self) -> None:
        """Wait for the first admission. Raises BadInput when refused, Unavailable when the deadline is over.

        Before the first admission whatever is wrong with registry or MUNGE is raised at once; later it only says why
        the job waits.
        """
        try:
            await asyncio.wait_for(asyncio.shield(self._first), self._settings.deadline)
        except TimeoutError as error:
            raise Unavailable(
                f"pool {self._settings.pool!r} did not admit this job in {self._settings.deadline:g} s: {self.why}",
                "See `plexrl pool status`, then submit again",
            ) from error

    async def failure(self) -> None:
        """Wait for a failure of the link itself and raise it."""
        await asyncio.gather(*self._tasks)

    async def ask(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        """Carry a request to the head and wait for the answer, over changes of the head."""
        if self.state is State.REFUSED:
            return self._refusal()
        kind = held.kind_of(path)
        if len(self._pending) >= _MAX_PENDING:
            return held.given_up(held.Kind.CREATE, f"{_MAX_PENDING} requests of this job are open already", body)
        self._count = number = self._count + 1
        frames = messages.encode(messages.Request(number, method, path, headers), body)
        pending = _Pending(frames, kind, self._loop.time(), self._loop.create_future())
        self._pending[number] = pending
        if self.state is State.ADMITTED and self._client is not None:
            self._client.send(frames)
        try:
            return await pending.answer
        finally:
            self._pending.pop(number, None)

    async def close(self) -> None:
        """Take leave of the head; open requests are answered as given up. A second time does nothing."""
        if self._ctx.closed:
            return
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._give_up("the job has ended", lambda pending: True)
        if self._client is not None:
            if self.state is State.ADMITTED:
                self._client.send(messages.encode(messages.Bye()))
            self._client.close(linger_ms=200)
        self._ctx.term()

    # --- finding the head -------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        while True:
            try:
                await self._look()
            except PlexrlError as error:
                if self.state is not State.ADMITTED:
                    self.why = str(error)
                if not self._first.done():
                    self._first.set_exception(error)
            pause = _LOOK_WELL_S if self.state is State.ADMITTED else _LOOK_S
            try:
                await asyncio.wait_for(self._wake.wait(), pause)
            except TimeoutError:
                continue
            self._wake.clear()

    async def _look(self) -> None:
        live = await asyncio.to_thread(self._read)
        if live is None or live.state == "starting":
            # A head that withdraws its file but still serves us is draining: it will close the connection itself.
            if self.state is not State.ADMITTED:
                self._drop("it is starting" if live else "it is down")
            return
        if live != self._live:
            if self._live is None or not _same_head(live, self._live):
                self._drop(f"nothing answers at {live.address}")
                self._client = Client(self._ctx, live.address, live.server_key, self._keys)
                self._live = live
                self._client.start(self._receive, self._changed)
            self._live = live
        if self._client is None or not self._client.up or self.state is State.ADMITTED:
            return
        if self._loop.time() - self._hello_at >= _HELLO_AGAIN_S:
            await self._hello(live)

    def _read(self) -> Live | None:
        declared = self._registry.declared(self._settings.pool)
        self._private = declared.kind == "private"
        if self._private and declared.owner_uid != os.geteuid():
            raise BadInput(
                f"pool {declared.name!r} is private to uid {declared.owner_uid}", "Use a site pool, or one of your own"
            )
        return self._registry.live(self._settings.pool)

    async def _hello(self, live: Live) -> None:
        settings = self._settings
        self._hello_at = self._loop.time()
        credential = ""
        if not self._private:
            proof = messages.encode_proof(
                messages.Proof(
                    settings.pool, live.instance, live.nonce, settings.job, settings.restart, self._keys.public
                )
            )
            credential = await asyncio.to_thread(
                munge.encode, proof, live.service_uid, socket=settings.munge_socket or None
            )
        if self._client is not None and self._client.up and self._live == live:
            if self.state is not State.REFUSED:
                self.state = State.GREETING
                self.why = f"the head of pool {settings.pool!r} has not admitted this job yet"
            hello = messages.Hello(settings.pool, credential, settings.job, settings.restart, settings.max_staleness)
            self._client.send(messages.encode(hello))

    def _drop(self, why: str) -> None:
        if self._client is not None:
            self._client.close()
        self._client = self._live = None
        self._lost(why)

    def _lost(self, why: str) -> None:
        if self.state is not State.SEARCHING:
            self._lost_at = self._loop.time()
        self.state = State.SEARCHING
        self._hello_at = float("-inf")
        self.why = f"no head of pool {self._settings.pool!r}: {why}"

    # --- talking to it ----------------------------------------------------------------------------------------------

    def _changed(self, up: bool, why: str) -> None:
        if up:
            self._hello_at = float("-inf")
        else:
            self._lost(why)
        self._wake.set()

    def _receive(self, frames: list[bytes]) -> None:
        message, body = messages.decode_from_head(frames)
        match message:
            case messages.Reply(id=number, status=status, headers=headers):
                pending = self._pending.get(number)
                if pending is not None and not pending.answer.done():
                    pending.answer.set_result((status, headers, body))
            case messages.Welcome(body_bytes=body_bytes):
                self.body_bytes = body_bytes
                self._welcome()
            case messages.Refused(why=why, id=number, later=later):
                self._refused(why, number, later)

    def _welcome(self) -> None:
        if self.state is State.ADMITTED:
            return
        self.state = State.ADMITTED
        self.why = ""
        now = self._loop.time()
        for pending in self._pending.values():
            pending.since = now
            if not pending.answer.done():
                self._client.send(pending.frames)
        if not self._first.done():
            self._first.set_result(None)

    def _refused(self, why: str, number: int, later: bool) -> None:
        if self.state is State.ADMITTED:
            # The head no longer knows us, or sends us away: ask again, its answer to that counts.
            self._lost(why)
            self._wake.set()
        elif number == 0 and later:
            if self.state is State.REFUSED:
                self._lost_at = self._loop.time()
            self.state = State.GREETING
            self.why = f"the head of pool {self._settings.pool!r} cannot admit this job now: {why}"
        elif number == 0:
            self.state = State.REFUSED
            self.why = why
            for pending in self._pending.values():
                if not pending.answer.done():
                    pending.answer.set_result(self._refusal())
            if not self._first.done():
                self._first.set_exception(BadInput(f"pool {self._settings.pool!r} refused this job: {why}"))

    def _refusal(self) -> Answer:
        text = f"pool {self._settings.pool!r} refused this job: {self.why}"
        return 403, {"content-type": "application/json"}, held.detail(text)

    # --- holding ----------------------------------------------------------------------------------------------------

    async def _sweep(self) -> None:
        limits = {kind: held.limit(kind, self._settings.holds) for kind in held.Kind}
        pause = min(_SWEEP_S, *limits.values())
        while True:
            await asyncio.sleep(pause)
            now = self._loop.time()
            if self.state is State.ADMITTED:
                silent = self._settings.holds.silent
                self._give_up(
                    f"the head of pool {self._settings.pool!r} does not answer",
                    lambda pending, now=now, silent=silent: now - pending.since >= silent,
                )
            else:
                self._give_up(
                    self.why,
                    lambda pending, now=now: now - max(pending.since, self._lost_at) >= limits[pending.kind],
                )

    def _give_up(self, why: str, over: Callable[[_Pending], bool]) -> None:
        for pending in self._pending.values():
            if not pending.answer.done() and over(pending):
                pending.answer.set_result(held.given_up(pending.kind, why, pending.body))


def _same_head(one: Live, other: Live) -> bool:
    return (one.instance, one.address, one.server_key, one.nonce) == (
        other.instance,
        other.address,
        other.server_key,
        other.nonce,
    )
