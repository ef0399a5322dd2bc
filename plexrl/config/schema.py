"""The typed schema of plexrl.yaml. Attributes are named as the keys; durations end in `_us` and are microseconds."""

import os
import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, Strict, model_validator

from plexrl.config.quantities import Bytes, Microseconds

Count = Annotated[int, Strict(), Field(gt=0)]
Flag = Annotated[bool, Strict()]

_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")
_INTERFACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]*")
_USER = re.compile(r"[A-Za-z_][A-Za-z0-9._-]*")


def _absolute(value: str) -> str:
    if not os.path.isabs(value):
        raise ValueError(f"{value!r} is not an absolute path")
    return os.path.normpath(value)


def _accounts(value: object) -> object:
    return ["*"] if value == "*" else value


def _interface(value: str) -> str:
    if not _INTERFACE.fullmatch(value):
        raise ValueError(f"{value!r} is neither an address nor a host name")
    return value


def _user(value: object) -> object:
    """A uid or a user name."""
    is_uid = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    if not is_uid and not (isinstance(value, str) and _USER.fullmatch(value)):
        raise ValueError(f"{value!r} is neither a uid nor a user name")
    return value


AbsolutePath = Annotated[str, AfterValidator(_absolute)]


class Section(BaseModel):
    """Base of all sections: unknown keys are refused, values do not change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


class Train(Section):
    """The trainer of a model. gpus: size of its gang."""

    gpus: Count = 1


class Sample(Section):
    """The samplers of a model: replicas of one GPU. kv_bytes: KV cache per replica. max_batch: sequences at once."""

    replicas: Count = 1
    kv_bytes: Bytes = 128 * 2**20
    max_batch: Count = 48


class Lora(Section):
    """What LoRA deployments may ask for. slots: adapters of the largest rank that fit on the device at once."""

    max_rank: Count = 32
    slots: Count = 2


class Model(Section):
    """A base model that users ask for by its name.

    path: folder with config.json, safetensors and tokenizer, readable by the service account and by users (the SDK
    loads the tokenizer from there). engine noop executes nothing: it measures the path and needs no model files.
    max_context: tokens of prompt and answer together. micro_batch_tokens: tokens of one forward and backward.
    """

    path: AbsolutePath
    accounts: Annotated[tuple[str, ...], BeforeValidator(_accounts), Field(min_length=1)] = ("*",)
    engine: Literal["torch", "noop"] = "torch"
    dtype: Literal["float32", "bfloat16"] = "float32"
    max_context: Count = 512
    micro_batch_tokens: Count = 2048
    train: Train = Train()
    sample: Sample = Sample()
    lora: Lora = Lora()

    def allows(self, account: str) -> bool:
        """Whether jobs of this Slurm account may use the model."""
        return "*" in self.accounts or account in self.accounts


class Device(Section):
    """The pool's GPUs. bytes: memory of each. cores (kind cpu): node name -> core of each GPU index."""

    kind: Literal["cpu"] = "cpu"
    bytes: Bytes = 3 * 2**30
    cores: dict[str, tuple[Annotated[int, Strict(), Field(ge=0)], ...]] = {}

    @model_validator(mode="after")
    def _one_core_each(self) -> Self:
        for node, cores in self.cores.items():
            if len(set(cores)) != len(cores):
                raise ValueError(f"node {node!r} gives one core to two GPUs; every GPU of a node needs its own core")
        return self

    def core(self, node: str, index: int) -> int:
        """The core that GPU `index` of `node` is pinned to; its own index unless `cores` says otherwise."""
        cores = self.cores.get(node)
        return cores[index] if cores and index < len(cores) else index


class Host(Section):
    """Host memory. bytes: the arena of each node, which holds the state that is not on a GPU."""

    bytes: Bytes = 6 * 2**30


class SchedulerPolicy(Section):
    """How the GPUs are shared. min_turn_factor: a turn lasts at least so many times its switch's cost."""

    placement: Literal["pack", "isolated"] = "pack"
    order: Literal["fifo"] = "fifo"
    anticipation_us: Microseconds = Field(default=50_000, alias="anticipation")
    gradient_anticipation_us: Microseconds = Field(default=1_000_000, alias="gradient_anticipation")
    quantum_us: Annotated[Microseconds, Field(gt=0)] = Field(default=20_000_000, alias="quantum")
    min_turn_factor: Annotated[float, Strict(), Field(ge=0, allow_inf_nan=False)] = 3.0
    paranoid: Flag = False


class Limits(Section):
    """What one job may ask of the pool."""

    models_per_job: Count = 4
    pending_calls: Count = 4096
    body_bytes: Bytes = 64 * 2**20
    versions_per_model: Count = 2
    sequence_gap_us: Annotated[Microseconds, Field(gt=0)] = Field(default=330_000_000, alias="sequence_gap")
    session_timeout_us: Annotated[Microseconds, Field(gt=0)] = Field(default=120_000_000, alias="session_timeout")


class PoolConfig(Section):
    """One pool, as plexrl.yaml describes it.

    state_dir: the pool's own directory (journal, checkpoints, keys), of the service account, mode 0700.
    service_user: the account that a site pool runs as. interface: the address that head and gloo bind.
    """

    state_dir: AbsolutePath
    models: Annotated[dict[str, Model], Field(min_length=1)]
    device: Device = Device()
    host: Host = Host()
    scheduler: SchedulerPolicy = SchedulerPolicy()
    limits: Limits = Limits()
    service_user: Annotated[str, AfterValidator(_user)] = "plexrl"
    munge_socket: AbsolutePath | None = None
    interface: Annotated[str, AfterValidator(_interface)] = "127.0.0.1"

    @property
    def state(self) -> Path:
        """state_dir as a path."""
        return Path(self.state_dir)


def valid_model_name(name: str) -> bool:
    """Whether a model may be called so: like `smollm2-135m` or `HuggingFaceTB/SmolLM2-135M`."""
    return _MODEL_NAME.fullmatch(name) is not None and len(name) <= 96 and ".." not in name
