"""A logical job that speaks to the head itself: honest, or as hostile as its test likes."""

import asyncio
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future

import zmq

from plexrl.wire import messages
from plexrl.wire.channel import Client
from plexrl.wire.keys import Keys
from tests.e2e.localpool import LocalPool
from tests.e2e.rawclient import Answer, RawClient

PATIENCE_S = 60


class Wire:
    """A CURVE connection to the pool's head on a loop in a thread. `send` anything; messages come to `heard`."""

    def __init__(
        self,
        pool: LocalPool,
        receive: Callable[[list[bytes]], None] | None = None,
        connected: Callable[[Client], None] = lambda client: None,
    ):
        live = pool.live()
        assert live is not None
        self.heard: list[list[bytes]] = []
        self._receive = receive or self.heard.append
        self._connected = connected
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._context = zmq.Context()
        self._up = threading.Event()
        self.falls = 0
        self._do(lambda: self._connect(live["address"], live["server_key"]))
        assert self._up.wait(PATIENCE_S)

    def send(self, frames: list[bytes]) -> None:
        """Send frames as they are."""
        self._do(lambda: self._client.send(frames))

    def again(self, frames: list[bytes]) -> None:
        """Send from within the loop."""
        self._client.send(frames)

    def flood(self, frames: list[bytes], count: int) -> None:
        """Send the same frames many times."""

        def sending() -> None:
            for _ in range(count):
                self._client.send(frames)

        self._do(sending)

    def close(self) -> None:
        """Disconnect."""
        self._do(self._client.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._context.destroy(linger=0)

    def _connect(self, address: str, key: str) -> None:
        self._client = Client(self._context, address, key, Keys.generate())
        self._client.start(self._receive, self._changed)

    def _changed(self, up: bool, why: str) -> None:
        if up:
            self._up.set()
            self._connected(self._client)
        else:
            self.falls += 1

    def _do(self, action: Callable[[], object]) -> None:
        done: Future[None] = Future()

        def run() -> None:
            try:
                action()
                done.set_result(None)
            except BaseException as error:
                done.set_exception(error)

        self._loop.call_soon_threadsafe(run)
        done.result(PATIENCE_S)


class WireJob(RawClient):
    """An admitted job. Its session is kept alive until `close` or `fall_silent`."""

    def __init__(self, pool: LocalPool, job: int):
        self._numbers = itertools.count(1)
        self._waiting: dict[int, tuple[list[bytes], Future[Answer]]] = {}
        self.welcome: Future[messages.Welcome] = Future()
        # As a proxy does: on every connection a hello, and what was not answered once more.
        hello = messages.encode(messages.Hello("test", "", job, 0))
        self.wire = Wire(pool, self._take, lambda client: client.send(hello))
        self.welcome.result(PATIENCE_S)
        self.open()
        self._over = threading.Event()
        self._beating = threading.Thread(target=self._beat, daemon=True)
        self._beating.start()

    def ask(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        """Send one request and wait for its reply."""
        number = next(self._numbers)
        frames, waiting = messages.encode(messages.Request(number, method, path, headers), body), Future()
        self._waiting[number] = frames, waiting
        self.wire.send(frames)
        return waiting.result(PATIENCE_S)

    def fall_silent(self) -> None:
        """Send no heartbeat any more."""
        self._over.set()
        self._beating.join()

    def close(self) -> None:
        """Take leave."""
        self.fall_silent()
        self.wire.send(messages.encode(messages.Bye()))
        self.wire.close()

    def _take(self, frames: list[bytes]) -> None:
        message, body = messages.decode_from_head(frames)
        match message:
            case messages.Reply():
                _, waiting = self._waiting.pop(message.id, (None, None))
                if waiting is not None:
                    waiting.set_result(Answer(message.status, body))
            case messages.Welcome():
                if not self.welcome.done():
                    self.welcome.set_result(message)
                for request, _ in list(self._waiting.values()):
                    self.wire.again(request)
            case messages.Refused() if not self.welcome.done():
                self.welcome.set_exception(AssertionError(message.why))

    def _beat(self) -> None:
        while not self._over.wait(2.0):
            self.post("session_heartbeat", session_id=self.session, type="session_heartbeat")
