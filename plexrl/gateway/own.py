"""What is ours and no part of the Tinker API: what the command line asks from within a job, and what OpenAI's API
(plexrl.attach.openai) needs."""

from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct
from tinker.proto import tinker_public_pb2 as pb

from plexrl.gateway.names import identifier
from plexrl.gateway.refusals import malformed
from plexrl.types import (
    AnyCommand,
    CheckpointsList,
    DeleteCheckpoint,
    Explain,
    Explained,
    GetDrawn,
    HttpRequest,
    HttpResponse,
    ListCheckpoints,
    ListModels,
    Look,
    ModelsList,
    Seen,
    SoFar,
)
from plexrl.types.drawn import Drawn, Sequence

OWN = "/plexrl/v1/"
"""Before the paths."""


class _GetDrawn(Struct, forbid_unknown_fields=True):
    request_id: str
    have: Annotated[int, Meta(ge=0)] = 0


_get_drawn = msgspec.json.Decoder(_GetDrawn)
_pack = msgspec.msgpack.Encoder().encode


def get_drawn(request: HttpRequest) -> GetDrawn:
    """drawn: JSON `{request_id, have}`."""
    try:
        asked = _get_drawn.decode(request.body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise malformed(error) from error
    return GetDrawn(request_id=identifier("request_id", asked.request_id), have=asked.have)


class _Delete(Struct, forbid_unknown_fields=True):
    path: str


def delete_checkpoint(request: HttpRequest) -> DeleteCheckpoint:
    """checkpoints/delete: JSON `{path}`."""
    try:
        asked = msgspec.json.decode(request.body, type=_Delete)
    except (msgspec.DecodeError, RecursionError) as error:
        raise malformed(error) from error
    return DeleteCheckpoint(path=asked.path)


ROUTES: dict[tuple[str, str], Callable[[HttpRequest], AnyCommand]] = {
    ("GET", f"{OWN}explain"): lambda request: Explain(),
    ("GET", f"{OWN}models"): lambda request: ListModels(),
    ("POST", f"{OWN}drawn"): get_drawn,
    ("GET", f"{OWN}pool"): lambda request: Look(),
    ("GET", f"{OWN}checkpoints"): lambda request: ListCheckpoints(),
    ("POST", f"{OWN}checkpoints/delete"): delete_checkpoint,
}


def _explained(command: AnyCommand, answer: Explained) -> HttpResponse:
    return _json({"job": answer.job, "explained": answer.text})


def _as_it_is(command: AnyCommand, answer: ModelsList | Seen | CheckpointsList) -> HttpResponse:
    return _json(answer)


def _so_far(command: AnyCommand, answer: SoFar) -> HttpResponse:
    message = pb.SampleResponse.FromString(answer.body)
    drawn = Drawn(
        ended=answer.ended,
        version=answer.version,
        sequences=tuple(_sequence(one) for one in message.sequences),
        prompt_logprobs=message.prompt_logprobs,
        prompt_k=message.topk_prompt_logprobs.k,
        prompt_top_tokens=message.topk_prompt_logprobs.token_ids,
        prompt_top_logprobs=message.topk_prompt_logprobs.logprobs,
    )
    return HttpResponse(headers={"content-type": "application/msgpack"}, body=_pack(drawn))


def _sequence(one: pb.SampledSequence) -> Sequence:
    top = one.topk_sampled_logprobs
    return Sequence(
        tokens=one.tokens,
        logprobs=one.logprobs,
        stopped=one.stop_reason == pb.STOP_REASON_STOP,
        k=top.k,
        top_tokens=top.token_ids,
        top_logprobs=top.logprobs,
    )


def _json(body: Any) -> HttpResponse:
    return HttpResponse(headers={"content-type": "application/json"}, body=msgspec.json.encode(body))


RENDERERS: dict[type, Callable[[Any, Any], HttpResponse]] = {
    Explained: _explained,
    ModelsList: _as_it_is,
    Seen: _as_it_is,
    CheckpointsList: _as_it_is,
    SoFar: _so_far,
}
