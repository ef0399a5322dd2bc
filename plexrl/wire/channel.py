"""The encrypted channel between the processes of a pool: a ROUTER that accepts many DEALERs, both under CURVE.

Both sides live on an asyncio loop through the socket's own file descriptor, which costs less than zmq.asyncio. That
descriptor is edge-triggered: it must be drained until EAGAIN, and looked at again after each send, because a send may
swallow the edge of a message that came in meanwhile (`plexrl.wire.drain`).

Who speaks is known by the CURVE key, which the door below puts beside each message. A routing id is no identity: any
client may choose any id. It is an address to answer to, so where clients do not trust each other it must be one that
others cannot guess; a Client without an identity draws 16 random bytes.
"""

import os
import socket as sockets
from collections.abc import Callable, Sequence

import zmq
from zmq.utils.monitor import parse_monitor_message

from plexrl.types import BadInput, Unavailable
from plexrl.wire.door import Door
from plexrl.wire.drain import Drain
from plexrl.wire.keys import Keys

MAX_BYTES = 1 << 30
_HEARTBEAT_MS = 1000
_SILENCE_MS = 4000
_HANDSHAKE_MS = 10_000
# A peer that does not read holds at most so many answers here; then they are dropped for it alone.
_QUEUE = 10_000


class Server:
    """A ROUTER bound to an address, inside a running event loop.

    address: `tcp://host:port` (port 0 or `*`: a free one, see `.address`) or `ipc://path` in a 0700 directory of ours.
    allow: which client keys (z85) may finish the handshake; None lets every key in, the receiver then decides by key.
    max_bytes: the largest single part; a client that sends more is cut off.
    Raises Unavailable when the address is in use, BadInput when it makes no sense.
    """

    def __init__(
        self,
        ctx: zmq.Context,
        address: str,
        keys: Keys,
        allow: Callable[[str], bool] | None = None,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        _check_ipc(address)
        self._door = Door.of(ctx)
        self._domain = self._door.open(allow)
        self._socket = ctx.socket(zmq.ROUTER)
        try:
            _set_common(self._socket, max_bytes)
            self._socket.curve_server = True
            self._socket.curve_publickey = keys.public.encode()
            self._socket.curve_secretkey = keys.secret.encode()
            self._socket.zap_domain = self._domain
            # Without this the library lets everybody in when the door is missing.
            self._socket.zap_enforce_domain = True
            self._socket.router_mandatory = True
            # A client that comes back under its own id takes it over from its dead connection.
            self._socket.router_handover = True
            self._socket.sndhwm = _QUEUE
            self._socket.backlog = 1024
            self._socket.bind(address.removesuffix(":0") + ":*" if address.endswith(":0") else address)
        except zmq.ZMQError as error:
            self._socket.close(0)
            self._door.shut(self._domain)
            if error.errno == zmq.EADDRINUSE:
                raise Unavailable(f"{address} is in use", "Choose another port, or 0 for a free one") from error
            raise BadInput(f"cannot listen on {address!r}: {error}", "Use tcp://host:port or ipc:///path") from error
        self.address = self._socket.last_endpoint.decode().rstrip("\0")
        self.key = keys.public
        self._drain: Drain | None = None

    def start(self, receive: Callable[[bytes, str, list[bytes]], None]) -> None:
        """Have receive(identity, client key, frames) called on the loop for each message, in order per client."""

        def step() -> bool:
            message = self.recv()
            if message is None:
                return False
            receive(*message)
            return True

        self._drain = Drain(self._socket, step)

    def recv(self) -> tuple[bytes, str, list[bytes]] | None:
        """The next (identity, client key z85, frames), None when there is none now. Never waits."""
        try:
            identity = self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None
        # Only a Frame (not a copy) carries the metadata that the door attached to the connection, and of a message only
        # the client's own parts have it for certain: the identity in front may have been fetched before.
        first = self._socket.recv(zmq.NOBLOCK, copy=False)
        frames, more = [first.bytes], first.more
        while more:
            frames.append(self._socket.recv(zmq.NOBLOCK))
            more = self._socket.get(zmq.RCVMORE)
        return identity, first.get("User-Id"), frames

    def send(self, identity: bytes, frames: Sequence[bytes]) -> bool:
        """Send to a client. False when it is gone, or has stopped reading: the message is dropped."""
        try:
            self._socket.send_multipart([identity, *frames], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            return False
        finally:
            if self._drain is not None:
                self._drain.poke()
        return True

    def close(self) -> None:
        """Free the address and all connections; what was not yet sent is lost."""
        if self._drain is not None:
            self._drain.close()
        self._socket.close(0)
        self._door.shut(self._domain)


class Client:
    """A DEALER that connects, and connects again by itself, to one server under its key.

    A head that is another one has another key or address: make a new Client. identity: see the module; None in a proxy.
    """

    def __init__(
        self,
        ctx: zmq.Context,
        address: str,
        server_key: str,
        keys: Keys,
        identity: bytes | None = None,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self.up = False
        self._address = address
        self._socket = ctx.socket(zmq.DEALER)
        try:
            _set_common(self._socket, max_bytes)
            self._socket.curve_serverkey = server_key.encode()
            self._socket.curve_publickey = keys.public.encode()
            self._socket.curve_secretkey = keys.secret.encode()
            self._socket.routing_id = identity if identity is not None else b"\1" + os.urandom(16)
            # Only queue to a connection that is there; what waits without one is the caller's to keep.
            self._socket.immediate = True
            # Only this side pings. The server answers, and by the ttl drops a client that fell silent.
            self._socket.heartbeat_ivl = _HEARTBEAT_MS
            self._socket.heartbeat_timeout = _SILENCE_MS
            self._socket.heartbeat_ttl = _SILENCE_MS
            self._socket.sndhwm = 0
            self._socket.reconnect_ivl = 100
            self._socket.reconnect_ivl_max = 1000
        except zmq.ZMQError as error:
            self._socket.close(0)
            raise BadInput(f"{server_key!r} is no server key", "The pool's live file is damaged") from error
        self._drain: Drain | None = None
        self._watch: Drain | None = None
        self._monitor: zmq.Socket | None = None

    def start(
        self, receive: Callable[[list[bytes]], None], changed: Callable[[bool, str], None] = lambda up, why: None
    ) -> None:
        """Connect. receive(frames) is called for each message.

        changed(up, why) is called when the connection stands (handshake done) and when it fell or was refused; after a
        fall everything that was sent and not answered must count as lost.
        """
        monitor = self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            | zmq.EVENT_DISCONNECTED
        )

        def take() -> bool:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return False
            receive(frames)
            return True

        def look() -> bool:
            try:
                event = parse_monitor_message(monitor.recv_multipart(zmq.NOBLOCK))["event"]
            except zmq.Again:
                return False
            self.up = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            changed(self.up, _EVENTS[event])
            return True

        self._watch = Drain(monitor, look)
        self._drain = Drain(self._socket, take)
        try:
            self._socket.connect(self._address)
        except zmq.ZMQError as error:
            raise BadInput(f"cannot connect to {self._address!r}: {error}", "The address is no use") from error

    def send(self, frames: Sequence[bytes]) -> bool:
        """Send to the server. False when there is no connection: the message is not sent and not kept."""
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        finally:
            if self._drain is not None:
                self._drain.poke()
        return True

    def close(self, linger_ms: int = 0) -> None:
        """Disconnect. linger_ms: how long the library may go on, in its own thread, sending what is queued."""
        self.up = False
        if self._watch is not None and self._monitor is not None:
            self._watch.close()
            self._socket.disable_monitor()
            # Whoever ends the context waits for every socket of it; the collector may take its time.
            self._monitor.close(0)
        if self._drain is not None:
            self._drain.close()
        self._socket.close(linger_ms)


_EVENTS: dict[int, str] = {
    zmq.EVENT_HANDSHAKE_SUCCEEDED: "connected",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "the server does not accept this key",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "the handshake failed",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "the handshake failed",
    zmq.EVENT_DISCONNECTED: "the connection ended",
}


def _set_common(socket: zmq.Socket, max_bytes: int) -> None:
    socket.linger = 0
    socket.maxmsgsize = max_bytes
    # libzmq 4.3.5 ends the whole process (assertion !_io_error or _input_stopped) when a connection falls whose input
    # it had stopped at the high water mark, if a heartbeat is due or waits in the buffer. So input is never stopped;
    # what bounds the memory is that receivers drain at once and that honest clients bound what they have open.
    socket.rcvhwm = 0
    socket.handshake_ivl = _HANDSHAKE_MS


def _check_ipc(address: str) -> None:
    if not address.startswith("ipc://"):
        return
    path = address.removeprefix("ipc://")
    directory = os.path.dirname(path)
    try:
        status = os.stat(directory, follow_symlinks=False)
    except OSError as error:
        raise BadInput(
            f"cannot listen on {address!r}: {error.strerror}", f"Make the directory {directory!r}"
        ) from error
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise BadInput(f"{directory} is open to others", f"Run: chmod 700 {directory}, as the account of the pool")
    # libzmq silently takes the path over from a server that still listens there.
    with sockets.socket(sockets.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            return
        except OSError as error:
            raise BadInput(f"cannot listen on {address!r}: {error}", "The path is too long or no socket") from error
    raise Unavailable(f"{address} is in use", "End the process that listens there")
