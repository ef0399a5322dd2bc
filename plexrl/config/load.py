"""Reading plexrl.yaml: every error names file, line, key and the mend."""

import difflib
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from plexrl.config import engines
from plexrl.config.engines import Problem, resolved
from plexrl.config.policies import contradictions
from plexrl.config.schema import Model, PoolConfig, valid_model_name
from plexrl.config.source import Location, Source, spell
from plexrl.types import BadInput

Check = Callable[[PoolConfig], list[Problem]]


def load(path: str | os.PathLike[str], *checks: Check) -> PoolConfig:
    """The configuration in `path` as a pool takes it: `read`, then the engine of every role written out."""
    return resolved(read(path, *checks))


def read(path: str | os.PathLike[str], *checks: Check) -> PoolConfig:
    """The configuration in `path` as it is written.

    checks: of other rooms, made where nothing else is wrong; they see it resolved.
    Raises BadInput; where several keys are wrong, all of them are named.
    """
    source = Source(Path(path))
    try:
        config = PoolConfig.model_validate(source.data)
    except ValidationError as error:
        problems = [_explain(item) for item in error.errors(include_url=False)]
    else:
        problems = _check(config) + engines.problems(config)
        problems = problems or [problem for check in checks for problem in check(resolved(config))]
        if not problems:
            return config
    problems.sort(key=lambda problem: source.line(problem[0]))
    told = [(f"{source.path}:{source.line(where)}: {spell(where)}: {what}", mend) for where, what, mend in problems]
    *before, (what, mend) = told
    raise BadInput("\n".join([*(f"{w}. {m}" for w, m in before), what]), mend)


def _explain(error: Any) -> Problem:
    """One pydantic error in the file's own words."""
    where: Location = tuple(part for part in error["loc"] if part != "[key]")
    context = error.get("ctx", {})
    match error["type"]:
        case "extra_forbidden":
            keys = _keys(where[:-1])
            near = difflib.get_close_matches(str(where[-1]), keys, n=1)
            hint = f"Did you mean `{near[0]}`? " if near else ""
            return where, "unknown key", f"{hint}Keys here: {', '.join(keys)}"
        case "missing":
            return where, "this key is required", f"Add `{where[-1]}: ...`"
        case "literal_error":
            return where, "not a known value", f"Write {context['expected']}"
        case "value_error":
            return where, str(context["error"]), "Correct the value"
        case "greater_than":
            return where, "too small", f"Write a number above {context['gt']}"
        case "greater_than_equal":
            return where, "too small", f"Write a number of {context['ge']} or more"
        case "less_than_equal":
            return where, "too large", f"Write a number of {context['le']} or less"
        case "int_type" | "int_from_float":
            return where, "not a whole number", "Write digits without quotes"
        case "float_type" | "finite_number":
            return where, "not a number", "Write digits without quotes"
        case "bool_type":
            return where, "neither true nor false", "Write true or false, without quotes"
        case "string_type":
            return where, "not a text", "Write a text; quote it where it looks like a number"
        case "tuple_type":
            return where, "not a list", "Write a list such as [a, b]"
        case "dict_type" | "model_type" | "model_attributes_type":
            return where, "not a section", "Indent its keys below it, or write {key: value}"
        case "too_short":
            return where, "empty", "Give at least one entry"
        case _:
            return where, error["msg"], "Correct the value"


def _keys(section: Location) -> list[str]:
    """The keys that the schema knows in a section."""
    model: type[BaseModel] = PoolConfig
    named = False
    for part in section:
        if named:  # a name that the file chooses, such as a model's or an account's
            named = False
            continue
        inner = _field(model, str(part))
        named = get_origin(inner) is dict
        model = get_args(inner)[1] if named else next((t for t in get_args(inner) if t is not NoneType), inner)
    return [field.alias or name for name, field in model.model_fields.items()]


def _field(model: type[BaseModel], key: str) -> Any:
    """The type of a key: a section, or a table of sections by names."""
    return next(field.annotation for name, field in model.model_fields.items() if key == (field.alias or name))


def _check(config: PoolConfig) -> list[Problem]:
    """What only the file system, or two keys together, can tell."""
    problems: list[Problem] = []
    if os.path.exists(config.state_dir) and not os.path.isdir(config.state_dir):
        problems.append((("state_dir",), f"{config.state_dir} is not a directory", "Name a directory of the pool"))
    if config.nvme is not None and Path(config.nvme.path).is_relative_to(config.state_dir):
        mend = "Name a directory on each node's own disk; state_dir is on a file system that all nodes see"
        problems.append((("nvme", "path"), f"{config.nvme.path} lies in state_dir", mend))
    if config.shares_from == "slurm" and config.shares:
        problems.append((("shares",), "Slurm's shares are read, and these are too", "Keep one: shares_from, or shares"))
    problems += contradictions(config.policies)
    for name, model in config.models.items():
        here: Location = ("models", name)
        if not valid_model_name(name):
            problems.append((here, "not a name for a model", "Use letters, digits, `.`, `_`, `-` and at most one `/`"))
        if model.sample.kv_bytes > config.device.bytes:
            mend = f"Lower it below device.bytes, {config.device.bytes}"
            problems.append(((*here, "sample", "kv_bytes"), f"{model.sample.kv_bytes} bytes exceed a device", mend))
        problems += [((*here, key), what, mend) for key, what, mend in _folder(model)]
    return problems


def _folder(model: Model) -> list[tuple[str, str, str]]:
    """What is wrong with a model's folder: (key, what, mend)."""
    if not os.path.isdir(model.path):
        mend = "Give a folder that exists; `plexrl model smollm2 DIR` makes one"
        return [("path", f"{model.path} is no folder that this user can see", mend)]
    if model.engine == "noop":
        return []
    try:
        names = os.listdir(model.path)
    except OSError as error:
        return [("path", f"{model.path} cannot be read: {error.strerror}", "Make it readable (0755)")]
    missing = [name for name in ("config.json", "tokenizer_config.json") if name not in names]
    if not any(name.endswith(".safetensors") for name in names):
        missing.append("*.safetensors")
    if missing:
        mend = "Save the model with save_pretrained, safetensors and tokenizer included"
        return [("path", f"{model.path} lacks {', '.join(missing)}", mend)]
    try:
        described = json.loads(Path(model.path, "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return [("path", f"{model.path}/config.json cannot be read: {error}", "Copy the model's folder again")]
    longest = described.get("max_position_embeddings") if isinstance(described, dict) else None
    if isinstance(longest, int) and model.max_context > longest:
        mend = f"Write at most {longest}"
        return [("max_context", f"{model.max_context} tokens, but the model was made for {longest}", mend)]
    return []
