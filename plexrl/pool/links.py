"""The head's inner door: agents and engine hosts by name, and orders that wait for their reply."""

import asyncio
import itertools
import logging
import secrets
from collections.abc import Callable

import zmq
from msgspec import structs

from plexrl.pool import messages as m
from plexrl.types import ApiError, Epoch, PlexrlError, Unavailable
from plexrl.wire.channel import Server
from plexrl.wire.keys import Keys

log = logging.getLogger(__name__)


class OrderFailed(PlexrlError):
    """An agent or engine host could not do what it was told. category user: the caller's input is at fault."""

    def __init__(self, what: str, category: str = "server"):
        super().__init__(what)
        self.category = category


class Links:
    """All inner connections of a head. Peers are `agent:<node>` and `gang:<id>`."""

    def __init__(
        self,
        context: zmq.Context,
        address: str,
        server: Keys,
        client_key: str,
        epoch: Epoch,
        hello: Callable[[str, m.Message], None],
        receive: Callable[[str, m.Message], None],
    ):
        self._epoch = epoch
        self._hello = hello
        self._receive = receive
        self._known: set[str] = set()
        self._orders: dict[int, tuple[str, asyncio.Future]] = {}
        # A reply to an order of our predecessor must not pass for a reply to ours.
        self._ids = itertools.count(secrets.randbits(48) << 8)
        self._server = Server(context, address, server, allow=lambda key: key == client_key)
        self.address = self._server.address
        self._server.start(self._take)

    def knows(self, name: str) -> bool:
        """Whether the peer has said hello to this head."""
        return name in self._known

    def forget(self, name: str) -> None:
        """The peer is gone: fail its orders."""
        self._known.discard(name)
        for number, (peer, future) in list(self._orders.items()):
            if peer == name:
                del self._orders[number]
                if not future.done():
                    future.set_exception(Unavailable(f"{name} has gone"))

    def send(self, name: str, message: m.Message) -> None:
        """Fire and forget; a peer that is not connected says hello again later and gets what it misses then."""
        if not self._server.send(name.encode(), [m.encode(message)]):
            log.warning("%s is not connected; %s not sent", name, type(message).__name__)

    async def order(self, name: str, message: m.Message, timeout: float = 300.0) -> dict[str, object]:
        """Send an order (its id is filled in) and wait for its reply's value. Raises OrderFailed, Unavailable."""
        number = next(self._ids)
        future: asyncio.Future = asyncio.get_running_loop().create_future()
        self._orders[number] = (name, future)
        if not self._server.send(name.encode(), [m.encode(structs.replace(message, id=number))]):
            del self._orders[number]
            raise Unavailable(f"{name} is not connected")
        try:
            async with asyncio.timeout(timeout):
                reply: m.Reply = await future
        except TimeoutError:
            raise Unavailable(f"{name} did not answer {type(message).__name__} within {timeout:.0f} s") from None
        finally:
            self._orders.pop(number, None)
        if not reply.ok:
            raise OrderFailed(reply.error, reply.category)
        return reply.value

    def close(self) -> None:
        """Close the door."""
        self._server.close()

    def _take(self, identity: bytes, key: str, frames: list[bytes]) -> None:
        name = identity.decode(errors="replace")
        message = m.decode(frames[0])
        if isinstance(message, m.AgentHello | m.HostHello):
            self._known.add(name)
            self._server.send(identity, [m.encode(m.Welcome(epoch=self._epoch))])
            try:
                self._hello(name, message)
            except ApiError as error:
                log.error("%s: %s", name, error)
        elif name not in self._known:
            self._server.send(identity, [m.encode(m.Who())])
        elif isinstance(message, m.Ping):
            self._server.send(identity, [m.encode(m.Ping())])
        elif isinstance(message, m.Reply):
            waiting = self._orders.get(message.id)
            if waiting is not None and waiting[0] == name and not waiting[1].done():
                waiting[1].set_result(message)
        else:
            self._receive(name, message)
