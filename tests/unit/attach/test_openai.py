"""OpenAI's API at the proxy, by the unmodified SDK, against a head that draws what its test says."""

import asyncio
import json
import struct
from pathlib import Path

import msgspec
import openai
import pytest

from plexrl.attach.settings import Holds
from plexrl.types.drawn import Drawn, Sequence
from plexrl.wire import messages
from tests.unit.attach.fakehead import QUICK, SECRET, FakeHead, Running, new_pool, proxy, until

TALK = [{"role": "user", "content": "hi"}]
LETTERS = "!\"#$%&'()*+,-./0123456789:;<=>?@ABCDEFGHIJKLMNOPQRSTUVWXYZ[\\]^_`abcdefghijklmnopqrstuvwxyz{|}~"
END = 257  # <|im_end|> of the tiny model's tokenizer


def tokens_of(text: str) -> list[int]:
    """In the tiny model's tokenizer printable ASCII comes first, in its order."""
    return [LETTERS.index(letter) for letter in text]


def sequence(tokens: list[int], stopped: bool = False) -> Sequence:
    logprobs = [-1.0 - at for at in range(len(tokens))]
    return Sequence(
        tokens=struct.pack(f"<{len(tokens)}i", *tokens),
        logprobs=struct.pack(f"<{len(tokens)}f", *logprobs),
        stopped=stopped,
    )


class Drawing:
    """Answers like a pool. script: what each poll of a call finds, the last one for ever; None leaves it open."""

    def __init__(self, folder: Path, *script: Drawn | bytes | None):
        self.folder = folder
        self.script = list(script)
        self.asked: list[tuple[str, dict, dict[str, str]]] = []
        self.refusals: list[tuple[str, int]] = []
        self.sessions = 0

    def bodies(self, route: str) -> list[dict]:
        return [body for name, body, _ in self.asked if name == route]

    def __call__(self, request: messages.Request, body: bytes) -> tuple[int, dict[str, str], bytes] | None:
        route = request.path.removeprefix("/api/v1/")
        given = json.loads(body) if body else {}
        self.asked.append((route, given, request.headers))
        for index, (name, status) in enumerate(self.refusals):
            if name == route:
                del self.refusals[index]
                return status, {}, json.dumps({"detail": f"{route} refused with {status}"}).encode()
        match route:
            case "create_session":
                self.sessions += 1
                return self._json(session_id=f"s{self.sessions}")
            case "create_sampling_session":
                named = given.get("base_model") or given["model_path"]
                if named not in ("tiny", "tinker://a/sampler_weights/b"):
                    return 400, {}, json.dumps({"detail": f"no {named}"}).encode()
                self.path = given.get("model_path")
                return self._json(sampling_session_id=f"{given['session_id']}:sample:0")
            case "asample":
                name = f"{given['sampling_session_id']}:{given['seq_id']}"
                return self._json(request_id=name, sample_sequence_ids=[])
            case "/plexrl/v1/drawn":
                found = self.script[0] if len(self.script) == 1 else self.script.pop(0)
                if isinstance(found, Drawn):
                    return 200, {"content-type": "application/msgpack"}, msgspec.msgpack.encode(found)
                return found and (200, {"content-type": "application/json"}, found)
            case _ if route.startswith("samplers/"):
                return self._json(sampler_id="x", base_model=str(self.folder), model_path=self.path)
        return self._json()

    @staticmethod
    def _json(**body: object) -> tuple[int, dict[str, str], bytes]:
        return 200, {"content-type": "application/json"}, json.dumps(body).encode()


def so_far(text: str, end: str = "", more: list[int] | None = None) -> Drawn:
    """One answer. end: `stop`, `length`, or it goes on."""
    return Drawn(ended=bool(end), version="", sequences=(sequence(tokens_of(text) + (more or []), end == "stop"),))


def run(scenario, drawing: Drawing, **changes: object) -> None:
    async def all_of_it(pool) -> None:
        FakeHead(pool, "one", drawing)
        async with proxy(pool, **changes) as running, client(running) as asking:
            await scenario(running, asking)

    with new_pool() as pool:
        asyncio.run(all_of_it(pool))


