"""What a gateway asks of the head: the API without its HTTP and JSON. plexrl.types.answers has what it answers.

Every command has a `verb` (also its msgpack tag), by which the head dispatches. Names of models, sampling sessions and
futures are the protocol's: model `<session>:train:<n>`, sampling session as the head chose it, future
`<model>:<seq>` or `<sampling session>:<seq>`.
"""

from typing import ClassVar

from msgspec import Struct, field

from plexrl.types.calls import CallKind


class Command(Struct, frozen=True, kw_only=True, tag_field="verb"):
    """Base of all commands. verb: the class's name in lower case, words joined by `_`."""

    verb: ClassVar[str] = ""


# --- sessions ---------------------------------------------------------------------------------------------------------


class OpenSession(Command, frozen=True, tag="open_session"):
    """Answered by SessionOpened. A repeat with the same idempotency_key is the same session."""

    verb: ClassVar[str] = "open_session"
    idempotency_key: str
    tags: tuple[str, ...] = ()
    user_metadata: dict[str, str] = field(default_factory=dict)
    sdk_version: str = ""


class Heartbeat(Command, frozen=True, tag="heartbeat"):
    """Answered by Ok; ApiError 410 when the session is over (the SDK then stops its heartbeat)."""

    verb: ClassVar[str] = "heartbeat"
    session: str


class FinishSession(Command, frozen=True, tag="finish_session"):
    """Answered by Ok. reason: `success`, `errored` or `interrupted`."""

    verb: ClassVar[str] = "finish_session"
    session: str
    reason: str


# --- models -----------------------------------------------------------------------------------------------------------


class CreateModel(Command, frozen=True, tag="create_model"):
    """Answered by Promise; the future ends as Done with `{"type": "create_model", "model_id": ...}`.

    lora_rank None means full parameters. Repeats are known by (session, model_seq).
    """

    verb: ClassVar[str] = "create_model"
    session: str
    model_seq: int
    base_model: str
    lora_rank: int | None = None
    lora_seed: int | None = None
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    user_metadata: dict[str, str] = field(default_factory=dict)


class LoadModel(Command, frozen=True, tag="load_model"):
    """A new model from a saved state. Answered by Promise; Done is `{"path", "model_id", "type": "load_weights"}`.

    The model's id is composed by the client as `<session>:train:<model_seq>`. optimizer: restore its state too.
    """

    verb: ClassVar[str] = "load_model"
    session: str
    model_seq: int
    path: str
    optimizer: bool
    base_model: str | None = None
    user_metadata: dict[str, str] = field(default_factory=dict)


class GetInfo(Command, frozen=True, tag="get_info"):
    """Answered by ModelInfo at once (no future)."""

    verb: ClassVar[str] = "get_info"
    model: str


class UnloadModel(Command, frozen=True, tag="unload_model"):
    """Answered by Promise; Done is `{"type": "unload_model", "model_id": ...}`."""

    verb: ClassVar[str] = "unload_model"
    model: str


class Train(Command, frozen=True, tag="train"):
    """A training call, in order and once by (model, seq). Answered by Promise.

    body: as received (protobuf for forward and forward_backward, JSON otherwise).
    digest: sha256 of what identifies the data, "" where the SDK renews fields on a retry.
    units: tokens (0 where a call has none). name: of what is saved or published. path: what is loaded.
    optimizer: load_state restores the optimizer too. sampler_seq: publish opens a sampling session.
    drawn_by: sampling sessions that drew the data, as far as its provenance says so.
    Done bodies: forward, forward_backward protobuf ForwardBackwardOutput; optim_step `{"metrics": {..}}`;
    save_state, load_state `{"path": ..}`; publish `{"path": ..}` by name, else `{"sampling_session_id": ..}`.
    """

    verb: ClassVar[str] = "train"
    model: str
    seq: int
    kind: CallKind
    body: bytes
    digest: str = ""
    units: int = 0
    name: str | None = None
    path: str | None = None
    optimizer: bool = False
    sampler_seq: int | None = None
    ttl_seconds: int | None = None
    overwrite: bool = False
    drawn_by: tuple[str, ...] = ()


