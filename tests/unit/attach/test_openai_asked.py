"""What a program may ask for; everything that would change the answer and is not built is refused by its name."""

import json

import pytest

from plexrl.attach.openai import asked
from plexrl.attach.openai.refusals import Refusal

TALK = [{"role": "user", "content": "hi"}]


def chat(**fields: object) -> asked.Asked:
    return asked.chat(json.dumps({"model": "m", "messages": TALK, **fields}).encode())


def completion(**fields: object) -> asked.Asked:
    return asked.completion(json.dumps({"model": "m", "prompt": "p", **fields}).encode())


def refused(ask, **fields: object) -> Refusal:
    with pytest.raises(Refusal) as caught:
        ask(**fields)
    error = json.loads(caught.value.body)["error"]
    assert error["message"] and error["type"] == "invalid_request_error" and caught.value.status == 400
    return caught.value


TOOL = {"type": "function", "function": {"name": "f"}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [TOOL]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{}]}, "functions"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"frequency_penalty": 0.1}, "frequency_penalty"),
        ({"presence_penalty": -1}, "presence_penalty"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"store": True}, "store"),
        ({"min_p": 0.1}, "min_p"),
        ({"guided_json": {}}, "guided_json"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type"),
        ({"messages": [*TALK, {"role": "tool", "content": "x"}]}, "messages[1].role"),
        ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [TOOL]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", "weight": 1}]}, "messages[0].weight"),
        ({"messages": []}, "messages"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template": "{{ x }}"}, "chat_template"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"n": 0}, "n"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": 0}, "top_k"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"seed": 2**63}, "seed"),
        ({"stop": [""]}, "stop[0]"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"model": 7}, "model"),
    ],
)
def test_a_chat_that_cannot_be_honoured_is_refused_by_its_field(fields: dict, param: str):
    assert refused(chat, **fields).param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 3}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", [1]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [[-1]]}, "prompt[0][0]"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": True}, "logprobs"),
        ({"messages": TALK}, "messages"),
    ],
)
def test_a_completion_that_cannot_be_honoured_is_refused_by_its_field(fields: dict, param: str):
    assert refused(completion, **fields).param == param


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'{"model":"m"}', b"\xff", b"[" * 100_000])
def test_what_is_no_request_is_refused(body: bytes):
    for ask in (asked.chat, asked.completion):
        with pytest.raises(Refusal) as caught:
            ask(body)
        assert caught.value.status == 400 and caught.value.message


def test_values_that_ask_for_nothing_are_taken():
    found = chat(
        tools=[],
        tool_choice="none",
        response_format={"type": "text"},
        logit_bias={},
        frequency_penalty=0,
        presence_penalty=0.0,
        store=False,
        user="me",
        metadata={"run": "7"},
        n=None,
        stop=None,
        seed=None,
        stream=None,
    )
    assert (found.n, found.stops, found.seed, found.stream, found.max_tokens) == (1, (), None, False, None)
    assert (found.temperature, found.top_p, found.top_k, found.top) == (1.0, 1.0, -1, None)


def test_what_is_asked_arrives():
    found = chat(
        max_completion_tokens=5, stop="x", logprobs=True, seed=-3, top_k=4, stream=True, temperature=0, n=2,
        stream_options={"include_usage": True}, chat_template_kwargs={"enable_thinking": False},
        messages=[{"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
    )  # fmt: skip
    assert (found.max_tokens, found.stops, found.top, found.seed, found.top_k) == (5, ("x",), 0, -3, 4)
    assert (found.stream, found.usage, found.temperature, found.n) == (True, True, 0, 2)
    assert found.messages == [{"role": "system", "content": "ab"}] and found.template == {"enable_thinking": False}
    plain = completion(prompt=[[1, 2], [3]], echo=True, max_tokens=0, logprobs=0)
    assert (plain.prompts, plain.echo, plain.max_tokens, plain.top) == (([1, 2], [3]), True, 0, 0)
    assert completion(prompt=[1, 2]).prompts == ([1, 2],)
    assert completion().max_tokens == 16