def client(running: Running, key: str = SECRET, retries: int = 0) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{running.port}/v1", api_key=key, max_retries=retries)


def test_a_chat_is_rendered_asked_for_and_told(tiny_model: Path):
    drawing = Drawing(tiny_model, so_far("Hello!STOP", "stop"))

    async def scenario(running, asking):
        found = await asking.chat.completions.create(
            model="tiny", messages=TALK, max_tokens=9, stop=["STOP"], seed=4, temperature=0.5, top_p=0.9, logprobs=True,
            extra_body={"top_k": 3},
        )  # fmt: skip
        (choice,) = found.choices
        assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "Hello!", "stop")
        assert [told.token for told in choice.logprobs.content] == list("Hello!")
        assert [told.logprob for told in choice.logprobs.content] == [-1.0 - at for at in range(6)]
        assert found.usage.completion_tokens == 10 and found.object == "chat.completion"
        (asked,) = drawing.bodies("asample")
        assert asked["sampling_params"] == {
            "temperature": 0.5, "top_p": 0.9, "top_k": 3, "max_tokens": 9, "seed": 4, "stop": ["STOP"],
        }  # fmt: skip
        assert found.usage.prompt_tokens == len(asked["prompt"]["chunks"][0]["tokens"])

    run(scenario, drawing)


def test_the_token_that_ends_an_answer_is_not_shown(tiny_model: Path):
    drawing = Drawing(tiny_model, so_far("ok", "stop", [END]))

    async def scenario(running, asking):
        found = await asking.chat.completions.create(model="tiny", messages=TALK, logprobs=True)
        (choice,) = found.choices
        assert (choice.message.content, choice.finish_reason) == ("ok", "stop")
        assert len(choice.logprobs.content) == 2 and found.usage.completion_tokens == 3
        assert "max_tokens" not in drawing.bodies("asample")[0]["sampling_params"]

    run(scenario, drawing)


def test_a_stream_comes_in_parts_and_ends(tiny_model: Path):
    drawing = Drawing(tiny_model, so_far("ab"), so_far("abcd"), so_far("abcde", "length"))

    async def scenario(running, asking):
        chunks = [
            chunk
            async for chunk in await asking.chat.completions.create(
                model="tiny", messages=TALK, stream=True, logprobs=True, stream_options={"include_usage": True}
            )
        ]
        *told, usage = chunks
        assert [chunk.choices[0].delta.content for chunk in told] == ["ab", "cd", "e"]
        assert [len(chunk.choices[0].logprobs.content) for chunk in told] == [2, 2, 1]
        assert [chunk.choices[0].finish_reason for chunk in told] == [None, None, "length"]
        assert told[0].choices[0].delta.role == "assistant" and told[1].choices[0].delta.role is None
        assert usage.choices == [] and usage.usage.completion_tokens == 5
        assert [body["have"] for body in drawing.bodies("/plexrl/v1/drawn")] == [0, 2, 4]
        assert drawing.asked[-1][0] == "/plexrl/v1/drawn"  # nothing was cancelled: it had ended
        (headers,) = [headers for name, _, headers in drawing.asked if name == "asample"]
        assert "x-plexrl-progress" in headers and SECRET not in str(drawing.asked)

    run(scenario, drawing)


def test_an_answer_that_ends_before_its_sibling_ends_once(tiny_model: Path):
    def both(one: Sequence, other: str, end: bool = False) -> Drawn:
        return Drawn(ended=end, version="", sequences=(one, sequence(tokens_of(other))))

    short = sequence([*tokens_of("ab"), END], stopped=True)
    drawing = Drawing(tiny_model, both(short, "c"), both(short, "cd"), both(short, "cde", end=True))

    async def scenario(running, asking):
        told: dict[int, list] = {0: [], 1: []}
        stream = await asking.completions.create(model="tiny", prompt="p", stream=True, n=2)
        async for chunk in stream:
            (choice,) = chunk.choices
            told[choice.index].append((choice.text, choice.finish_reason))
        assert told == {0: [("ab", "stop")], 1: [("c", None), ("d", None), ("e", "length")]}

    run(scenario, drawing)


