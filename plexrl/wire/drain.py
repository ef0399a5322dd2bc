"""Reads a ZeroMQ socket on an asyncio loop through its edge-triggered file descriptor."""

import asyncio
from collections.abc import Callable

import zmq

# A flood on one socket must not starve the rest of the loop.
_BURST = 256


class Drain:
    """Calls step() until it returns False, whenever the socket may have something. Needs a running event loop.

    An exception of step() goes to the loop's exception handler and stops nothing.
    """

    def __init__(self, socket: zmq.Socket, step: Callable[[], bool]) -> None:
        self._loop = asyncio.get_running_loop()
        self._step = step
        self._fd = socket.fd
        self._queued = False
        self._running = False
        self._closed = False
        self._loop.add_reader(self._fd, self._run)
        self.poke()

    def poke(self) -> None:
        """To be called after each send on the socket."""
        if not self._queued and not self._running:
            self._queued = True
            self._loop.call_soon(self._run)

    def close(self) -> None:
        """Stop, before the socket is closed."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._fd)

    def _run(self) -> None:
        self._queued = False
        more = True
        self._running = True
        try:
            for _ in range(_BURST):
                if self._closed:
                    return
                more = self._step()
                if not more:
                    return
        finally:
            self._running = False
            if more and not self._closed:
                self.poke()
