"""Training calls: bodies to Train and LoadModel commands.

A refused call still uses up its seq id on the client's side, so every refusal here whose body names one carries it in
`ApiError.consumed`.
"""

import hashlib
from collections.abc import Callable
from typing import Annotated

import msgspec
from google.protobuf.message import DecodeError
from msgspec import Meta, Struct
from tinker.proto import tinker_public_pb2 as pb
from tinker.types.load_weights_request import LoadWeightsRequest
from tinker.types.save_weights_for_sampler_request import SaveWeightsForSamplerRequest
from tinker.types.save_weights_request import SaveWeightsRequest

from plexrl.engines.losses import check_spans, loss_inputs, sampled_runs, settings
from plexrl.gateway.models import metadata, only_adamw, validate
from plexrl.gateway.names import base_model, checkpoint_name, checkpoint_path, identifier
from plexrl.gateway.refusals import NotBuilt, bad, malformed
from plexrl.types import ApiError, BadInput, CallKind, HttpRequest, LoadModel, Train

MAX_SEQ = 2**31 - 1
MAX_LEARNING_RATE = 1.0
MAX_TTL_SECONDS = 10 * 366 * 86400

_TENSORS = (pb.DTYPE_FLOAT32, pb.DTYPE_INT64)


class _Adam(Struct, forbid_unknown_fields=True):
    """AdamParams of the SDK, with bounds. JSON has no NaN or infinity, so these are finite.

    eps: 0 in float32 (also what rounds to it) makes every weight without a gradient NaN.
    """

    learning_rate: Annotated[float, Meta(ge=0, le=MAX_LEARNING_RATE)] = 1e-4
    beta1: Annotated[float, Meta(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Meta(ge=0, lt=1)] = 0.95
    eps: Annotated[float, Meta(ge=1e-30, le=1)] = 1e-12
    weight_decay: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    grad_clip_norm: Annotated[float, Meta(ge=0)] = 0.0


class _OptimStep(Struct):
    model_id: str
    seq_id: Annotated[int, Meta(ge=1, le=MAX_SEQ)]
    adam_params: _Adam | None = None
    optimizer_params: dict | None = None


class _Key(Struct):
    """What of a refused body is still wanted."""

    model_id: str | None = None
    seq_id: int | None = None


_optim_step = msgspec.json.Decoder(_OptimStep)
_key = msgspec.json.Decoder(_Key)


def telling_consumed(parse: Callable[[HttpRequest], Train | LoadModel]) -> Callable[[HttpRequest], Train | LoadModel]:
    """Puts (model, seq) of a refused JSON body into the refusal, as far as it can be read."""

    def wrapped(request: HttpRequest) -> Train | LoadModel:
        try:
            return parse(request)
        except ApiError as error:
            error.consumed = _consumed(request.body)
            raise

    return wrapped


def _consumed(body: bytes) -> tuple[str, int] | None:
    try:
        key = _key.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return None
    if key.model_id is None or key.seq_id is None or not 1 <= key.seq_id <= MAX_SEQ:
        return None
    return key.model_id, key.seq_id


def forward_backward(request: HttpRequest, max_context: int) -> Train:
    """protobuf ForwardBackwardRequest (forward() is one with forward_only). max_context: of the longest model.

    digest: sha256 of the message in its deterministic encoding, because map fields have no order on the wire.
    """
    headers = request.headers
    if not headers.get("content-type", "").startswith("application/x-protobuf"):
        raise ApiError(415, "forward_backward takes application/x-protobuf", "Use the tinker SDK 0.38")
    if encoding := headers.get("content-encoding"):
        raise ApiError(
            415,
            f"Content-Encoding {encoding!r} is not built in this version of PlexRL",
            "Send the body plain, as the proxy's client/config asks (proto_compress_fwdbwd false)",
        )
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(request.body)
    except DecodeError as error:
        raise bad("The body is no protobuf ForwardBackwardRequest", "Use the tinker SDK 0.38") from error
    try:
        identifier("model_id", message.model_id)
        if not 1 <= message.seq_id <= MAX_SEQ:
            raise bad(f"seq_id {message.seq_id} is out of range", f"Training calls count from 1 to {MAX_SEQ}")
        units = _check_data(message, max_context)
    except ApiError as error:
        if message.model_id and 1 <= message.seq_id <= MAX_SEQ:
            error.consumed = (message.model_id, message.seq_id)
        raise
    return Train(
        model=message.model_id,
        seq=message.seq_id,
        kind=CallKind.FORWARD if message.forward_only else CallKind.FORWARD_BACKWARD,
        body=request.body,
        digest=hashlib.sha256(message.SerializeToString(deterministic=True)).hexdigest(),
        units=units,
        drawn_by=_drawn_by(message),
    )


def _drawn_by(message: pb.ForwardBackwardRequest) -> tuple[str, ...]:
    """Sampling sessions that the sampled tokens of the data came from, by their provenance, each once.

    The pool's sequence ids are `<sampling session>:<seq>:<index>`; what is none of the pool's names no session.
    """
    found = {
        span.sampled_tokens.sequence_id.rpartition(":")[0].rpartition(":")[0]
        for datum in message.data
        for spans in (datum.model_input_spans, datum.loss_fn_input_spans)
        for span in spans
        if span.WhichOneof("span") == "sampled_tokens"
    }
    return tuple(sorted(found))


def _check_data(message: pb.ForwardBackwardRequest, max_context: int) -> int:
    """Checks everything that needs no tensor and no vocabulary; returns the number of input tokens."""
    try:
        settings(message)
        if not message.data:
            raise BadInput("forward_backward was given no data", "Give at least one Datum")
        return sum(_check_datum(index, message, max_context) for index in range(len(message.data)))
    except BadInput as error:
        raise bad(error.what, error.mend) from error


def _check_datum(index: int, message: pb.ForwardBackwardRequest, max_context: int) -> int:
    """The datum's number of input tokens."""
    datum, where = message.data[index], f"Datum {index}"
    size = 0
    for chunk in datum.model_input:
        if chunk.WhichOneof("chunk") != "encoded_text":
            raise NotBuilt(f"Model input other than text (datum {index})", "Give EncodedTextChunks")
        size += len(chunk.encoded_text.tokens)
    if size == 0 or size % 4:
        raise BadInput(f"{where} holds {size} bytes of tokens", "Give at least one token, each an int32")
    if size // 4 > max_context:
        raise BadInput(
            f"{where} has {size // 4} tokens; no model of this pool takes more than {max_context}",
            "Give shorter data, or ask the admin for a larger max_context",
        )
    inputs, asked = datum.loss_fn_inputs, loss_inputs(message.loss_fn)
    wanted = ("target_tokens", *asked.needs)
    for name in wanted:
        if name not in inputs:
            raise BadInput(f"{where} lacks the loss input {name!r}", f"{message.loss_fn} takes {asked.names}")
    for name in inputs:
        if name not in wanted and name not in asked.takes:
            raise BadInput(
                f"{where} has the loss input {name[:80]!r}, which {message.loss_fn} does not use",
                f"It takes {asked.names}",
            )
        if inputs[name].dtype not in _TENSORS:
            raise BadInput(f"Loss input {name!r} of datum {index} is neither float32 nor int64", "Convert it")
    check_spans(where, datum, size // 4)
    if asked.spans:
        sampled_runs(where, datum)
    return size // 4


@telling_consumed
def optim_step(request: HttpRequest) -> Train:
    """JSON `{model_id, seq_id, adam_params}`."""
    try:
        step = _optim_step.decode(request.body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise malformed(error) from error
    if step.optimizer_params is not None:
        raise NotBuilt("Every optimizer but AdamW", "Give tinker.AdamParams")
    if step.adam_params is None:
        raise bad("optim_step was given no adam_params", "Give tinker.AdamParams")
    return Train(
        model=identifier("model_id", step.model_id),
        seq=step.seq_id,
        kind=CallKind.OPTIM_STEP,
        body=request.body,
        digest=hashlib.sha256(msgspec.json.encode(step.adam_params)).hexdigest(),
    )


@telling_consumed
def save_weights(request: HttpRequest) -> Train:
    """save_state: weights and optimizer under a name; without one, `seq-<seq_id>`."""
    asked = validate(SaveWeightsRequest, request)
    seq = _seq(asked.seq_id)
    return Train(
        model=identifier("model_id", asked.model_id),
        seq=seq,
        kind=CallKind.SAVE_STATE,
        body=request.body,
        name=f"seq-{seq}" if asked.path is None else checkpoint_name(asked.path),
        optimizer=True,
        ttl_seconds=_ttl(asked.ttl_seconds),
        overwrite=asked.overwrite,
    )


@telling_consumed
def save_weights_for_sampler(request: HttpRequest) -> Train:
    """publish: by name or straight into a sampling session, whose number the SDK renews on a retry (so: no digest)."""
    asked = validate(SaveWeightsForSamplerRequest, request)
    seq = _seq(asked.seq_id)
    if asked.kind != "snapshot":
        raise NotBuilt("The in-flight sampling client", "Use save_weights_and_get_sampling_client, kind 'snapshot'")
    if (asked.path is None) == (asked.sampling_session_seq_id is None):
        raise bad("Give either path or sampling_session_seq_id, not both and not neither", "Use the tinker SDK 0.38")
    if asked.sampling_session_seq_id is not None and not 0 <= asked.sampling_session_seq_id <= MAX_SEQ:
        raise bad(f"sampling_session_seq_id {asked.sampling_session_seq_id} is out of range", "Count from 0")
    return Train(
        model=identifier("model_id", asked.model_id),
        seq=seq,
        kind=CallKind.PUBLISH,
        body=request.body,
        name=None if asked.path is None else checkpoint_name(asked.path),
        sampler_seq=asked.sampling_session_seq_id,
        ttl_seconds=_ttl(asked.ttl_seconds),
    )


@telling_consumed
def load_weights(request: HttpRequest) -> Train | LoadModel:
    """Into an existing model (model_id, seq_id), or as a new one (session_id, model_seq_id)."""
    asked = validate(LoadWeightsRequest, request)
    if checkpoint_path(asked.path).kind != "weights":
        raise bad(
            f"{asked.path[:256]!r} is a sampler's version and holds no training state", "Load what save_state returned"
        )
    if asked.weights_access_token is not None:
        raise NotBuilt("Loading another user's checkpoint by a token", "Load a checkpoint of your own")
    only_adamw(asked.optimizer_config)
    if asked.model_id is not None and asked.session_id is None:
        return Train(
            model=identifier("model_id", asked.model_id),
            seq=_seq(asked.seq_id),
            kind=CallKind.LOAD_STATE,
            body=request.body,
            path=asked.path,
            optimizer=asked.optimizer,
        )
    if asked.session_id is None or asked.model_id is not None or asked.model_seq_id is None:
        raise bad("Give model_id and seq_id, or session_id and model_seq_id", "Use the tinker SDK 0.38")
    if not 0 <= asked.model_seq_id <= MAX_SEQ:
        raise bad(f"model_seq_id {asked.model_seq_id} is out of range", "Count from 0")
    return LoadModel(
        session=identifier("session_id", asked.session_id),
        model_seq=asked.model_seq_id,
        path=asked.path,
        optimizer=asked.optimizer,
        base_model=None if asked.base_model is None else base_model(asked.base_model),
        user_metadata=metadata(asked.user_metadata),
    )


def _seq(seq: int | None) -> int:
    if seq is None or not 1 <= seq <= MAX_SEQ:
        raise bad(f"seq_id {seq} is out of range", f"Training calls count from 1 to {MAX_SEQ}")
    return seq


def _ttl(seconds: int | None) -> int | None:
    if seconds is not None and not 1 <= seconds <= MAX_TTL_SECONDS:
        raise bad(f"ttl_seconds {seconds} is out of range", "Give 1 second to 10 years, or leave it out")
    return seconds
