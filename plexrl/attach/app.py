"""The HTTP of one job: who may ask, what is asked of the head as it came, and what is OpenAI's API."""

import asyncio
import hmac
import importlib
from collections.abc import Awaitable, Callable
from typing import Any

from plexrl.attach import holds as held
from plexrl.attach.link import Link
from plexrl.attach.openai.refusals import Refusal

# Of this connection or of this host only; the key above all stays here.
_NOT_FORWARDED = frozenset(
    (
        b"authorization",
        b"connection",
        b"content-length",
        b"cookie",
        b"host",
        b"keep-alive",
        b"proxy-authorization",
        b"te",
        b"transfer-encoding",
        b"upgrade",
        b"x-api-key",
    )
)
_NOT_RETURNED = frozenset(("connection", "content-length", "keep-alive", "transfer-encoding"))
_JSON = {"content-type": "application/json"}


Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


class App:
    """A bare ASGI application: checks the key, reads the body, asks the link; /v1 is OpenAI's API.

    hold: seconds that a request of that one waits for a head.
    """

    def __init__(self, link: Link, secret: str, hold: float) -> None:
        self._link = link
        self._secret = secret.encode()
        self._openai = OpenAI(link, hold)

    async def close(self) -> None:
        """The job has ended."""
        await self._openai.close()

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        shown = b""
        headers: dict[str, str] = {}
        for name, value in scope["headers"]:
            if name not in _NOT_FORWARDED:
                headers[name.decode("latin-1")] = value.decode("latin-1")
            elif name == b"x-api-key":
                shown = value
            elif name == b"authorization" and not shown and value[:7].lower() == b"bearer ":
                shown = value[7:].strip()
        known = hmac.compare_digest(shown, self._secret)
        # A stranger on this host does not get to fill our memory.
        body = await _read(receive, self._link.body_bytes if known else 0)
        openai = scope["path"].startswith("/v1/")
        if not known:
            status, fields = 401, _JSON
            content = _detail(openai, 401, "the API key is not the one of this job's proxy")
        elif body is None:
            status, fields = 413, _JSON
            text = f"the body exceeds this pool's {self._link.body_bytes} bytes; send it in parts"
            content = _detail(openai, 413, text)
        elif openai:
            await self._openai.answer(scope["method"], scope["path"], body, receive, send)
            return
        else:
            query = scope["query_string"]
            path = scope["path"] + ("?" + query.decode("latin-1") if query else "")
            status, fields, content = await self._link.ask(scope["method"], path, headers, body)
        fields = {field: text for field, text in fields.items() if field not in _NOT_RETURNED}
        await send(_head(status, fields | {"content-length": str(len(content))}))
        await send({"type": "http.response.body", "body": content})


class OpenAI:
    """The service of plexrl.attach.openai, made at the first request that needs it."""

    def __init__(self, link: Link, hold: float) -> None:
        self._link = link
        self._hold = hold
        self._making: asyncio.Task[Any] | None = None

    async def answer(self, method: str, path: str, body: bytes, receive: Receive, send: Send) -> None:
        """Answer one request, or give it up when its client is gone."""
        if self._making is None:
            self._making = asyncio.create_task(self._make())
        service = await asyncio.shield(self._making)

        async def start(status: int, headers: dict[str, str]) -> None:
            await send(_head(status, headers))

        async def write(part: bytes) -> None:
            await send({"type": "http.response.body", "body": part, "more_body": True})

        work = asyncio.create_task(service.answer(method, path, body, start, write))
        gone = asyncio.create_task(_gone(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                await work
                await send({"type": "http.response.body", "body": b""})
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    async def close(self) -> None:
        """The job has ended."""
        if self._making is not None and self._making.done() and self._making.exception() is None:
            await self._making.result().close()

    async def _make(self) -> Any:
        """Importing takes a while: in a thread, so that nobody's poll waits for it."""
        module = await asyncio.to_thread(importlib.import_module, "plexrl.attach.openai.service")
        return module.Service(self._link.ask, self._hold)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _head(status: int, fields: dict[str, str]) -> dict[str, Any]:
    headers = [(field.encode("latin-1"), text.encode("latin-1")) for field, text in fields.items()]
    return {"type": "http.response.start", "status": status, "headers": headers}


async def _read(receive: Receive, limit: int) -> bytes | None:
    """The body, None when it exceeds the limit; the rest is then read and forgotten, so that the answer is read."""
    message = await receive()
    body = message.get("body", b"")
    if not message.get("more_body"):
        return body if len(body) <= limit else None
    parts, size = [body], len(body)
    while message.get("more_body"):
        message = await receive()
        body = message.get("body", b"")
        size += len(body)
        if size <= limit:
            parts.append(body)
        else:
            parts.clear()
    return b"".join(parts) if size <= limit else None


def _detail(openai: bool, status: int, text: str) -> bytes:
    """An error's body, as the one or the other SDK shows it."""
    return Refusal(status, text).body if openai else held.detail(text)
