"""The typed schema of plexrl.yaml. Attributes are named as the keys; durations end in `_us` and are microseconds."""

import os
import re
from math import inf
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, Strict, model_validator

from plexrl.config.policies import Budgets, Policies
from plexrl.config.quantities import Bytes, Microseconds
from plexrl.config.section import Count, Flag, Part, Section
from plexrl.types import Role

Stretch = Annotated[float, Strict(), Field(ge=1)]

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


class Train(Section):
    """The trainer of a model. gpus: size of its gang. engine: the model's, where none is written.

    zero_stage: what DeepSpeed's ranks share out between them. 1: optimizer state; 2: gradients too; 3: parameters too.
    """

    gpus: Count = 1
    engine: Literal["torch", "deepspeed"] | None = None
    zero_stage: Annotated[int, Strict(), Field(ge=0, le=3)] | None = None


class Sample(Section):
    """The samplers of a model: replicas of one GPU. engine: the model's, where none is written.

    kv_bytes: KV cache per replica. max_batch: sequences at once.
    """

    replicas: Count = 1
    engine: Literal["torch", "vllm"] | None = None
    kv_bytes: Bytes = 128 * 2**20
    max_batch: Count = 48


class Lora(Section):
    """What LoRA deployments may ask for. slots: adapters of the largest rank that fit on the device at once."""

    max_rank: Count = 32
    slots: Count = 2


class Model(Section):
    """A base model that users ask for by its name.

    path: folder with config.json, safetensors and tokenizer, readable by the service account and by users (the SDK
    loads the tokenizer from there). engine: who executes the calls of a role that names none itself (config.engines);
    noop executes nothing: it measures the path and needs no model files.
    max_context: tokens of prompt and answer together. micro_batch_tokens: tokens of one forward and backward.
    """

    path: AbsolutePath
    accounts: Annotated[tuple[str, ...], BeforeValidator(_accounts), Field(min_length=1)] = ("*",)
    engine: Literal["auto", "torch", "noop"] = "auto"
    dtype: Literal["float32", "bfloat16"] = "float32"
    max_context: Count = 512
    micro_batch_tokens: Count = 2048
    train: Train = Train()
    sample: Sample = Sample()
    lora: Lora = Lora()

    def allows(self, account: str) -> bool:
        """Whether jobs of this Slurm account may use the model."""
        return "*" in self.accounts or account in self.accounts

    def engine_of(self, role: Role) -> str:
        """Who executes the calls of a role, in a configuration that was loaded."""
        asked = self.train.engine if role is Role.TRAIN else self.sample.engine
        return asked or ("torch" if self.engine == "auto" else self.engine)


class Device(Section):
    """The pool's GPUs. bytes: memory of each. cores: node name -> core of each GPU index, on which its ranks run.

    kind cpu: a pretend GPU is one core and a piece of host memory. cuda: NVIDIA GPUs; then bytes leaves room for what
    is in no extent (docs/switching.md), and ranks use all cores unless `cores` gives one.
    roles: node name -> what may be placed on each GPU index; GPUs that are not named take everything.
    """

    kind: Literal["cpu", "cuda"] = "cpu"
    bytes: Bytes = 3 * 2**30
    cores: dict[str, tuple[Annotated[int, Strict(), Field(ge=0)], ...]] = {}
    roles: dict[str, tuple[Literal["train", "sample", "any"], ...]] = {}

    @model_validator(mode="after")
    def _one_core_each(self) -> Self:
        for node, cores in self.cores.items():
            if len(set(cores)) != len(cores):
                raise ValueError(f"node {node!r} gives one core to two GPUs; every GPU of a node needs its own core")
        return self

    def core(self, node: str, index: int) -> int | None:
        """The core of GPU `index` of `node`: what `cores` says; else the index of a pretend GPU, None of a real one."""
        cores = self.cores.get(node)
        if cores and index < len(cores):
            return cores[index]
        return index if self.kind == "cpu" else None


class Host(Section):
    """Host memory. bytes: the arena of each node, which holds the state that is not on a GPU."""

    bytes: Bytes = 6 * 2**30


class Nvme(Section):
    """Where state goes that host memory has no room for. path: a directory on each node's own disk. bytes: at most."""

    path: AbsolutePath
    bytes: Bytes


class MaxStretch(Section):
    """By class, the predicted slowdown beyond which nobody else is placed beside a job; `.inf` is no bound."""

    interactive: Stretch = 2.0
    normal: Stretch = 4.0
    scavenger: Stretch = inf


