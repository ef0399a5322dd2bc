"""Workloads in files: a Workload in JSON or YAML, field by field; `family: NAME` with that family's parameters; or a
trace that a pool recorded, whose calls come again."""

import json
from pathlib import Path

import msgspec
import yaml
from msgspec import structs

from plexrl.sim import fitted, trace
from plexrl.sim.generate import generate
from plexrl.sim.workload import SamplePlan, TrainPlan, Workload
from plexrl.types import BadInput


def read(path: Path, seed: int | None = None) -> Workload:
    """The workload in a file. seed: in place of the file's. Raises BadInput that names the file and the field."""
    if trace.is_trace(path):
        workload = fitted.workload(trace.read(path))
        return workload if seed is None else structs.replace(workload, seed=seed)
    try:
        text = path.read_text(encoding="utf-8")
        data = json.loads(text) if text.lstrip().startswith("{") else yaml.safe_load(text)
    except OSError as error:
        raise BadInput(f"{path} cannot be read ({error.strerror})", "Name a workload in JSON or YAML") from error
    except (UnicodeDecodeError, ValueError, yaml.YAMLError) as error:
        raise BadInput(f"{path} is neither JSON nor YAML: {error}", "Correct it there") from error
    if isinstance(data, dict) and "family" in data:
        given = {key: value for key, value in data.items() if key not in ("family", "seed")}
        try:
            return generate(str(data["family"]), int(data.get("seed", 0)) if seed is None else seed, **given)
        except (BadInput, TypeError, ValueError) as error:
            raise BadInput(f"{path}: {error}") from error
    try:
        workload = msgspec.convert(data, Workload)
    except msgspec.ValidationError as error:
        raise BadInput(f"{path}: {error}", "The fields are described in docs/workloads.md") from error
    check(workload, str(path))
    return workload if seed is None else structs.replace(workload, seed=seed)


def write(workload: Workload, path: Path) -> None:
    """As JSON, which `read` takes. Raises BadInput where the file cannot be written."""
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(workload), indent=1) + b"\n")
    except OSError as error:
        raise BadInput(f"{path} cannot be written ({error.strerror})", "Name a file in a folder of yours") from error


def check(workload: Workload, where: str) -> None:
    """What the types alone do not hold. Raises BadInput that names `where` and the field."""
    seen: dict[str, int] = {}
    bases: dict[str, tuple[TrainPlan, SamplePlan]] = {}
    for i, plan in enumerate(workload.jobs):
        if plan.job in seen:
            mend = "Give each job a name of its own"
            raise BadInput(f"{where}: `$.jobs[{i}].job`: {plan.job!r} is also jobs[{seen[plan.job]}]", mend)
        seen[plan.job] = i
        if plan.base and bases.setdefault(plan.base, (plan.train, plan.sample)) != (plan.train, plan.sample):
            mend = "Jobs of one base share its worker groups: make train and sample equal"
            raise BadInput(f"{where}: `$.jobs[{i}].base`: {plan.base!r} is defined otherwise before", mend)
        stalls = plan.rollout.stalls
        if stalls.turns_max < stalls.turns_min:
            raise BadInput(f"{where}: `$.jobs[{i}].rollout.stalls.turns_max` is below turns_min", "Raise it")
        if plan.recorded and any(index >= len(plan.recorded.calls) for index in plan.recorded.delivered):
            raise BadInput(f"{where}: `$.jobs[{i}].recorded.delivered` names a call that is not there", "Remove it")
    if workload.gpus.train_nodes + workload.gpus.sample_nodes > workload.gpus.nodes:
        raise BadInput(f"{where}: `$.gpus`: train_nodes and sample_nodes exceed nodes", "Lower them")
