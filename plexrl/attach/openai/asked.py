"""What a program asks for: bodies of OpenAI's completions and chat completions, checked field by field.

Nothing is ignored in silence that would change the answer: what a pool cannot honour is refused by its name.
"""

import re
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from plexrl.attach.openai.refusals import Refusal, bad, not_built

MAX_N = 1024
MAX_STOPS = 16
MAX_TOP = 20
MAX_PROMPTS = 2048
# What the completions API draws when max_tokens is not given; chat draws to the end of the context.
COMPLETION_TOKENS = 16

_Text = Annotated[str, Meta(min_length=1, max_length=1024)]
_Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
_Token = Annotated[int, Meta(ge=0, lt=2**31)]
_Top = Annotated[int, Meta(ge=0, le=MAX_TOP)]


class Asked(Struct, frozen=True, kw_only=True):
    """A request, whichever of the two it came by.

    messages, template: of a chat. prompts: texts or token ids. max_tokens None: to the end of the context; 0: only with
    echo, nothing of what is drawn is shown. top: likeliest tokens told beside each; None: no logprobs at all.
    """

    model: str
    chat: bool
    messages: list[dict[str, Any]] = []
    template: dict[str, Any] = {}
    prompts: tuple[str | list[int], ...] = ()
    n: int
    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    stops: tuple[str, ...]
    top: int | None
    echo: bool
    stream: bool
    usage: bool


class _StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    # Padding against eavesdroppers of public services; ours is a loopback connection.
    include_obfuscation: bool | None = None


