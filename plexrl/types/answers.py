"""What the head answers to the commands of plexrl.types.commands."""

from typing import Literal

from msgspec import Struct, field


class SessionOpened(Struct, frozen=True, kw_only=True):
    """A session's id. The message is shown to the user by the SDK's log."""

    session: str
    info_message: str | None = None


class Promise(Struct, frozen=True, kw_only=True):
    """The future of a model's call."""

    request_id: str
    model: str


class SamplePromise(Struct, frozen=True, kw_only=True):
    """The future of a sample call."""

    request_id: str
    num_samples: int


class ModelInfo(Struct, frozen=True, kw_only=True):
    """model_dir: the declared folder (the client loads its tokenizer there). lora_rank None: full parameters."""

    model: str
    base_model: str
    model_dir: str
    lora_rank: int | None
    arch: str


class SamplerOpened(Struct, frozen=True, kw_only=True):
    """A sampling session, pinned to model_path (None: the base model)."""

    sampler: str
    base_model_dir: str
    model_path: str | None = None


class SamplerInfo(Struct, frozen=True, kw_only=True):
    """The same, asked for later."""

    sampler: str
    base_model_dir: str
    model_path: str | None = None


class SoFar(Struct, frozen=True, kw_only=True):
    """body: the SampleResponse with what was drawn until now; ended: it is the whole of it."""

    version: str
    ended: bool
    body: bytes


class Done(Struct, frozen=True, kw_only=True):
    """A future's result in the form in which the client gets it."""

    content_type: str
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)


class Failed(Struct, frozen=True, kw_only=True):
    """A future that ended in an error. category `user`: the input's fault; `server`: ours."""

    error: str
    category: Literal["user", "server"]


class Pending(Struct, frozen=True, kw_only=True):
    """Not ready; the poll was held. reason: shown by the SDK when it is not empty (a pause on purpose)."""

    reason: str = ""


class Ok(Struct, frozen=True, kw_only=True):
    """Accepted; nothing to say."""


class Capability(Struct, frozen=True, kw_only=True):
    """A base model by its name in plexrl.yaml. max_context: tokens."""

    name: str
    max_context: int
    trainable: bool = True
    sampleable: bool = True


class CapabilitiesList(Struct, frozen=True, kw_only=True):
    """The base models that a peer may use."""

    models: tuple[Capability, ...]


class Version(Struct, frozen=True, kw_only=True):
    """A published version that can be sampled from. created_us: Unix microseconds.

    number: the how manieth of its model, from 1. behind: how many were published since. bytes: of its weights.
    kept: `memory`, `nvme` or `disk`, from where it is read back when it is used. ephemeral: without a name.
    """

    path: str
    base: str
    created_us: int
    model: str
    number: int
    behind: int
    bytes: int
    kept: Literal["memory", "nvme", "disk"]
    ephemeral: bool


class ModelsList(Struct, frozen=True, kw_only=True):
    """Base models of the peer's account, and the versions of its user that can be read, oldest first.

    max_staleness: of the peer's job.
    """

    bases: tuple[Capability, ...]
    versions: tuple[Version, ...]
    max_staleness: int | None = None


class Explained(Struct, frozen=True, kw_only=True):
    """One or two sentences for people."""

    job: str
    text: str


class GpuSeen(Struct, frozen=True, kw_only=True):
    """A GPU: the gang that has its turn there ("": none), in which phase, and whether it works for the peer's user."""

    gpu: str
    turn: str
    phase: str
    yours: bool


class JobSeen(Struct, frozen=True, kw_only=True):
    """A job of the peer's user. open_calls: accepted and not ended. explained: why it waits.

    versions: by model, the newest that was published of it.
    """

    job: str
    user: str
    open_calls: int
    models: tuple[str, ...]
    explained: str
    versions: dict[str, str] = field(default_factory=dict)
    max_staleness: int | None = None


class Seen(Struct, frozen=True, kw_only=True):
    """open_calls, jobs_attached: of everybody; jobs: of the peer's user."""

    gpus: tuple[GpuSeen, ...]
    open_calls: int
    jobs_attached: int
    jobs: tuple[JobSeen, ...]


class Checkpoint(Struct, frozen=True, kw_only=True):
    """A saved state (kind `weights`) or a published version on disk (`sampler_weights`). saved: unix seconds."""

    path: str
    kind: str
    base: str
    lora_rank: int | None
    bytes: int
    saved: int


class CheckpointsList(Struct, frozen=True, kw_only=True):
    """Newest first."""

    checkpoints: tuple[Checkpoint, ...]


AnyAnswer = (
    SessionOpened
    | Promise
    | SamplePromise
    | ModelInfo
    | SamplerOpened
    | SamplerInfo
    | SoFar
    | ModelsList
    | Done
    | Failed
    | Pending
    | Ok
    | CapabilitiesList
    | Explained
    | Seen
    | CheckpointsList
)