def test_the_beginning_of_a_stop_is_held_back(tiny_model: Path):
    drawing = Drawing(tiny_model, so_far("xS"), so_far("xST"), so_far("xSTa"), so_far("xSTaSTOP", "stop"))

    async def scenario(running, asking):
        stream = await asking.completions.create(model="tiny", prompt="p", stream=True, stop="STOP")
        texts = [chunk.choices[0].text async for chunk in stream]
        assert texts == ["x", "STa", ""]

    run(scenario, drawing)


def test_an_answer_that_was_drawn_anew_ends_the_stream_with_an_error(tiny_model: Path):
    drawing = Drawing(tiny_model, so_far("ab"), so_far("xyz", "length"))

    async def scenario(running, asking):
        stream = await asking.completions.create(model="tiny", prompt="p", stream=True)
        with pytest.raises(openai.APIError, match="lost in the middle"):
            [chunk async for chunk in stream]

    run(scenario, drawing)


def test_a_client_that_leaves_ends_its_call(tiny_model: Path):
    drawing = Drawing(tiny_model, so_far("ab"), None)

    async def scenario(running, asking):
        stream = await asking.completions.create(model="tiny", prompt="p", stream=True)
        async for _ in stream:
            break
        await stream.close()
        await until(lambda: drawing.bodies("cancel_future"))
        waiting = asyncio.create_task(asking.completions.create(model="tiny", prompt="p"))
        await until(lambda: len(drawing.bodies("/plexrl/v1/drawn")) == 3)
        waiting.cancel()
        await until(lambda: len(drawing.bodies("cancel_future")) == 2)
        asked = [f"{body['sampling_session_id']}:{body['seq_id']}" for body in drawing.bodies("asample")]
        assert [body["request_id"] for body in drawing.bodies("cancel_future")] == asked

    run(scenario, drawing)


def test_a_wait_is_told_of_in_a_stream(tiny_model: Path, monkeypatch: pytest.MonkeyPatch):
    from plexrl.attach.openai import service

    monkeypatch.setattr(service, "WAITING_S", 0.05)
    drawing = Drawing(tiny_model, None)

    async def scenario(running, asking):
        asked = {"model": "tiny", "prompt": "p", "stream": True}
        async with running.client.stream("POST", "/v1/completions", json=asked) as answer:
            assert answer.status_code == 200 and answer.headers["content-type"] == "text/event-stream"
            async for line in answer.aiter_lines():
                assert line == ": waiting"
                break

    run(scenario, drawing)


def test_a_full_job_waits_for_its_place_and_a_session_that_ended_is_opened_anew(tiny_model: Path):
    drawing = Drawing(tiny_model, so_far("a", "length"))
    drawing.refusals = [("asample", 429), ("asample", 429), ("asample", 410)]

    async def scenario(running, asking):
        found = await asking.completions.create(model="tiny", prompt="p")
        assert found.choices[0].text == "a"
        tries = drawing.bodies("asample")
        assert [body["sampling_session_id"] for body in tries] == ["s1:sample:0"] * 3 + ["s2:sample:0"]
        assert tries[0]["seq_id"] == tries[1]["seq_id"] == tries[2]["seq_id"] < tries[3]["seq_id"]

    run(scenario, drawing)


def test_without_a_head_the_sdk_is_told_to_come_again(tiny_model: Path):
    drawing = Drawing(tiny_model, so_far("a", "length"))

    async def scenario(pool):
        head = FakeHead(pool, "one", drawing)
        async with proxy(pool) as running, client(running) as asking:
            head.die()
            with pytest.raises(openai.RateLimitError) as caught:
                await asking.completions.create(model="tiny", prompt="p")
            assert caught.value.response.headers["retry-after"] == "20"
            assert caught.value.code == "pool_unavailable" and "no head" in caught.value.message

    with new_pool() as pool:
        asyncio.run(scenario(pool))


def test_a_request_without_a_head_waits_for_the_next_one(tiny_model: Path):
    drawing = Drawing(tiny_model, so_far("a", "length"))

    async def scenario(pool):
        head = FakeHead(pool, "one", drawing)
        async with proxy(pool, holds=Holds()) as running, client(running) as asking:
            head.die()
            asked = asyncio.create_task(asking.completions.create(model="tiny", prompt="p"))
            await asyncio.sleep(0.2)
            assert not asked.done()
            FakeHead(pool, "two", drawing)
            assert (await asked).choices[0].text == "a"

    with new_pool() as pool:
        asyncio.run(scenario(pool))


