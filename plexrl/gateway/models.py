"""Sessions and models: the rare routes, through the SDK's own request types."""

from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import msgspec
import pydantic
from tinker.types.create_model_request import CreateModelRequest
from tinker.types.create_session_request import CreateSessionRequest
from tinker.types.get_info_request import GetInfoRequest
from tinker.types.optimizer import AdamOptimizerConfig, OptimizerConfigBase
from tinker.types.session_heartbeat_request import SessionHeartbeatRequest
from tinker.types.unload_model_request import UnloadModelRequest

from plexrl.config import PoolConfig
from plexrl.gateway.names import base_model, identifier
from plexrl.gateway.refusals import NotBuilt, bad, malformed
from plexrl.types import (
    Cancel,
    CreateModel,
    FinishSession,
    GetInfo,
    Heartbeat,
    HttpRequest,
    OpenSession,
    Telemetry,
    UnloadModel,
)

MAX_SEED = 2**63 - 1

Asked = TypeVar("Asked", bound=pydantic.BaseModel)


def validate(kind: type[Asked], request: HttpRequest) -> Asked:
    """A body as one of the SDK's request types. Raises ApiError 400."""
    try:
        return kind.model_validate_json(request.body)
    except pydantic.ValidationError as error:
        raise malformed(error) from error


def metadata(given: Mapping[str, Any] | None) -> dict[str, str]:
    """User metadata with its values as text."""
    return {
        key: value if isinstance(value, str) else msgspec.json.encode(value).decode()
        for key, value in (given or {}).items()
    }


def only_adamw(optimizer: OptimizerConfigBase | None) -> None:
    """Raises NotBuilt for any other optimizer."""
    if optimizer is not None and not isinstance(optimizer, AdamOptimizerConfig):
        raise NotBuilt(f"The optimizer {optimizer.type!r}", "Use AdamW, the SDK's default")


def open_session(request: HttpRequest) -> OpenSession:
    """create_session: known by the X-Idempotency-Key header, the only thing that a retry repeats."""
    asked = validate(CreateSessionRequest, request)
    key = request.headers.get("x-idempotency-key", "")
    if not key:
        raise bad("create_session without the header X-Idempotency-Key cannot be told from its retry", "Send one")
    return OpenSession(
        idempotency_key=identifier("X-Idempotency-Key", key),
        tags=tuple(asked.tags),
        user_metadata=metadata(asked.user_metadata),
        sdk_version=asked.sdk_version,
    )


def heartbeat(request: HttpRequest) -> Heartbeat:
    """session_heartbeat."""
    return Heartbeat(session=identifier("session_id", validate(SessionHeartbeatRequest, request).session_id))


class _Reason(pydantic.BaseModel):
    type: Literal["success", "errored", "interrupted"]


class _Finish(pydantic.BaseModel):
    reason: _Reason


def finish_session(request: HttpRequest, session: str) -> FinishSession:
    """sessions/{session}/finish, sent by ServiceClient.close()."""
    return FinishSession(session=identifier("session_id", session), reason=validate(_Finish, request).reason.type)


def create_model(request: HttpRequest, config: PoolConfig) -> CreateModel:
    """Rank 0 and `lora_config: null` both mean full parameters."""
    asked = validate(CreateModelRequest, request)
    only_adamw(asked.optimizer_config)
    if asked.model_seq_id < 0:
        raise bad(f"model_seq_id {asked.model_seq_id} is out of range", "Count from 0")
    name = base_model(asked.base_model)
    lora = asked.lora_config
    command = CreateModel(
        session=identifier("session_id", asked.session_id),
        model_seq=asked.model_seq_id,
        base_model=name,
        user_metadata=metadata(asked.user_metadata),
    )
    if lora is None:
        return command
    if lora.seed is not None and not 0 <= lora.seed <= MAX_SEED:
        raise bad(f"The LoRA seed {lora.seed} is out of range", f"Give 0 to {MAX_SEED}")
    trained = (lora.train_attn, lora.train_mlp, lora.train_unembed)
    if lora.rank == 0:
        if not all(trained):
            raise NotBuilt("Training a part of the full parameters", "Give rank 0 without train_attn, train_mlp ...")
        return msgspec.structs.replace(command, lora_seed=lora.seed)
    top = max(model.lora.max_rank for model in config.models.values())
    if name in config.models:
        top = config.models[name].lora.max_rank
    if not 1 <= lora.rank <= top:
        raise bad(f"LoRA rank {lora.rank} is out of range", f"Give 1 to {top}, or 0 for full parameters")
    if not any(trained):
        raise bad("A LoRA on nothing cannot be trained", "Set train_attn, train_mlp or train_unembed")
    return msgspec.structs.replace(
        command,
        lora_rank=lora.rank,
        lora_seed=lora.seed,
        train_attn=lora.train_attn,
        train_mlp=lora.train_mlp,
        train_unembed=lora.train_unembed,
    )


def get_info(request: HttpRequest) -> GetInfo:
    """get_info."""
    return GetInfo(model=identifier("model_id", validate(GetInfoRequest, request).model_id))


def unload_model(request: HttpRequest) -> UnloadModel:
    """unload_model."""
    return UnloadModel(model=identifier("model_id", validate(UnloadModelRequest, request).model_id))


class _Cancel(pydantic.BaseModel):
    request_id: str


def cancel(request: HttpRequest) -> Cancel:
    """cancel_future."""
    return Cancel(request_id=identifier("request_id", validate(_Cancel, request).request_id))


def telemetry(request: HttpRequest) -> Telemetry:
    """Kept as received."""
    return Telemetry(body=request.body)
