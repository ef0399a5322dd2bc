"""The inner end of an agent or an engine host: finds the head, stays connected, says hello again to a new one."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import zmq

from plexrl.pool import messages as m
from plexrl.pool.control import Control, read_control
from plexrl.types import Epoch, PlexrlError, Unavailable
from plexrl.wire.channel import Client
from plexrl.wire.keys import Keys

log = logging.getLogger(__name__)
_LOOK_S = 0.5
_PING_S = 1.0
_REPLIES = 1024


class Replies:
    """Orders that were taken, by id, with their replies once there are any: a head repeats an order when the connection
    fell before it had the reply, and it must not be carried out twice.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[int, m.Reply | None] = OrderedDict()

    def take(self, id: int) -> tuple[bool, m.Reply | None]:
        """(Whether the order is new, the reply if there is one already)."""
        if id in self._known:
            return False, self._known[id]
        self._known[id] = None
        while len(self._known) > _REPLIES:
            self._known.popitem(last=False)
        return True, None

    def give(self, reply: m.Reply) -> m.Reply:
        """Keep the reply to an order; returns it."""
        self._known[reply.id] = reply
        return reply


class HeadLink:
    """One connection to whatever head is written in control.json, re-made when that changes.

    control, keys: the files in which a head writes its address and our key pair. hello() gives the message that
    introduces us; it is sent on every (re)connection and whenever the head asks who we are. receive(message) gets
    everything else from a head whose epoch is not lower than any seen before.
    """

    def __init__(
        self,
        control: Path,
        keys: Path,
        identity: str,
        hello: Callable[[], m.Message],
        receive: Callable[[m.Message], None],
    ):
        self._control_path = control
        self._keys_path = keys
        self._identity = identity.encode()
        self._hello = hello
        self._receive = receive
        self._context = zmq.Context()
        self._client: Client | None = None
        self._control: Control | None = None
        self._welcomed = False
        self._epoch = Epoch(0, 0, 0)
        self._unsent: list[m.Message] = []

    async def run(self) -> None:
        """Keep the connection until cancelled."""
        try:
            while True:
                self._look()
                await asyncio.sleep(_LOOK_S if not self._welcomed else _PING_S)
                if self._client is not None and self._client.up:
                    self._client.send([m.encode(m.Ping() if self._welcomed else self._hello())])
        finally:
            self.close()

    def send(self, message: m.Message, keep: bool = True) -> None:
        """Send, or keep until a head has welcomed us. What a head loses with its life the hello tells its successor."""
        if self._welcomed and self._client is not None and self._client.send([m.encode(message)]):
            return
        if keep:
            self._unsent.append(message)

    def close(self) -> None:
        """Disconnect."""
        if self._client is not None:
            self._client.close(linger_ms=500)
            self._client = None
        self._context.destroy(linger=500)

    def _look(self) -> None:
        try:
            control = read_control(self._control_path)
        except Unavailable:
            return
        if self._control is not None and (control.address, control.server_key) == (
            self._control.address,
            self._control.server_key,
        ):
            return
        if self._client is not None:
            self._client.close()
        self._client = None
        self._welcomed = False
        try:
            # Read again: a head of another start of the pool has made new ones before it wrote where it is.
            keys = Keys.load(self._keys_path)
        except PlexrlError as error:
            log.info("no keys for the head yet: %s", error)
            return
        self._control = control
        self._client = Client(self._context, control.address, control.server_key, keys, self._identity)
        self._client.start(self._take, self._changed)

    def _changed(self, up: bool, why: str) -> None:
        self._welcomed = False
        if up and self._client is not None:
            self._client.send([m.encode(self._hello())])
        elif not up:
            log.info("connection to the head: %s", why)

    def _take(self, frames: list[bytes]) -> None:
        message = m.decode(frames[0])
        if isinstance(message, m.Welcome):
            if message.epoch < self._epoch:
                log.error("a head of the older epoch %s is ignored", message.epoch)
                return
            self._epoch = message.epoch
            if not self._welcomed:
                self._welcomed = True
                unsent, self._unsent = self._unsent, []
                for waiting in unsent:
                    self.send(waiting)
        elif isinstance(message, m.Who):
            self._welcomed = False
            if self._client is not None:
                self._client.send([m.encode(self._hello())])
        elif not isinstance(message, m.Ping) and self._welcomed:
            self._receive(message)