class SchedulerPolicy(Section):
    """How the GPUs are shared; docs/scheduler.md explains each.

    min_turn_factor: a turn lasts at least so many times its switch's cost. starvation: after so long a wait nobody who
    came later goes first. half_life: of past use, for fair-share. interactive_switches_per_hour: turns of others that
    interactive jobs may break off. gather_share: done share of a rollout after which its rest moves together; 1: never.
    """

    placement: Literal["isolated", "pack", "spread", "spread_backfill", "fit"] = "pack"
    order: Literal["fifo", "round_robin", "hrrs", "fair"] = "hrrs"
    anticipation_us: Microseconds = Field(default=50_000, alias="anticipation")
    gradient_anticipation_us: Microseconds = Field(default=1_000_000, alias="gradient_anticipation")
    quantum_us: Annotated[Microseconds, Field(gt=0)] = Field(default=20_000_000, alias="quantum")
    sample_quantum_us: Annotated[Microseconds, Field(gt=0)] = Field(default=120_000_000, alias="sample_quantum")
    min_turn_factor: Annotated[float, Strict(), Field(ge=0, allow_inf_nan=False)] = 3.0
    starvation_us: Annotated[Microseconds, Field(gt=0)] = Field(default=300_000_000, alias="starvation")
    admission_patience_us: Annotated[Microseconds, Field(gt=0)] = Field(default=300_000_000, alias="admission_patience")
    half_life_us: Annotated[Microseconds, Field(gt=0)] = Field(default=7 * 86_400_000_000, alias="half_life")
    max_stretch: MaxStretch = MaxStretch()
    interactive_switches_per_hour: Annotated[int, Strict(), Field(ge=0)] = 60
    gather_share: Annotated[float, Strict(), Field(gt=0, le=1)] = 0.8
    backfill: Flag = True
    prefetch: Flag = True
    paranoid: Flag = False


class Share(Section):
    """An account's part of the pool, and its users' parts of that. Who is not named has 1."""

    shares: Part = 1.0
    users: dict[str, Part] = {}


class Standing(Section):
    """How the jobs of an account rank. deadline: the longest that a call should wait before it begins."""

    kind: Literal["interactive", "normal", "scavenger"] = Field(default="normal", alias="class")
    priority: Annotated[int, Strict()] = 0
    deadline_us: Annotated[Microseconds, Field(gt=0)] | None = Field(default=None, alias="deadline")


class Limits(Section):
    """What one job may ask of the pool."""

    models_per_job: Count = 4
    pending_calls: Count = 4096
    body_bytes: Bytes = 64 * 2**20
    versions_per_model: Count = 2
    versions_on_nvme: Count = 8
    sequence_gap_us: Annotated[Microseconds, Field(gt=0)] = Field(default=330_000_000, alias="sequence_gap")
    session_timeout_us: Annotated[Microseconds, Field(gt=0)] = Field(default=120_000_000, alias="session_timeout")


class PoolConfig(Section):
    """One pool, as plexrl.yaml describes it.

    state_dir: the pool's own directory (journal, checkpoints, keys), of the service account, mode 0700.
    cache_dir: what engines compile for the nodes' processors; default: `cache` in state_dir.
    service_user: the account that a site pool runs as. interface: the address that head and gloo bind.
    shares, tenants: by Slurm account; who is not named has the defaults. shares_from: whose shares hold, this file's or
    those of Slurm's associations. slurm_backend: how the head asks Slurm.
    """

    state_dir: AbsolutePath
    models: Annotated[dict[str, Model], Field(min_length=1)]
    device: Device = Device()
    host: Host = Host()
    nvme: Nvme | None = None
    scheduler: SchedulerPolicy = SchedulerPolicy()
    limits: Limits = Limits()
    shares_from: Literal["file", "slurm"] = "file"
    shares: dict[str, Share] = {}
    tenants: dict[str, Standing] = {}
    policies: Policies = Policies()
    budgets: Budgets = Budgets()
    slurm_backend: Literal["commands", "pyslurm"] = "commands"
    service_user: Annotated[str, AfterValidator(_user)] = "plexrl"
    munge_socket: AbsolutePath | None = None
    cache_dir: AbsolutePath | None = None
    interface: Annotated[str, AfterValidator(_interface)] = "127.0.0.1"

    @property
    def state(self) -> Path:
        """state_dir as a path."""
        return Path(self.state_dir)

    @property
    def cache(self) -> str:
        """Where engines keep what they compiled."""
        return self.cache_dir or str(self.state / "cache")


def valid_model_name(name: str) -> bool:
    """Whether a model may be called so: like `smollm2-135m` or `HuggingFaceTB/SmolLM2-135M`."""
    return _MODEL_NAME.fullmatch(name) is not None and len(name) <= 96 and ".." not in name
