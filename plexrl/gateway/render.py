"""Answers of the head to HTTP responses, as the SDK's strict response types want them."""

from collections.abc import Callable
from typing import Any

import msgspec

from plexrl.gateway import own
from plexrl.types import (
    AnyAnswer,
    AnyCommand,
    ApiError,
    Cancel,
    CapabilitiesList,
    DeleteCheckpoint,
    Done,
    Failed,
    FinishSession,
    GetDrawn,
    Heartbeat,
    HttpResponse,
    ModelInfo,
    Ok,
    Pending,
    Promise,
    Retrieve,
    SamplePromise,
    SamplerInfo,
    SamplerOpened,
    SessionOpened,
    Telemetry,
)

_JSON = {"content-type": "application/json"}
_encode = msgspec.json.Encoder().encode

_OK_BODIES: dict[type, dict[str, Any]] = {
    Heartbeat: {"type": "session_heartbeat"},
    Telemetry: {"status": "accepted"},
    FinishSession: {},
    Cancel: {},
    DeleteCheckpoint: {},
}
_ERROR_TYPES = {
    400: "bad_request",
    401: "unauthenticated",
    402: "paused",
    403: "permission_denied",
    404: "not_found",
    408: "try_again",
    410: "gone",
    413: "too_large",
    415: "unsupported_media_type",
    422: "unprocessable",
    429: "overloaded",
}


def json_response(body: object, status: int = 200) -> HttpResponse:
    """A JSON body."""
    return HttpResponse(status=status, headers=_JSON, body=_encode(body))


def render(command: AnyCommand, answer: AnyAnswer) -> HttpResponse:
    """Raises TypeError when the answer is none for this command."""
    return _RENDERERS[type(answer)](command, answer)


def render_error(error: ApiError) -> HttpResponse:
    """`{"detail": "what. mend", "type", "mend"}`; a 429 also says when to come again."""
    kind = error.kind or _ERROR_TYPES.get(error.status, "error")
    body = _encode({"detail": str(error), "type": kind, "mend": error.mend})
    headers = _JSON | {"retry-after-ms": "1000"} if error.status == 429 else _JSON
    return HttpResponse(status=error.status, headers=headers, body=body)


def _session_opened(command: AnyCommand, answer: SessionOpened) -> HttpResponse:
    body = {"type": "create_session", "session_id": answer.session}
    if answer.info_message is not None:
        body["info_message"] = answer.info_message
    return json_response(body)


def _promise(command: AnyCommand, answer: Promise) -> HttpResponse:
    return json_response({"request_id": answer.request_id, "model_id": answer.model})


def _sample_promise(command: AnyCommand, answer: SamplePromise) -> HttpResponse:
    ids = [f"{answer.request_id}:{index}" for index in range(answer.num_samples)]
    return json_response({"request_id": answer.request_id, "sample_sequence_ids": ids})


def _model_info(command: AnyCommand, answer: ModelInfo) -> HttpResponse:
    """model_name is the folder everywhere: the SDK's clients load the tokenizer from what it says."""
    return json_response(
        {
            "type": "get_info",
            "model_id": answer.model,
            "model_name": answer.model_dir,
            "is_lora": answer.lora_rank is not None,
            "lora_rank": answer.lora_rank,
            "model_data": {"arch": answer.arch, "model_name": answer.model_dir, "tokenizer_id": answer.model_dir},
        }
    )


def _sampler_opened(command: AnyCommand, answer: SamplerOpened) -> HttpResponse:
    return json_response({"type": "create_sampling_session", "sampling_session_id": answer.sampler})


def _sampler_info(command: AnyCommand, answer: SamplerInfo) -> HttpResponse:
    return json_response(
        {"sampler_id": answer.sampler, "base_model": answer.base_model_dir, "model_path": answer.model_path}
    )


def _done(command: AnyCommand, answer: Done) -> HttpResponse:
    return HttpResponse(headers={**answer.headers, "content-type": answer.content_type}, body=answer.body)


def _failed(command: AnyCommand, answer: Failed) -> HttpResponse:
    """200: the SDK raises RequestFailedError with the category; any 4xx here would be a bare ValueError."""
    return json_response({"error": answer.error, "category": answer.category})


def _pending(command: AnyCommand, answer: Pending) -> HttpResponse:
    """408: the SDK asks again at once and in silence; under 200 it would log a warning at every poll."""
    if not isinstance(command, Retrieve | GetDrawn):
        raise TypeError(f"Pending answers no {type(command).__name__}")
    body = {"type": "try_again", "request_id": command.request_id, "queue_state": "active"}
    if answer.reason:
        body |= {"queue_state": "paused_capacity", "queue_state_reason": answer.reason}
    return json_response(body, 408)


def _ok(command: AnyCommand, answer: Ok) -> HttpResponse:
    body = _OK_BODIES.get(type(command))
    if body is None:
        raise TypeError(f"Ok answers no {type(command).__name__}")
    return json_response(body)


def _capabilities(command: AnyCommand, answer: CapabilitiesList) -> HttpResponse:
    listed = [
        {
            "model_name": model.name,
            "max_context_length": model.max_context,
            "trainable": model.trainable,
            "sampleable": model.sampleable,
        }
        for model in answer.models
    ]
    return json_response({"supported_models": listed})


_RENDERERS: dict[type, Callable[[Any, Any], HttpResponse]] = {
    SessionOpened: _session_opened,
    Promise: _promise,
    SamplePromise: _sample_promise,
    ModelInfo: _model_info,
    SamplerOpened: _sampler_opened,
    SamplerInfo: _sampler_info,
    Done: _done,
    Failed: _failed,
    Pending: _pending,
    Ok: _ok,
    CapabilitiesList: _capabilities,
    **own.RENDERERS,
}
