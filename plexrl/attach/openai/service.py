"""The routes below /v1: a request in, OpenAI's answer out."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

from plexrl.attach.openai import asked as asks
from plexrl.attach.openai.answer import Answer
from plexrl.attach.openai.asked import Asked
from plexrl.attach.openai.choices import Prompt
from plexrl.attach.openai.refusals import Refusal
from plexrl.attach.openai.samples import Call, Samples
from plexrl.attach.openai.stream import Start, Stream, Write
from plexrl.attach.openai.words import Words
from plexrl.types.drawn import Drawn

PREFIX = "/v1/"
# A stream that has nothing to say yet says so, so that the client does not take the wait for a dead connection.
WAITING_S = 15.0
_AT_ONCE = 64


class Service:
    """Answers one job. ask: Link.ask. hold: seconds without a head after which a request that waits is sent away."""

    def __init__(self, ask: Callable[..., Any], hold: float):
        self._samples = Samples(ask, hold)
        self._words: dict[str, asyncio.Task[Words]] = {}

    async def close(self) -> None:
        """The job has ended."""
        await self._samples.close()

    async def answer(self, method: str, path: str, body: bytes, start: Start, write: Write) -> None:
        """Answer one request; cancelled when its client is gone. start(status, headers) once, then write(part)..."""
        stream = Stream(start, write)
        try:
            route = path.removeprefix(PREFIX)
            match method, route:
                case "GET", "models":
                    await stream.whole(await self._list())
                case "GET", _ if route.startswith("models/"):
                    await stream.whole(await self._model(route.removeprefix("models/")))
                case "POST", "completions":
                    await self._complete(asks.completion(body), stream)
                case "POST", "chat/completions":
                    await self._complete(asks.chat(body), stream)
                case _, ("models" | "completions" | "chat/completions"):
                    raise Refusal(405, f"{method} {path} is not allowed", code="method_not_allowed")
                case _:
                    raise Refusal(
                        404,
                        f"{method} {path[:200]} is not built in this version of PlexRL. A pool has /v1/models, "
                        "/v1/completions and /v1/chat/completions",
                        code="unknown_url",
                    )
        except Refusal as refusal:
            await stream.refuse(refusal)
        except Exception as error:
            await stream.refuse(
                Refusal(500, f"The job's proxy failed on this request ({type(error).__name__}: {error})")
            )
            raise

    # -- models --------------------------------------------------------------------------------------------------------

    async def _list(self) -> dict[str, Any]:
        found = await self._samples.models()
        bases = [
            {"id": base["name"], "created": 0, "owned_by": "pool", "max_model_len": base["max_context"]}
            for base in found["bases"]
        ]
        versions = [
            {
                "id": version["path"],
                "created": version["created_us"] // 1_000_000,
                "owned_by": "you",
                "parent": version["base"],
            }
            for version in found["versions"]
        ]
        return {"object": "list", "data": [{"object": "model"} | each for each in bases + versions]}

    async def _model(self, name: str) -> dict[str, Any]:
        for each in (await self._list())["data"]:
            if each["id"] == name:
                return each
        raise Refusal(404, f"There is no model {name[:300]!r} that you may use here", "model", "model_not_found")

    # -- completions ---------------------------------------------------------------------------------------------------

    async def _complete(self, asked: Asked, stream: Stream) -> None:
        sampler = await self._samples.sampler(asked.model)
        words = await self._words_of(sampler.folder)
        answer = await asyncio.to_thread(Answer, asked, words, sampler.version)
        if not asked.stream:
            bodies = await self._all(answer)
            whole = await asyncio.to_thread(answer.whole, bodies)
            await stream.whole(whole, answer.headers)
            return
        try:
            # Closed at once when the client leaves in the middle of an event, and its calls with it.
            async with contextlib.aclosing(self._events(answer)) as events:
                async for event in events:
                    await stream.event(event, answer.headers)
        except Refusal as refusal:
            await stream.refuse(refusal)
            return
        await stream.end()

    async def _all(self, answer: Answer) -> list[Drawn]:
        """The ends of all calls, a few prompts at a time."""
        room = asyncio.Semaphore(_AT_ONCE)

        async def one(prompt: Prompt) -> Drawn:
            async with room, _Open(self._samples, answer, prompt) as call:
                drawn = await self._samples.drawn(call.call, 2**62)
                call.over = True
                return drawn

        async with _gathering() as group:
            tasks = [group.create_task(one(prompt)) for prompt in answer.prompts]
        return [task.result() for task in tasks]

    async def _events(self, answer: Answer) -> AsyncGenerator[dict[str, Any] | None]:
        """Chunks of prompts as they come, a few prompts at a time; None when there was nothing to say for a while."""
        queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()

        room = asyncio.Semaphore(_AT_ONCE)

        async def one(prompt: Prompt) -> None:
            async with room, _Open(self._samples, answer, prompt) as call:
                have = 0
                while not call.over:
                    drawn = await self._samples.drawn(call.call, have)
                    call.over = drawn.ended
                    have = sum(len(sequence.tokens) // 4 for sequence in drawn.sequences)
                    for chunk in answer.take(prompt, drawn):
                        queue.put_nowait(chunk)

        async def all_of_them() -> None:
            async with _gathering() as group:
                for prompt in answer.prompts:
                    group.create_task(one(prompt))

        drawing = asyncio.create_task(all_of_them())
        try:
            while not (drawing.done() and queue.empty()):
                getting = asyncio.ensure_future(queue.get())
                await asyncio.wait({getting, drawing}, timeout=WAITING_S, return_when=asyncio.FIRST_COMPLETED)
                if getting.done():
                    yield getting.result()
                    continue
                getting.cancel()
                if not drawing.done():
                    yield None
            await drawing
        finally:
            drawing.cancel()
            await asyncio.gather(drawing, return_exceptions=True)
        if answer.asked.usage:
            yield answer.last()

    async def _words_of(self, folder: str) -> Words:
        """Read once; a folder that could not be read is tried again."""
        reading = self._words.get(folder)
        if reading is None or (reading.done() and (reading.cancelled() or reading.exception() is not None)):
            reading = self._words[folder] = asyncio.create_task(asyncio.to_thread(Words, Path(folder)))
        return await asyncio.shield(reading)


class _Open:
    """A call while somebody waits for it; left early it is cancelled."""

    def __init__(self, samples: Samples, answer: Answer, prompt: Prompt):
        self._samples = samples
        self._answer = answer
        self._prompt = prompt
        self.call: Call
        self.over = False

    async def __aenter__(self) -> "_Open":
        asked = self._answer.asked
        self.call = await self._samples.sample(asked.model, self._answer.body(self._prompt), asked.stream)
        return self

    async def __aexit__(self, *error: object) -> None:
        if not self.over:
            self._samples.leave(self.call)


class _gathering:
    """A task group that raises the first Refusal as it is."""

    async def __aenter__(self) -> asyncio.TaskGroup:
        self._group = asyncio.TaskGroup()
        return await self._group.__aenter__()

    async def __aexit__(self, *error: Any) -> None:
        try:
            await self._group.__aexit__(*error)
        except BaseExceptionGroup as several:
            raise several.exceptions[0] from None
