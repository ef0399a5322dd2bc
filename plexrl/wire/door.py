"""The door of a ZeroMQ context: decides which CURVE keys may finish a handshake (ZAP, RFC 27).

The context asks over an in-process socket, one for all its servers; each server has a domain of its own. The key that
came in is given back as the connection's User-Id, which then stands beside every message.
"""

import logging
from collections.abc import Callable
from typing import ClassVar

import zmq
from zmq.utils import z85

from plexrl.wire.drain import Drain

log = logging.getLogger(__name__)

_ADDRESS = "inproc://zeromq.zap.01"


class Door:
    """One per context, made by the first server and gone with the last."""

    _doors: ClassVar[dict[zmq.Context, "Door"]] = {}

    def __init__(self, ctx: zmq.Context) -> None:
        self._ctx = ctx
        self._allow: dict[bytes, Callable[[str], bool] | None] = {}
        self._count = 0
        self._socket = ctx.socket(zmq.REP)
        self._socket.linger = 0
        self._socket.bind(_ADDRESS)
        self._drain = Drain(self._socket, self._answer)

    @classmethod
    def of(cls, ctx: zmq.Context) -> "Door":
        """The door of this context."""
        door = cls._doors.get(ctx)
        if door is None:
            door = cls._doors[ctx] = cls(ctx)
        return door

    def open(self, allow: Callable[[str], bool] | None) -> bytes:
        """Serve one more server; the name of its domain."""
        self._count += 1
        domain = b"plexrl%d" % self._count
        self._allow[domain] = allow
        return domain

    def shut(self, domain: bytes) -> None:
        """Stop serving a server; closing twice is no harm."""
        if self._allow.pop(domain, self) is not self and not self._allow:
            self._drain.close()
            # At once; closing alone frees the name some time later, too late for the next server's door.
            self._socket.unbind(_ADDRESS)
            self._socket.close(0)
            del self._doors[self._ctx]

    def _answer(self) -> bool:
        try:
            version, request, domain, _address, _identity, mechanism, *credentials = self._socket.recv_multipart(
                zmq.NOBLOCK
            )
        except zmq.Again:
            return False
        key = z85.encode(credentials[0]).decode() if mechanism == b"CURVE" else ""
        allowed = False
        try:
            allow = self._allow[domain]
            allowed = bool(key) and (allow is None or allow(key))
        finally:
            # The context waits for an answer; also when allow() failed it must get one.
            status = [b"200", b"OK", key.encode()] if allowed else [b"400", b"key not accepted", b""]
            self._socket.send_multipart([version, request, *status, b""])
        if not allowed:
            log.warning("a peer with key %s was not let in", key)
        return True
