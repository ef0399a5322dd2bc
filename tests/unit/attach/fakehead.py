"""A head that admits and answers as a test wants, over the real channel."""

import asyncio
import contextlib
import json
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import httpx
import zmq

from plexrl.attach.proxy import serve
from plexrl.attach.settings import Holds, Settings
from plexrl.wire import messages
from plexrl.wire.channel import Server
from plexrl.wire.keys import Keys
from plexrl.wire.registry import Declared, Live, Registry

SECRET = "tml-a-secret-of-this-test"
QUICK = Holds(poll=0.4, submit=0.3, create=0.5, brief=0.2, silent=1.0)

Respond = Callable[[messages.Request, bytes], tuple[int, dict[str, str], bytes] | None]


def echo(request: messages.Request, body: bytes) -> tuple[int, dict[str, str], bytes]:
    """Tell what arrived."""
    told = {"method": request.method, "path": request.path, "headers": request.headers, "body": body.decode("latin-1")}
    return 200, {"content-type": "application/json"}, json.dumps(told).encode()


class FakeHead:
    """Serves one pool. respond returns None to leave a request open. refuse, later: how every hello is refused."""

    def __init__(
        self,
        pool: "Pool",
        instance: str,
        respond: Respond = echo,
        refuse: str = "",
        body_bytes: int = 1 << 26,
        later: bool = False,
    ) -> None:
        self.pool = pool
        self.instance = instance
        self.respond = respond
        self.refuse = refuse
        self.later = later
        self.body_bytes = body_bytes
        self.hellos: list[messages.Hello] = []
        self.requests: list[tuple[messages.Request, bytes]] = []
        self.byes = 0
        self.welcomed: set[str] = set()
        keys = Keys.generate()
        self.server = Server(pool.ctx, f"ipc://{pool.folder}/{instance}.sock", keys)
        self.server.start(self._take)
        pool.registry.publish(pool.live(instance, self.server.address, keys.public))

    def _take(self, identity: bytes, key: str, frames: list[bytes]) -> None:
        message, body = messages.decode_from_proxy(frames)
        match message:
            case messages.Hello():
                self.hellos.append(message)
                if self.refuse:
                    self._say(identity, messages.Refused(self.refuse, later=self.later))
                else:
                    self.welcomed.add(key)
                    self._say(identity, messages.Welcome("alice", "ml", self.body_bytes))
            case messages.Request() if key not in self.welcomed:
                self._say(identity, messages.Refused("say hello first", message.id))
            case messages.Request():
                self.requests.append((message, body))
                answer = self.respond(message, body)
                if answer is not None:
                    status, headers, content = answer
                    self._say(identity, messages.Reply(message.id, status, headers), content)
            case messages.Bye():
                self.byes += 1

    def _say(self, identity: bytes, message: messages.FromHead, body: bytes = b"") -> None:
        self.server.send(identity, messages.encode(message, body))

    def die(self) -> None:
        """Be gone without a word, as after kill -9: the live file stays."""
        self.server.close()


class Pool:
    """A private pool's registry in a folder of its own."""

    name = "lab"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ctx = zmq.Context()
        self.registry = Registry(folder, frozenset({os.geteuid()}))
        self.registry.declare(
            Declared(name=self.name, kind="private", owner_uid=os.geteuid(), config="/c.yaml", state_dir="/s")
        )

    def live(self, instance: str, at: str, key: str, **changes: object) -> Live:
        """What a head of this pool publishes."""
        fields = {
            "name": self.name,
            "instance": instance,
            "state": "ready",
            "address": at,
            "server_key": key,
            "nonce": f"nonce of {instance}",
            "service_uid": os.geteuid(),
            "slurm_job": 0,
            "epoch": "1-0-0",
        }
        return Live(**{**fields, **changes})

    def settings(self, lifeline: int, **changes: object) -> Settings:
        """Settings of a proxy of this pool."""
        fields = {
            "pool": self.name,
            "registry": str(self.folder),
            "pool_uids": (os.geteuid(),),
            "job": 7,
            "restart": 0,
            "secret": SECRET,
            "lifeline": lifeline,
            "deadline": 5.0,
            "holds": QUICK,
        }
        return Settings(**{**fields, **changes})


@contextlib.contextmanager
def new_pool() -> Iterator[Pool]:
    """A pool whose folder is short enough for a socket's path."""
    with tempfile.TemporaryDirectory(prefix="px") as folder:
        pool = Pool(Path(folder))
        yield pool
        pool.ctx.destroy(linger=0)


class Running:
    """A proxy inside this loop, and a client of it."""

    def __init__(self, port: int, lifeline: BinaryIO, task: "asyncio.Task[None]", client: httpx.AsyncClient) -> None:
        self.port = port
        self.lifeline = lifeline
        self.task = task
        self.client = client

    async def post(self, path: str, **body: object) -> httpx.Response:
        """A JSON request below /api/v1/."""
        return await self.client.post(f"/api/v1/{path}", json=body)


@contextlib.asynccontextmanager
async def proxy(at: Pool, **changes: object) -> AsyncIterator[Running]:
    """A proxy that is admitted; ended by its lifeline. Raises what the proxy raises when it is not admitted."""
    reading, writing = os.pipe()
    lifeline = os.fdopen(writing, "wb", buffering=0)
    port = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(serve(at.settings(reading, **changes), port.set_result))
    await asyncio.wait({port, task}, return_when=asyncio.FIRST_COMPLETED)
    try:
        if not port.done():
            await task
        base = f"http://127.0.0.1:{port.result()}"
        async with httpx.AsyncClient(base_url=base, headers={"x-api-key": SECRET}, timeout=20) as client:
            yield Running(port.result(), lifeline, task, client)
    finally:
        lifeline.close()
        await asyncio.wait({task}, timeout=10)
        assert task.done(), "the proxy outlived its lifeline"
        os.close(reading)


async def until(condition: Callable[[], object]) -> None:
    """Wait for a condition; the test's own timeout ends it otherwise."""
    while not condition():
        await asyncio.sleep(0.01)
