"""The head's inner door: agents and engine hosts by name, and orders that wait for their reply."""

import asyncio
import itertools
import logging
import secrets
from collections.abc import Callable

import zmq
from msgspec import structs

from plexrl.pool import messages as m
from plexrl.types import Epoch, PlexrlError, Unavailable
from plexrl.wire.channel import Server
from plexrl.wire.keys import Keys

log = logging.getLogger(__name__)


class OrderFailed(PlexrlError):
    """An agent or engine host could not do what it was told. category user: the caller's input is at fault."""

    def __init__(self, what: str, category: str = "server"):
        super().__init__(what)
        self.category = category


class Links:
    """All inner connections of a head. Peers are `agent:<node>` and `gang:<id>`.

    A connection may fall and come back at any time; the peer then says hello again. Orders without a reply are sent
    again then (peers know an order that they had); what else was lost, hello() must repair.
    """

    def __init__(
        self,
        context: zmq.Context,
        address: str,
        server: Keys,
        client_key: str,
        epoch: Epoch,
        hello: Callable[[str, m.Message], bool],
        receive: Callable[[str, m.Message], None],
    ):
        """hello says whether the peer is one of ours; it has been welcomed when it is called."""
        self._epoch = epoch
        self._hello = hello
        self._receive = receive
        self._known: set[str] = set()
        self._orders: dict[int, tuple[str, bytes, asyncio.Future]] = {}
        # A reply to an order of our predecessor must not pass for a reply to ours.
        self._ids = itertools.count(secrets.randbits(48) << 8)
        self._server = Server(context, address, server, allow=lambda key: key == client_key)
        self.address = self._server.address
        self._server.start(self._take)

    def forget(self, name: str) -> None:
        """The peer is gone: fail its orders."""
        self._known.discard(name)
        for peer, _, future in list(self._orders.values()):
            if peer == name and not future.done():
                future.set_exception(Unavailable(f"{name} has gone"))

    def send(self, name: str, message: m.Message) -> None:
        """Fire and forget; a peer whose connection fell says hello again and gets what it misses then."""
        if not self._server.send(name.encode(), [m.encode(message)]):
            log.warning("%s is not connected; %s not sent", name, type(message).__name__)

    async def order(self, name: str, message: m.Message, timeout: float = 300.0) -> dict[str, object]:
        """Send an order (its id is filled in) and wait for its reply's value. Raises OrderFailed, Unavailable."""
        if name not in self._known:
            raise Unavailable(f"{name} is not connected")
        number = next(self._ids)
        packed = m.encode(structs.replace(message, id=number))
        future: asyncio.Future = asyncio.get_running_loop().create_future()
        self._orders[number] = (name, packed, future)
        self._server.send(name.encode(), [packed])
        try:
            async with asyncio.timeout(timeout):
                reply: m.Reply = await future
        except TimeoutError:
            raise Unavailable(f"{name} did not answer {type(message).__name__} within {timeout:.0f} s") from None
        finally:
            del self._orders[number]
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
            self._greet(name, identity, message)
        elif name not in self._known:
            self._server.send(identity, [m.encode(m.Who())])
        elif isinstance(message, m.Ping):
            self._server.send(identity, [m.encode(m.Ping())])
        elif isinstance(message, m.Reply):
            waiting = self._orders.get(message.id)
            if waiting is not None and waiting[0] == name and not waiting[2].done():
                waiting[2].set_result(message)
        else:
            self._receive(name, message)

    def _greet(self, name: str, identity: bytes, message: m.Message) -> None:
        self._server.send(identity, [m.encode(m.Welcome(epoch=self._epoch))])
        if not self._hello(name, message):
            self._server.send(identity, [m.encode(m.Exit())])
            return
        self._known.add(name)
        for peer, packed, future in list(self._orders.values()):
            if peer == name and not future.done():
                self._server.send(identity, [packed])
