"""The response to one request, whole or as server-sent events."""

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from plexrl.attach.openai.refusals import JSON, Refusal

_EVENTS = {"content-type": "text/event-stream", "cache-control": "no-store"}

Start = Callable[[int, dict[str, str]], Awaitable[None]]
"""Status and headers, once."""
Write = Callable[[bytes], Awaitable[None]]
"""A part of the body."""


class Stream:
    """Errors are a status before the first byte, an event after it."""

    def __init__(self, start: Start, write: Write):
        self._start = start
        self._write = write
        self._begun = False

    async def whole(self, body: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        """All of it at once."""
        content = msgspec.json.encode(body)
        await self._start(200, JSON | {"content-length": str(len(content))} | (headers or {}))
        await self._write(content)

    async def event(self, chunk: dict[str, Any] | None, headers: dict[str, str]) -> None:
        """One chunk; None: a comment that keeps the connection."""
        if not self._begun:
            self._begun = True
            await self._start(200, _EVENTS | headers)
        await self._write(b": waiting\n\n" if chunk is None else _event(msgspec.json.encode(chunk)))

    async def end(self) -> None:
        """The stream is whole."""
        await self._write(_event(b"[DONE]"))

    async def refuse(self, refusal: Refusal) -> None:
        """The last thing that is said."""
        if self._begun:
            await self._write(_event(refusal.body))
        else:
            content = refusal.body
            await self._start(refusal.status, refusal.headers | {"content-length": str(len(content))})
            await self._write(content)


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"
