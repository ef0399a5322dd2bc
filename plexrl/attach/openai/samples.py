"""Samples through the link, as the tinker SDK asks for them: a session, sampling sessions, calls, their progress."""

import asyncio
import contextlib
import secrets
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import Struct

from plexrl.attach.openai.refusals import Refusal
from plexrl.types.drawn import Drawn

Ask = Callable[[str, str, dict[str, str], bytes], Any]
"""Link.ask: method, path, headers, body to (status, headers, body)."""

_BEAT_S = 10.0
_ROOM_S = 0.25
_AFTER_S = 20.0
# A session ends beside its requests, once; one that is gone again at once has another reason.
_SESSIONS = 3
_JSON = {"content-type": "application/json"}
_drawn = msgspec.msgpack.Decoder(Drawn)


class Sampler(Struct, frozen=True):
    """A sampling session. folder: of the base model. version: the model_path it is pinned to, "" for a base model."""

    id: str
    session: str
    folder: str
    version: str


class Call(Struct, frozen=True):
    """A sample at the pool, by the id of its future."""

    id: str


class Samples:
    """One session of the job at its pool. hold: seconds that a request waits for a head before it is sent away."""

    def __init__(self, ask: Ask, hold: float):
        self._ask = ask
        self._hold = hold
        self._session = ""
        self._opening = asyncio.Lock()
        self._samplers: dict[str, Sampler] = {}
        self._count = 0
        self._seq = 0
        self._beating: asyncio.Task[None] | None = None
        self._leaving: set[asyncio.Task[None]] = set()

    async def models(self) -> dict[str, Any]:
        """Of the pool's /plexrl/v1/models: bases and versions."""
        return msgspec.json.decode(await self._get("/plexrl/v1/models"))

    async def sampler(self, model: str) -> Sampler:
        """A sampling session of a base model by its name, or of a version by its path. Raises Refusal."""
        async with self._opening:
            known = self._samplers.get(model)
            if known is not None:
                return known
            session = await self._open()
            kind = "model_path" if model.startswith("tinker://") else "base_model"
            self._count += 1
            asked = {"session_id": session, "sampling_session_seq_id": self._count, kind: model}
            status, _, body = await self._post("create_sampling_session", asked | {"type": "create_sampling_session"})
            if status == 410:
                self._forget(session)
                raise Refusal(429, "The session at the pool is over; the next request opens another", after_s=0.1)
            if status in (400, 404):
                raise Refusal(404, f"The model {model!r} cannot be used: {_detail(body)}", "model", "model_not_found")
            _fine(status, body)
            name = msgspec.json.decode(body)["sampling_session_id"]
            told = msgspec.json.decode(await self._get(f"/api/v1/samplers/{name}"))
            found = Sampler(name, session, told["base_model"], told.get("model_path") or "")
            self._samplers[model] = found
            return found

    async def sample(self, model: str, asked: dict[str, Any], watch: bool) -> Call:
        """Have a call accepted; asked: the body of asample but for whose it is. watch: it will be streamed."""
        began = asyncio.get_running_loop().time()
        sessions = 0
        while True:
            sampler = await self.sampler(model)
            self._seq += 1
            body = asked | {"sampling_session_id": sampler.id, "seq_id": self._seq, "type": "sample"}
            headers = {"x-plexrl-progress": "1"} if watch else {}
            call = Call(f"{sampler.id}:{self._seq}")
            while True:
                try:
                    status, _, answer = await self._post("asample", body, headers)
                except asyncio.CancelledError:
                    # It may have been accepted: the pool calls it so then.
                    self.leave(call)
                    raise
                if status == 402 and asyncio.get_running_loop().time() - began < self._hold:
                    continue
                if status == 429 and self._session == sampler.session:
                    # The job has as many calls open as it may: this one waits for its place.
                    await asyncio.sleep(_ROOM_S)
                    continue
                break
            if status in (404, 410):
                self._forget(sampler.session)
                sessions += 1
                if sessions < _SESSIONS:
                    continue
            if status == 400:
                raise _rejected(_detail(answer), _type(answer))
            _fine(status, answer)
            return call

    async def drawn(self, call: Call, have: int) -> Drawn:
        """What a call has drawn as soon as that is more than `have` tokens, or its end. Raises Refusal when it failed.

        It waits as long as that takes, over changes of the head too: the call is the pool's, and asking costs nothing.
        """
        while True:
            asked = msgspec.json.encode({"request_id": call.id, "have": have})
            status, headers, body = await self._ask("POST", "/plexrl/v1/drawn", _JSON, asked)
            if status == 408:
                continue
            if status == 410:
                raise Refusal(500, f"The pool does not know the call any more: {_detail(body)}")
            _fine(status, body)
            if headers.get("content-type") == "application/msgpack":
                return _drawn.decode(body)
            failed = msgspec.json.decode(body)
            if failed.get("category") == "user":
                raise _rejected(failed["error"])
            raise Refusal(500, f"The pool failed on this call: {failed['error']}")

    def leave(self, call: Call) -> None:
        """Nobody waits for a call any more: it is ended early."""
        task = asyncio.get_running_loop().create_task(self._cancel(call))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def close(self) -> None:
        """No more heartbeats; the session ends with the job."""
        for task in [*self._leaving, *([self._beating] if self._beating else [])]:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _cancel(self, call: Call) -> None:
        await self._post("cancel_future", {"request_id": call.id})

    async def _open(self) -> str:
        """The session, opened when there is none."""
        if not self._session:
            asked = {"tags": ["openai"], "user_metadata": {}, "sdk_version": "", "type": "create_session"}
            key = {"x-idempotency-key": f"openai-{secrets.token_hex(8)}"}
            status, _, body = await self._post("create_session", asked, key)
            _fine(status, body)
            self._session = msgspec.json.decode(body)["session_id"]
            if self._beating is None:
                self._beating = asyncio.get_running_loop().create_task(self._beat())
        return self._session

    def _forget(self, session: str) -> None:
        if self._session == session:
            self._session = ""
        self._samplers = {name: sampler for name, sampler in self._samplers.items() if sampler.session != session}

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(_BEAT_S)
            if session := self._session:
                asked = {"session_id": session, "type": "session_heartbeat"}
                status, _, _ = await self._post("session_heartbeat", asked)
                if status == 410:
                    self._forget(session)

    async def _post(
        self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        return await self._ask("POST", f"/api/v1/{path}", _JSON | (headers or {}), msgspec.json.encode(body))

    async def _get(self, path: str) -> bytes:
        status, _, body = await self._ask("GET", path, {}, b"")
        _fine(status, body)
        return body


def _fine(status: int, body: bytes) -> None:
    """Raises Refusal for everything but 200; what means 'later' to the tinker SDK is 429 to this one."""
    if status == 200:
        return
    if status in (402, 408, 429):
        raise Refusal(429, f"The pool cannot take this now: {_detail(body)}", code="pool_unavailable", after_s=_AFTER_S)
    raise Refusal(status, _detail(body))


def _rejected(detail: str, kind: str = "") -> Refusal:
    """kind: the `type` of the head's refusal."""
    if kind == "stale_version":
        return Refusal(400, detail, "model", kind)
    long = "do not fit" in detail or "fit a context" in detail or "leaves no room" in detail
    return Refusal(400, detail, "max_tokens" if long else None, "context_length_exceeded" if long else "invalid_value")


def _type(body: bytes) -> str:
    try:
        return str(msgspec.json.decode(body).get("type", ""))
    except (msgspec.DecodeError, AttributeError):
        return ""


def _detail(body: bytes) -> str:
    try:
        found = msgspec.json.decode(body)
        return str(found.get("detail") or found.get("error") or found)
    except (msgspec.DecodeError, AttributeError):
        return body[:300].decode("utf-8", "replace")
