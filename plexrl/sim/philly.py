"""The Philly trace (Jeon et al., ATC '19) as RLVR jobs: its arrivals, sizes and durations, our phases.

The file is not part of this project: `simulator/traces/philly.csv` of github.com/petuum/adaptdl, branch
osdi21-artifact, Apache-2.0, derived from Microsoft's public Philly trace; plain or gzipped.

| trace | job | by whom |
|---|---|---|
| timestamp | arrival, from the first kept job on, divided by `compress` | trace |
| duration | steps = duration / step_s, rounded down; jobs of less than two are dropped and counted | step_s: ours |
| num_gpus | trainer gang of as many GPUs | ours |
| | half as many GPUs, at least one, for sampler replicas of one (32.8B: four) | ours; R/T = 1/2 is near facts 1.9 |
| | model: 0.5B on 1 GPU, 1.5B on 2 and 4, 7.6B on 8 to 16, 32.8B above | ours, by the table of facts 5.7 |
| cluster | account, and the user in it: the trace has no users | ours |
| - | training 8 to 35 % of a step alone, lag 0 or 1, drawn per job | facts 7.1, 1.7 |
| - | a step alone lasts step_s: decode and training rates are set so | ours |
| - | samples of a step: 64 per replica, 256 at most, in 3 calls, or 2 each; one forward_backward | ours: for speed |

93 % of the trace's jobs have one GPU: it is a test of scale and of arrivals, hardly one of gangs.
"""

import csv
import gzip
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from random import Random

from msgspec import Struct, structs

from plexrl.scheduler.costs import SWITCH_PRIOR, service_prior
from plexrl.sim.draws import draw
from plexrl.sim.generate import KV_BYTES, STATE_PER_PARAMETER, WEIGHT_PER_PARAMETER, WORKSPACE_BYTES, rollout_us
from plexrl.sim.workload import Cluster, JobPlan, Lengths, Rollout, SamplePlan, TrainPlan, Workload
from plexrl.types import BadInput

WHERE = "Get simulator/traces/philly.csv of github.com/petuum/adaptdl, branch osdi21-artifact, and name it with --trace"
COLUMNS = ("timestamp", "duration", "num_gpus", "gpu_time", "cluster")
STEP_S = 600.0  # ours: facts 7.1, a step lasts minutes to over an hour
TRAIN_SHARE = (0.08, 0.35)  # facts 7.1
PARAMETERS = ((1, 0.5e9, "0.5B"), (4, 1.5e9, "1.5B"), (16, 7.6e9, "7B"), (1 << 30, 32.8e9, "32B"))  # up to so many GPUs


class Philly(Struct, frozen=True):
    """workload: of the kept jobs. dropped: jobs of less than two steps that were submitted before the last kept one."""

    workload: Workload
    dropped: int


class _Row(Struct, frozen=True):
    at_s: float
    duration_s: float
    gpus: int
    cluster: str


def philly(
    path: Path, *, jobs: int = 10_000, nodes: int = 64, step_s: float = STEP_S, compress: float = 1.0, seed: int = 0
) -> Philly:
    """The first `jobs` jobs of two or more steps, by arrival, on `nodes` nodes of 8 GPUs.

    compress: arrivals come so many times faster. Raises BadInput, naming file, line and column, for a file that is not
    the trace, and for a step time or compression that is not positive.
    """
    if step_s <= 0 or compress <= 0:
        raise BadInput("the step time and the compression of arrivals must be above 0", "Give positive numbers")
    kept, dropped = [], 0
    for row in sorted(_rows(path), key=lambda row: row.at_s):
        if len(kept) == jobs:
            break
        if row.duration_s < 2 * step_s:
            dropped += 1
        else:
            kept.append(row)
    if not kept:
        raise BadInput(f"{path}: no job lasts two steps of {step_s:g} s", "Shorten the step time")
    first = kept[0].at_s
    plans = tuple(
        _plan(f"p{number:05d}", row, round((row.at_s - first) / compress * 1e6), step_s, seed)
        for number, row in enumerate(kept)
    )
    return Philly(
        Workload(name="philly", gpus=Cluster(nodes=nodes), jobs=plans, switch=SWITCH_PRIOR, seed=seed), dropped
    )


def _rows(path: Path) -> list[_Row]:
    try:
        with gzip.open(path, "rt", encoding="utf-8") if _gzipped(path) else path.open(encoding="utf-8") as file:
            return list(_parse(path, csv.DictReader(file)))
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} cannot be read: {error}", WHERE) from error


def _gzipped(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == b"\x1f\x8b"


def _parse(path: Path, reader: csv.DictReader):
    missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
    if missing:
        raise BadInput(f"{path}:1: column {missing[0]!r} is missing", WHERE)
    for row in reader:
        column = ""
        try:
            column = "timestamp"
            at_s = datetime.fromisoformat(row["timestamp"]).timestamp()
            column = "duration"
            duration_s = float(row["duration"])
            column = "num_gpus"
            gpus = int(row["num_gpus"])
        except (TypeError, ValueError) as error:
            raise BadInput(f"{path}:{reader.line_num}: {column}: {row[column]!r} is no value for it", WHERE) from error
        if gpus > 0:
            yield _Row(at_s, duration_s, gpus, row["cluster"])


def _plan(name: str, row: _Row, arrival_us: int, step_s: float, seed: int) -> JobPlan:
    rng = Random(f"philly/{seed}/{name}")
    shape, decode, tokens = _shape(row.gpus)
    share, lag = rng.uniform(*TRAIN_SHARE), rng.randrange(2)
    rollout = step_s * 1e6 * (1.0 if lag else 1 - share)  # with one step of lag the rollouts alone make the step
    train = step_s * 1e6 * share / tokens
    return structs.replace(
        shape,
        job=name,
        account=row.cluster,
        user=row.cluster,
        arrival_us=arrival_us,
        steps=int(row.duration_s / step_s),
        lag=lag,
        sample=structs.replace(
            shape.sample, service=structs.replace(shape.sample.service, decode_base_us=rollout / decode)
        ),
        train=structs.replace(shape.train, service=structs.replace(shape.train.service, train_us_per_token=train)),
    )


@lru_cache
def _shape(gpus: int) -> tuple[JobPlan, float, float]:
    """(a plan for so many GPUs, decode steps of its mean rollout, its mean training tokens)."""
    parameters, model = next((count, name) for most, count, name in PARAMETERS if gpus <= most)
    each = 1 if parameters < 30e9 else 4
    replicas = max(1, gpus // 2 // each)
    state = int(STATE_PER_PARAMETER * parameters / gpus)
    weights = int(WEIGHT_PER_PARAMETER * parameters / each)
    unit = structs.replace(
        service_prior(parameters, 1), decode_base_us=1.0, decode_us_per_sequence=0, prefill_us_per_token=0, call_us=0
    )
    plan = JobPlan(
        job=f"shape-{gpus}",
        model=model,
        train=TrainPlan(
            gpus=gpus,
            device_bytes=state + WORKSPACE_BYTES,
            host_bytes=state,
            service=service_prior(parameters, gpus),
            calls=1,
            publish_us=500_000,
        ),
        sample=SamplePlan(
            replicas=replicas, gpus=each, device_bytes=weights + KV_BYTES, host_bytes=weights, service=unit
        ),
        rollout=Rollout(prompts=16 * min(replicas, 4), group=4, calls=3 if replicas == 1 else 2, lengths=Lengths()),
        reward_us=0,
    )
    works = [draw(plan, step, 0) for step in range(50)]
    return plan, sum(rollout_us(plan, w) for w in works) / 50, sum(w.train_tokens for w in works) / 50
