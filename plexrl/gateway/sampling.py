"""Sampling and futures: the routes that run thousands of times a second, decoded by msgspec."""

import hashlib
from typing import Annotated

import msgspec
from msgspec import Meta, Struct
from tinker.types.create_sampling_session_request import CreateSamplingSessionRequest

from plexrl.gateway.models import validate
from plexrl.gateway.names import base_model, checkpoint_path, identifier
from plexrl.gateway.refusals import NotBuilt, bad, malformed
from plexrl.gateway.training import MAX_SEQ
from plexrl.types import GetSampler, HttpRequest, OpenSampler, Retrieve, Sample

MAX_SAMPLES = 1024
MAX_STOPS = 64
MAX_TOP_K = 1024

_Token = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_TopK = Annotated[int, Meta(ge=0, le=MAX_TOP_K)]
_Word = Annotated[str, Meta(min_length=1, max_length=1024)]


class _Chunk(Struct):
    """An EncodedTextChunk; images and audio carry another type and no tokens."""

    tokens: list[_Token] | None = None
    type: str = "encoded_text"


class _Prompt(Struct, forbid_unknown_fields=True):
    chunks: Annotated[list[_Chunk], Meta(min_length=1)]


class _Params(Struct):
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: _Word | Annotated[list[_Word | _Token], Meta(max_length=MAX_STOPS)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] = 1.0
    top_k: Annotated[int, Meta(ge=-1)] = -1
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0


class _Sample(Struct, forbid_unknown_fields=True):
    """SampleRequest of the SDK."""

    prompt: _Prompt
    sampling_params: _Params
    num_samples: Annotated[int, Meta(ge=1, le=MAX_SAMPLES)] = 1
    base_model: str | None = None
    model_path: str | None = None
    sampling_session_id: str | None = None
    seq_id: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: _TopK = 0
    topk_sample_logprobs: _TopK = 0
    target_prompt_logprobs: dict | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None
    record_stability_info: bool | None = None
    type: str = "sample"


class _Retrieve(Struct):
    request_id: str
    allow_metadata_only: bool = False


_sample = msgspec.json.Decoder(_Sample)
_retrieve = msgspec.json.Decoder(_Retrieve)

_LATER = (
    "target_prompt_logprobs",
    "prompt_alt_tokens_k",
    "prompt_logprobs_last_n",
)


def sample(request: HttpRequest, max_context: int) -> Sample:
    """asample. max_context: of the longest model; which one the session samples from is the engine's to check.

    record_stability_info is taken and records nothing: stable_reinforce needs no more than the logprobs of the draw.
    """
    body = request.body
    try:
        asked = _sample.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise malformed(error) from error
    if asked.sampling_session_id is None or asked.seq_id is None:
        raise NotBuilt(
            "Sampling without a sampling session", "Use create_sampling_client or save_weights_and_get_sampling_client"
        )
    for name in _LATER:
        if getattr(asked, name):
            raise NotBuilt(f"asample's {name}", "Leave it out")
    tokens = 0
    for chunk in asked.prompt.chunks:
        if chunk.tokens is None or chunk.type != "encoded_text":
            raise NotBuilt(f"A prompt chunk of type {chunk.type[:40]!r}", "Give EncodedTextChunks")
        tokens += len(chunk.tokens)
    params = asked.sampling_params
    if isinstance(params.stop, list) and len({type(stop) for stop in params.stop}) > 1:
        raise bad("stop mixes texts and tokens", "Give a text, a list of texts, or a list of tokens")
    if params.top_k == 0:
        raise bad("top_k 0 leaves no token to draw", "Give -1 for no limit, or 1 and more")
    new = max_context - tokens if params.max_tokens is None else params.max_tokens
    if tokens < 1 or new < 1 or tokens + new > max_context:
        raise bad(
            f"A prompt of {tokens} tokens and {new} new ones do not fit",
            f"Give at least one token and stay within the context of {max_context} tokens",
        )
    return Sample(
        sampler=identifier("sampling_session_id", asked.sampling_session_id),
        seq=asked.seq_id,
        num_samples=asked.num_samples,
        body=body,
        digest=hashlib.sha256(body).hexdigest(),
        units=tokens + asked.num_samples * new,
        prompt_tokens=tokens,
        progress="x-plexrl-progress" in request.headers,
    )


def retrieve(request: HttpRequest) -> Retrieve:
    """retrieve_future."""
    try:
        asked = _retrieve.decode(request.body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise malformed(error) from error
    return Retrieve(
        request_id=identifier("request_id", asked.request_id),
        proto="application/x-protobuf" in request.headers.get("accept", ""),
    )


def open_sampler(request: HttpRequest) -> OpenSampler:
    """create_sampling_session. With a model_path, base_model is only the SDK's hint and is dropped."""
    asked = validate(CreateSamplingSessionRequest, request)
    if not 0 <= asked.sampling_session_seq_id <= MAX_SEQ:
        raise bad(f"sampling_session_seq_id {asked.sampling_session_seq_id} is out of range", "Count from 0")
    if asked.model_path is None and asked.base_model is None:
        raise bad("create_sampling_session names neither a model_path nor a base_model", "Give one of them")
    if asked.model_path is not None and checkpoint_path(asked.model_path).kind != "sampler_weights":
        raise bad(
            f"{asked.model_path[:256]!r} is a training state and cannot be sampled from",
            "Give what save_weights_for_sampler returned",
        )
    return OpenSampler(
        session=identifier("session_id", asked.session_id),
        sampler_seq=asked.sampling_session_seq_id,
        model_path=asked.model_path,
        base_model=base_model(asked.base_model) if asked.model_path is None else None,
    )


def get_sampler(sampler: str) -> GetSampler:
    """samplers/{sampler}."""
    return GetSampler(sampler=identifier("sampling_session_id", sampler))