# --- sampling ---------------------------------------------------------------------------------------------------------


class OpenSampler(Command, frozen=True, tag="open_sampler"):
    """Answered by SamplerOpened. Exactly one of model_path and base_model. Repeats known by (session, sampler_seq)."""

    verb: ClassVar[str] = "open_sampler"
    session: str
    sampler_seq: int
    model_path: str | None = None
    base_model: str | None = None


class GetSampler(Command, frozen=True, tag="get_sampler"):
    """Answered by SamplerInfo."""

    verb: ClassVar[str] = "get_sampler"
    sampler: str


class Sample(Command, frozen=True, tag="sample"):
    """Answered by SamplePromise; Done is a protobuf SampleResponse. Repeats known by (sampler, seq).

    body: JSON as received. units: prompt_tokens plus num_samples * max_tokens (as asked for).
    progress: the client will ask what was drawn while it is drawn (GetDrawn).
    """

    verb: ClassVar[str] = "sample"
    sampler: str
    seq: int
    num_samples: int
    body: bytes
    digest: str = ""
    units: int = 0
    prompt_tokens: int = 0
    progress: bool = False


class GetDrawn(Command, frozen=True, tag="get_drawn"):
    """What a sample call has drawn, as soon as that is more than `have` tokens of all its sequences, or all of it.

    Answered by SoFar, by Failed, or by Pending when the poll has been held long enough.
    """

    verb: ClassVar[str] = "get_drawn"
    request_id: str
    have: int = 0


class ListModels(Command, frozen=True, tag="list_models"):
    """Answered by ModelsList: all that this peer may sample from."""

    verb: ClassVar[str] = "list_models"


# --- futures and the rest ---------------------------------------------------------------------------------------------


class Retrieve(Command, frozen=True, tag="retrieve"):
    """Answered by Done, Failed, or Pending when the poll has been held long enough. proto: what the client accepts."""

    verb: ClassVar[str] = "retrieve"
    request_id: str
    proto: bool = False


class Cancel(Command, frozen=True, tag="cancel"):
    """Answered by Ok, also for what has ended already."""

    verb: ClassVar[str] = "cancel"
    request_id: str


class Telemetry(Command, frozen=True, tag="telemetry"):
    """Client-side diagnostics, JSON as received. Answered by Ok."""

    verb: ClassVar[str] = "telemetry"
    body: bytes


class Capabilities(Command, frozen=True, tag="capabilities"):
    """Answered by CapabilitiesList: what this peer may use."""

    verb: ClassVar[str] = "capabilities"


class Explain(Command, frozen=True, tag="explain"):
    """Why the peer's own job waits and what for. Answered by Explained."""

    verb: ClassVar[str] = "explain"


class Look(Command, frozen=True, tag="look"):
    """What the pool does, as far as that is the peer's to see. Answered by Seen."""

    verb: ClassVar[str] = "look"


class ListCheckpoints(Command, frozen=True, tag="list_checkpoints"):
    """Answered by CheckpointsList: those of the peer's user, of all their jobs."""

    verb: ClassVar[str] = "list_checkpoints"


class DeleteCheckpoint(Command, frozen=True, tag="delete_checkpoint"):
    """Answered by Ok when its files are gone; ApiError 404 when the user has no such path, 400 while it is used."""

    verb: ClassVar[str] = "delete_checkpoint"
    path: str


AnyCommand = (
    OpenSession
    | Heartbeat
    | FinishSession
    | CreateModel
    | LoadModel
    | GetInfo
    | UnloadModel
    | Train
    | OpenSampler
    | GetSampler
    | Sample
    | GetDrawn
    | ListModels
    | Retrieve
    | Cancel
    | Telemetry
    | Capabilities
    | Explain
    | Look
    | ListCheckpoints
    | DeleteCheckpoint
)