class _Common(Struct, forbid_unknown_fields=True, kw_only=True):
    model: Annotated[str, Meta(min_length=1, max_length=1024)]
    n: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    max_tokens: Annotated[int, Meta(ge=0, lt=2**31)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=2**31)] | None = None
    seed: _Seed | None = None
    stop: _Text | Annotated[list[_Text], Meta(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    # Hints to a service that keeps statistics or routes by them; no answer depends on them.
    user: Any = None
    metadata: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    service_tier: Any = None
    store: Any = None
    # What would change the answer and is not built; these values change nothing.
    frequency_penalty: Any = None
    presence_penalty: Any = None
    repetition_penalty: Any = None
    min_p: Any = None
    min_tokens: Any = None
    logit_bias: Any = None


class _Completion(_Common, kw_only=True):
    prompt: str | Annotated[list[str | _Token | list[_Token]], Meta(min_length=1, max_length=1 << 20)]
    logprobs: _Top | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: Any = None


class _Message(Struct, forbid_unknown_fields=True):
    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: Any = None
    tool_call_id: Any = None
    function_call: Any = None
    refusal: Any = None
    audio: Any = None
    annotations: Any = None


class _Chat(_Common, kw_only=True):
    messages: Annotated[list[_Message], Meta(min_length=1)]
    max_completion_tokens: Annotated[int, Meta(ge=1, lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: _Top | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    functions: Any = None
    function_call: Any = None
    response_format: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None
    moderation: Any = None


# Field -> values that ask for nothing; others are refused.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "moderation": (),
    "store": (False,),
}
_ROLES = {"system", "user", "assistant", "developer"}
_OWN_WORDS = {"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token", "pad_token"}

_completion = msgspec.json.Decoder(_Completion)
_chat = msgspec.json.Decoder(_Chat)


def completion(body: bytes) -> Asked:
    """POST /v1/completions. Raises Refusal."""
    given = _decode(_completion, body)
    _refuse(given)
    if given.best_of not in (None, given.n or 1):
        raise not_built("best_of other than n", "best_of", "Ask for n answers and choose")
    echo = bool(given.echo)
    if given.max_tokens == 0 and not echo:
        raise bad("max_tokens 0 without echo asks for nothing", "max_tokens", "Give 1 or more")
    return Asked(
        chat=False,
        prompts=_prompts(given.prompt),
        max_tokens=COMPLETION_TOKENS if given.max_tokens is None else given.max_tokens,
        top=given.logprobs,
        echo=echo,
        **_shared(given),
    )


def chat(body: bytes) -> Asked:
    """POST /v1/chat/completions. Raises Refusal."""
    given = _decode(_chat, body)
    _refuse(given)
    if given.max_tokens == 0:
        raise bad("max_tokens is 0", "max_tokens", "Give 1 or more")
    if given.top_logprobs is not None and not given.logprobs:
        raise bad("top_logprobs without logprobs", "top_logprobs", "Set logprobs to true")
    template = given.chat_template_kwargs or {}
    if taken := _OWN_WORDS & template.keys():
        raise bad(f"chat_template_kwargs sets {', '.join(sorted(taken))}", "chat_template_kwargs", "Leave that out")
    return Asked(
        chat=True,
        messages=[_message(message, f"messages[{index}]") for index, message in enumerate(given.messages)],
        template=template,
        max_tokens=given.max_tokens if given.max_completion_tokens is None else given.max_completion_tokens,
        top=(given.top_logprobs or 0) if given.logprobs else None,
        echo=False,
        **_shared(given),
    )


def _shared(given: _Common) -> dict[str, Any]:
    stop = given.stop
    if given.top_k == 0:
        raise bad("top_k 0 leaves no token to draw", "top_k", "Give -1 for no limit, or 1 and more")
    if given.stream_options is not None and not given.stream:
        raise bad("stream_options without stream", "stream_options", "Set stream to true")
    return {
        "model": given.model,
        "n": given.n or 1,
        "temperature": 1.0 if given.temperature is None else given.temperature,
        "top_p": 1.0 if given.top_p is None else given.top_p,
        "top_k": -1 if given.top_k is None else given.top_k,
        "seed": given.seed,
        "stops": () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop),
        "stream": bool(given.stream),
        "usage": bool(given.stream_options and given.stream_options.include_usage),
    }


def _prompts(given: str | list) -> tuple[str | list[int], ...]:
    """One text, one row of tokens, or a list of either."""
    if isinstance(given, str):
        return (given,)
    if all(isinstance(part, int) for part in given):
        return (given,)
    if len({type(part) for part in given}) > 1 or isinstance(given[0], int):
        raise bad("prompt mixes texts and tokens", "prompt", "Give texts, or lists of token ids")
    if len(given) > MAX_PROMPTS:
        raise bad(f"prompt holds {len(given)} prompts", "prompt", f"Send {MAX_PROMPTS} at most in one request")
    return tuple(given)


def _message(message: _Message, where: str) -> dict[str, Any]:
    """As chat templates want it: a role and a text."""
    for name in ("tool_calls", "tool_call_id", "function_call", "audio"):
        if getattr(message, name):
            raise not_built("Calling tools, and audio", f"{where}.{name}", "Put what a tool said into a user's message")
    if message.role not in _ROLES:
        raise not_built(f"The role {message.role[:40]!r}", f"{where}.role", "Use system, user or assistant")
    content = message.content
    if isinstance(content, list):
        parts = []
        for index, part in enumerate(content):
            if part.get("type") != "text" or not isinstance(part.get("text"), str):
                kind = str(part.get("type"))[:40]
                raise not_built(f"A content part of type {kind!r}", f"{where}.content[{index}].type", "Send text")
            parts.append(part["text"])
        content = "".join(parts)
    if content is None:
        raise bad(f"{where} has no content", f"{where}.content", "Give a text")
    # A developer's message is what used to be called the system's; templates know that name.
    role = "system" if message.role == "developer" else message.role
    return {"role": role, "content": content, **({"name": message.name} if message.name else {})}


def _refuse(given: _Common) -> None:
    for name, neutral in _NEUTRAL.items():
        value = getattr(given, name, None)
        if value is not None and value not in neutral:
            raise not_built(f"{name!r}", name)


def _decode(decoder: msgspec.json.Decoder, body: bytes) -> Any:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _malformed(str(error)) from error
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise Refusal(400, f"The request's body is malformed JSON: {error}") from error


def _malformed(text: str) -> Refusal:
    """From msgspec's words to the field's name."""
    what, _, where = text.partition(" - at ")
    where = where.strip("`").removeprefix("$").removeprefix(".")
    unknown = re.search(r"unknown field `([^`]*)`", what)
    if unknown:
        name = f"{where}.{unknown[1]}" if where else unknown[1]
        return Refusal(400, f"The field {name!r} is unknown to this pool. Leave it out", name, "unsupported_parameter")
    missing = re.search(r"missing required field `([^`]*)`", what)
    if missing:
        name = f"{where}.{missing[1]}" if where else missing[1]
        return Refusal(400, f"The field {name!r} is missing", name, "missing_required_parameter")
    return bad(f"{what} at {where!r}" if where else what, where or None)
