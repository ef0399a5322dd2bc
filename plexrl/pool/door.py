"""The head's outer door: proxies of logical jobs, each bound to the CURVE key that was admitted."""

import logging
from collections.abc import Callable
from typing import Protocol

import msgspec
import zmq

from plexrl.pool.admission import Admission
from plexrl.pool.api import Api
from plexrl.pool.core import Core
from plexrl.types import ApiError, BadInput, Command, HttpRequest, HttpResponse, Peer, PlexrlError, commands, records
from plexrl.wire import messages
from plexrl.wire.channel import Server
from plexrl.wire.keys import Keys

log = logging.getLogger("plexrl.head")


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


class Door:
    """Admits proxies and answers their requests."""

    def __init__(self, core: Core, api: Api, gateway: Gateway, admission: Admission, pool: str):
        self._core = core
        self._api = api
        self._gateway = gateway
        self._admission = admission
        self._pool = pool
        self._peers: dict[str, Peer] = {}
        self._server: Server
        self.on_bye: Callable[[Peer], None] = lambda peer: None

    def open(self, context: zmq.Context, address: str, keys: Keys) -> str:
        """Bind; the address that proxies use."""
        self._server = Server(context, address, keys)
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
                self._core.spawn(self._greet(identity, key, message))
            case messages.Request() if peer is None:
                self._server.send(identity, messages.encode(messages.Refused("say hello first", message.id)))
            case messages.Request():
                self._core.spawn(self._answer(identity, peer, message, body))
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
        except PlexrlError as error:
            log.warning("a hello for job %d was refused: %s", hello.job, error)
            self._server.send(identity, messages.encode(messages.Refused(str(error))))
            return
        if known is None:
            await core.commit(
                records.JobAttached(
                    now_us=core.now_us(),
                    job=peer.job,
                    slurm_job=hello.job,
                    uid=peer.uid,
                    user=peer.user,
                    account=peer.account,
                )
            )
        self._peers[key] = peer
        welcome = messages.Welcome(peer.user, peer.account, core.config.limits.body_bytes)
        self._server.send(identity, messages.encode(welcome))

    async def _answer(self, identity: bytes, peer: Peer, request: messages.Request, body: bytes) -> None:
        response = await self._respond(
            peer, HttpRequest(method=request.method, path=request.path, headers=request.headers, body=body)
        )
        reply = messages.Reply(request.id, response.status, response.headers)
        self._server.send(identity, messages.encode(reply, response.body))

    async def _respond(self, peer: Peer, request: HttpRequest) -> HttpResponse:
        command = None
        try:
            command = self._gateway.parse(request)
            if isinstance(command, HttpResponse):
                return command
            return self._gateway.render(command, await self._api.answer(peer, command))
        except ApiError as error:
            consumed = error.consumed
            if isinstance(command, commands.Train) and error.status == 400:
                consumed = (command.model, command.seq)
            if consumed is not None:
                self._api.consume(peer, *consumed)
            return self._gateway.render_error(error)
        except Exception:
            log.exception("%s %s of job %s failed", request.method, request.path, peer.job)
            return self._gateway.render_error(ApiError(500, "The pool failed on this request; its log says why"))