def test_a_call_outlives_its_head(tiny_model: Path):
    drawing = Drawing(tiny_model, so_far("ab"), None, so_far("abc", "length"))

    async def scenario(pool):
        head = FakeHead(pool, "one", drawing)
        async with proxy(pool) as running, client(running) as asking:
            stream = await asking.completions.create(model="tiny", prompt="p", stream=True)
            texts = [(await anext(stream)).choices[0].text]
            await until(lambda: len(drawing.bodies("/plexrl/v1/drawn")) == 2)
            head.die()
            await asyncio.sleep(3 * QUICK.create)
            FakeHead(pool, "two", drawing)
            texts += [chunk.choices[0].text async for chunk in stream]
            assert texts == ["ab", "c"] and len(drawing.bodies("asample")) == 1

    with new_pool() as pool:
        asyncio.run(scenario(pool))


@pytest.mark.parametrize(
    ("failed", "error"),
    [
        ({"error": "the model's logits are not finite", "category": "user"}, openai.BadRequestError),
        ({"error": "its gang was lost", "category": "server"}, openai.InternalServerError),
    ],
)
def test_a_call_that_failed_is_an_error_of_whose_fault_it_is(tiny_model: Path, failed: dict, error: type):
    drawing = Drawing(tiny_model, json.dumps(failed).encode())

    async def scenario(running, asking):
        for stream in (False, True):
            with pytest.raises(error, match=failed["error"]):
                await asking.chat.completions.create(model="tiny", messages=TALK, stream=stream)

    run(scenario, drawing)


def test_refusals_have_openais_shape(tiny_model: Path):
    drawing = Drawing(tiny_model, so_far("a", "length"))

    async def scenario(running, asking):
        with pytest.raises(openai.NotFoundError) as caught:
            await asking.chat.completions.create(model="/etc/passwd", messages=TALK)
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
        with pytest.raises(openai.BadRequestError) as caught:
            await asking.chat.completions.create(model="tiny", messages=TALK, response_format={"type": "json_object"})
        assert (caught.value.code, caught.value.param) == ("unsupported_parameter", "response_format")
        with pytest.raises(openai.NotFoundError) as caught:
            await asking.embeddings.create(model="tiny", input="x")
        assert caught.value.code == "unknown_url"
        async with client(running, "tml-forged") as stranger:
            with pytest.raises(openai.AuthenticationError):
                await stranger.chat.completions.create(model="tiny", messages=TALK)
        assert (await running.client.put("/v1/models")).status_code == 405

    run(scenario, drawing)


def test_a_version_is_asked_for_by_its_path_and_named_in_the_answer(tiny_model: Path):
    drawing = Drawing(tiny_model, so_far("a", "length"))
    path = "tinker://a/sampler_weights/b"

    async def scenario(running, asking):
        answer = await asking.completions.with_raw_response.create(model=path, prompt="p")
        assert answer.headers["x-plexrl-version"] == path and answer.parse().model == path
        await asking.completions.create(model=path, prompt="p")
        (opened,) = drawing.bodies("create_sampling_session")
        assert opened["model_path"] == path

    run(scenario, drawing)


def test_several_prompts_and_echo(tiny_model: Path):
    drawing = Drawing(tiny_model, so_far("xy", "length"))

    async def scenario(running, asking):
        found = await asking.completions.create(model="tiny", prompt=["ab", "c"], echo=True, max_tokens=2)
        assert [(choice.index, choice.text) for choice in found.choices] == [(0, "abxy"), (1, "cxy")]
        assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (3, 4)
        scored = await asking.completions.create(model="tiny", prompt="ab", echo=True, max_tokens=0)
        assert scored.choices[0].text == "ab"
        asked = drawing.bodies("asample")
        assert [body["prompt"]["chunks"][0]["tokens"] for body in asked[:2]] == [tokens_of("ab"), tokens_of("c")]

    run(scenario, drawing)
