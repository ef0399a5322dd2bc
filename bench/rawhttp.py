"""The leanest HTTP client there is: one keep-alive connection, one request at a time, whole bodies."""

import asyncio
from urllib.parse import urlsplit


class Connection(asyncio.Protocol):
    """`await Connection.open(url, key)`, then `await connection.post(path, body)`."""

    def __init__(self, host: str, key: str):
        self._head = f" HTTP/1.1\r\nhost: {host}\r\nx-api-key: {key}\r\n".encode()
        self._count = 0
        self._received = b""
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None

    @classmethod
    async def open(cls, url: str, key: str) -> "Connection":
        """Connect to the server of a base URL."""
        where = urlsplit(url)
        _, self = await asyncio.get_running_loop().create_connection(
            lambda: cls(where.netloc, key), where.hostname, where.port
        )
        return self

    async def post(self, path: str, body: bytes, kind: bytes = b"application/json", accept: bytes = b"*/*") -> bytes:
        """The body of the answer. Raises RuntimeError unless the status is 200."""
        self._answer = asyncio.get_running_loop().create_future()
        self._count += 1
        self._transport.write(
            b"POST %s%sx-idempotency-key: %x-%d\r\ncontent-type: %s\r\naccept: %s\r\ncontent-length: %d\r\n\r\n%s"
            % (path.encode(), self._head, id(self), self._count, kind, accept, len(body), body)
        )
        status, answer = await self._answer
        if status != 200:
            raise RuntimeError(f"POST {path}: {status} {answer[:500].decode(errors='replace')}")
        return answer

    def close(self) -> None:
        """Disconnect."""
        self._transport.close()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        end = self._received.find(b"\r\n\r\n")
        if end < 0 or self._answer is None:
            return
        head = self._received[:end].lower()
        at = head.index(b"content-length:") + len(b"content-length:")
        size = int(head[at : (head.find(b"\r\n", at) + 1 or len(head) + 1) - 1])
        if len(self._received) >= end + 4 + size:
            body, self._received = self._received[end + 4 : end + 4 + size], self._received[end + 4 + size :]
            answer, self._answer = self._answer, None
            answer.set_result((int(head[9:12]), body))

    def connection_lost(self, error: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(RuntimeError(f"the server closed the connection ({error})"))
