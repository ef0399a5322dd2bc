"""The head's outer door: proxies of logical jobs, each bound to the CURVE key that was admitted."""

import logging
from collections import Counter
from collections.abc import Callable
from typing import Protocol

import msgspec
import zmq

from plexrl.pool.admission import Admission
from plexrl.pool.api import Api
from plexrl.pool.core import Core
from plexrl.types import (
    ApiError,
    BadInput,
    Command,
    HttpRequest,
    HttpResponse,
    Peer,
    PlexrlError,
    Unavailable,
    commands,
    records,
)
from plexrl.wire import messages
from plexrl.wire.channel import Server
from plexrl.wire.keys import Keys

log = logging.getLogger("plexrl.head")
# What is in the head's hands at once: hellos of all (each asks munged and slurmctld), requests of one connection.
_MAX_HELLOS = 256
_MAX_REQUESTS = 16_384
# Beside a body: the header of a request.
_HEADER_BYTES = 1 << 20


class Gateway(Protocol):
    """What translates HTTP into commands and back; handed to the head by the command line."""

    def parse(self, request: HttpRequest) -> Command | HttpResponse:
        """Raises ApiError."""
        ...

    def render(self, command: Command, answer: msgspec.Struct) -> HttpResponse:
        """The response to an answered command."""
        ...

    def render_error(self, error: ApiError) -> HttpResponse:
        """The response to a refusal."""
        ...


class Governor(Protocol):
    """Keeps the pool's policies; both raise ApiError."""

    def hello(self, peer: Peer) -> None:
        """A job wants to attach."""
        ...

    def command(self, peer: Peer, command: Command) -> None:
        """A job asks for something."""
        ...


class Door:
    """Admits proxies and answers their requests."""

    def __init__(self, core: Core, api: Api, gateway: Gateway, admission: Admission, pool: str):
        self._core = core
        self._api = api
        self._gateway = gateway
        self._admission = admission
        self._pool = pool
        self._peers: dict[str, Peer] = {}
        self._greeting: set[str] = set()
        self._requests: Counter[str] = Counter()
        self._server: Server
        self.on_attached: Callable[[records.JobAttached], None] = lambda attached: None
        self.governor: Governor | None = None
        self.on_bye: Callable[[Peer], None] = lambda peer: None

    def open(self, context: zmq.Context, address: str, keys: Keys) -> str:
        """Bind; the address that proxies use."""
        # Anybody may connect before the hello: nobody gets to fill our memory with what no proxy would send.
        longest = max(self._core.config.limits.body_bytes, messages.BODY_BYTES) + _HEADER_BYTES
        self._server = Server(context, address, keys, max_bytes=longest)
        return self._server.address

    def start(self) -> None:
        """Begin to answer."""
        self._server.start(self._take)

    def close(self) -> None:
        """Stop answering."""
        self._server.close()

    def peers(self) -> list[Peer]:
        """Everybody admitted by this head, one per job."""
        return list({peer.job: peer for peer in self._peers.values()}.values())

    def dismiss(self, job: str) -> None:
        """The job is over: its connections are nobody's."""
        self._peers = {key: peer for key, peer in self._peers.items() if peer.job != job}

    def _take(self, identity: bytes, key: str, frames: list[bytes]) -> None:
        try:
            message, body = messages.decode_from_proxy(frames)
        except BadInput as error:
            self._server.send(identity, messages.encode(messages.Refused(str(error))))
            return
        peer = self._peers.get(key)
        match message:
            case messages.Hello():
                # A proxy that is not answered says hello again; one hello of a key is enough.
                if key not in self._greeting and len(self._greeting) < _MAX_HELLOS:
                    self._greeting.add(key)
                    self._core.spawn(self._greet(identity, key, message))
            case messages.Request() if peer is None:
                self._server.send(identity, messages.encode(messages.Refused("say hello first", message.id)))
            case messages.Request() if self._requests[key] >= _MAX_REQUESTS:
                error = ApiError(429, f"{_MAX_REQUESTS} requests of this job are open", "Wait for some to be answered")
                self._reply(identity, message, self._gateway.render_error(error))
            case messages.Request():
                self._requests[key] += 1
                self._core.spawn(self._answer(identity, key, peer, message, body))
            case messages.Bye():
                if self._peers.pop(key, None) is not None and peer is not None:
                    self.on_bye(peer)

    async def _greet(self, identity: bytes, key: str, hello: messages.Hello) -> None:
        core = self._core
        try:
            if hello.pool != self._pool:
                raise BadInput(f"this is pool {self._pool!r}, not {hello.pool!r}")
            peer = await self._admission.admit(hello, key)
            known = core.book.jobs.get(peer.job)
            if known is not None and known.ended:
                raise BadInput(f"job {peer.job} is over: {known.ended}", "Submit it again")
            if known is None and self.governor is not None:
                self.governor.hello(peer)
        except PlexrlError as error:
            log.warning("a hello for job %d was refused: %s", hello.job, error)
            # Slurm or MUNGE that does not answer says nothing about the job: its proxy asks again.
            refused = messages.Refused(str(error), later=isinstance(error, Unavailable))
            self._server.send(identity, messages.encode(refused))
            return
        finally:
            self._greeting.discard(key)
        if known is None:
            attached = records.JobAttached(
                now_us=core.now_us(),
                job=peer.job,
                slurm_job=hello.job,
                uid=peer.uid,
                user=peer.user,
                account=peer.account,
                max_staleness=hello.max_staleness,
                qos=peer.qos,
                partition=peer.partition,
                declared_gpus=peer.declared_gpus,
            )
            await core.commit(attached)
            self.on_attached(attached)
        self._peers[key] = peer
        welcome = messages.Welcome(peer.user, peer.account, core.config.limits.body_bytes)
        self._server.send(identity, messages.encode(welcome))

    async def _answer(self, identity: bytes, key: str, peer: Peer, request: messages.Request, body: bytes) -> None:
        try:
            response = await self._respond(
                peer, HttpRequest(method=request.method, path=request.path, headers=request.headers, body=body)
            )
        finally:
            self._requests[key] -= 1
            if not self._requests[key]:
                del self._requests[key]
        self._reply(identity, request, response)

    def _reply(self, identity: bytes, request: messages.Request, response: HttpResponse) -> None:
        reply = messages.Reply(request.id, response.status, response.headers)
        self._server.send(identity, messages.encode(reply, response.body))

    async def _respond(self, peer: Peer, request: HttpRequest) -> HttpResponse:
        command = None
        try:
            command = self._gateway.parse(request)
            if isinstance(command, HttpResponse):
                return command
            if self.governor is not None:
                self.governor.command(peer, command)
            return self._gateway.render(command, await self._api.answer(peer, command))
        except ApiError as error:
            consumed = error.consumed
            if isinstance(command, commands.Train) and error.status in (400, 403):
                consumed = (command.model, command.seq)
            if consumed is not None:
                self._api.consume(peer, *consumed)
            return self._gateway.render_error(error)
        except Exception:
            log.exception("%s %s of job %s failed", request.method, request.path, peer.job)
            return self._gateway.render_error(ApiError(500, "The pool failed on this request; its log says why"))
