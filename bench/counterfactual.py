"""`python -m bench.counterfactual [--json]`: does the baseline tell what a job would have taken alone?

Two synchronous jobs and one with a lag of one step run dedicated, each alone on a pool of its own, and all of them
shared on one pool, for real, on pinned cores, with the same number of tokens. The baseline that the shared run's ledger
gives for each is held against its dedicated run: seconds from its first call to its last result, with the builds.

A row per job: kind `sync`, or `bound` for the one with a lag, whose replay is no measurement. replay_error: of the
means over the repeats, as a fraction; fit_error: of the service models, per call; repeat_spread: (largest - smallest) /
mean of the dedicated repeats. holds: the error is at most the larger of 0.05 and that spread. Needs a quiet machine:
about a quarter of an hour on two cores.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from bench.counterfactualclient import MODEL, Work
from bench.localpool import LocalPool, end_in_order
from plexrl.accounting.basis import basis
from plexrl.accounting.busy import Busy
from plexrl.accounting.fit import fits
from plexrl.accounting.ledger import read
from plexrl.accounting.replay import colocated, separate
from plexrl.accounting.trace import traces
from plexrl.types import BadInput, PlexrlError

GPUS = 2
ALLOWED = 0.05
# A Llama of 15 million parameters: large enough that calls take tenths of seconds, small enough for three jobs.
SHAPE = {
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
}
DEVICE = 384 << 20


class Seen(msgspec.Struct):
    """One job in one run. wall_s: first call to last result; replayed_s: the same by the baseline; fit_error: of it."""

    wall_s: float
    replayed_s: float
    fit_error: float
    calls: int


def jobs(steps: int) -> list[Work]:
    """Of about equal length."""
    common = {"groups": 4, "samples": 4, "prompt_tokens": 48, "max_tokens": 24}
    return [
        Work(name="lora", lag=False, rank=8, steps=steps, tool_s=1.0, seed=1, **common),
        Work(name="full", lag=False, rank=0, steps=steps, tool_s=2.0, seed=2, **common),
        Work(name="lag", lag=True, rank=8, steps=steps, tool_s=1.0, seed=3, **common),
    ]


def make_model(folder: Path) -> None:
    """The tiny model's tokenizer with more behind it."""
    subprocess.run([sys.executable, "-m", "plexrl.cli.main", "model", "tiny", str(folder)], check=True)
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig.from_pretrained(folder)
    for name, value in SHAPE.items():
        setattr(config, name, value)
    config.head_dim = SHAPE["hidden_size"] // SHAPE["num_attention_heads"]
    LlamaForCausalLM(config).save_pretrained(folder)


def run(folder: Path, model: Path, works: list[Work]) -> dict[str, Seen]:
    """One pool, these jobs at once; by name. Raises PlexrlError when one of them fails."""
    config = {
        "models": {
            MODEL: {
                "path": str(model),
                "max_context": 128,
                "micro_batch_tokens": 512,
                "train": {"gpus": GPUS},
                "sample": {"replicas": GPUS, "kv_bytes": "16MiB", "max_batch": 32},
                "lora": {"max_rank": 8, "slots": 2},
            }
        },
        "device": {"kind": "cpu", "bytes": DEVICE},
        "host": {"bytes": "2GiB"},
    }
    folder.mkdir(mode=0o755)
    names: dict[str, str] = {}
    with LocalPool(folder, config, GPUS) as pool:
        started = []
        try:
            for work in works:
                command = [sys.executable, "-m", "bench.counterfactualclient", msgspec.json.encode(work).decode()]
                started.append(pool.attach(command, stderr=None, stdin=True))
                names[str(started[-1].pid)] = work.name
                started[-1].stdout.readline()  # it has read its libraries; what follows is its own time
            for each in started:
                each.stdin.write("go\n")
                each.stdin.flush()
            for each in started:
                each.communicate()
        except BaseException:
            for each in started:
                each.terminate()
                each.wait()
            raise
        if any(each.returncode for each in started):
            raise PlexrlError(f"a job ended with {[each.returncode for each in started]}\n{pool.logs()}")
    records = read(pool.state / "ledger")
    models = fits(records, Busy(records), pretend=True)
    found = {}
    for trace in traces(records, records[-1].now_us).values():
        together, apart = colocated(trace, DEVICE, models), separate(trace, models)
        first, last = trace.steps[0], trace.delivered[-1][0]
        found[names[trace.job.partition(".")[0]]] = Seen(
            wall_s=(last - first.accepted_us) / 1e6,
            replayed_s=(together.wall_us - first.think_us - trace.tail_us) / 1e6,
            fit_error=basis(trace, together, apart, models, True).error or 0.0,
            calls=trace.calls,
        )
    return found


def row(work: Work, alone: list[Seen], shared: list[Seen]) -> dict[str, object]:
    """What the repeats of one job come to."""
    measured = [seen.wall_s for seen in alone]
    mean, replayed = statistics.mean(measured), statistics.mean(seen.replayed_s for seen in shared)
    spread = (max(measured) - min(measured)) / mean
    error = abs(replayed / mean - 1)
    return {
        "job": work.name,
        "kind": "bound" if work.lag else "sync",
        "measured_seconds": round(mean, 3),
        "replayed_seconds": round(replayed, 3),
        "replay_error": round(error, 4),
        "fit_error": round(statistics.mean(seen.fit_error for seen in shared), 4),
        "repeat_spread": round(spread, 4),
        "replayed_alone_seconds": round(statistics.mean(seen.replayed_s for seen in alone), 3),
        "shared_seconds": round(statistics.mean(seen.wall_s for seen in shared), 3),
        "calls": alone[0].calls,
        "holds": None if work.lag else error <= max(ALLOWED, spread),
    }


def main() -> int:
    """The command. Exit code 1 when a synchronous job's baseline is further off than it may be."""
    end_in_order()
    parser = argparse.ArgumentParser(prog="python -m bench.counterfactual", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--steps", type=int, default=10, help="of every job")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dir", type=Path, default=Path("/var/tmp"), help="folder for the pools' state")
    parser.add_argument("--keep", type=Path, help="leave the ledgers of all runs in this folder")
    asked = parser.parse_args()
    works = jobs(asked.steps)
    alone: dict[str, list[Seen]] = {work.name: [] for work in works}
    shared: dict[str, list[Seen]] = {work.name: [] for work in works}
    try:
        if (os.cpu_count() or 1) < GPUS:
            raise BadInput(f"this machine has {os.cpu_count()} cores", f"Run it where there are {GPUS}")
        with tempfile.TemporaryDirectory(prefix="plexrl-bench-", dir=asked.dir) as temporary:
            root = asked.keep or Path(temporary)
            root.mkdir(exist_ok=True)
            root.chmod(0o755)
            model = Path(temporary) / "model"
            make_model(model)
            for repeat in range(asked.repeats):
                for work in works:
                    _tell(f"repeat {repeat + 1} of {asked.repeats}: {work.name} alone")
                    alone[work.name].append(run(root / f"{work.name}{repeat}", model, [work])[work.name])
                _tell(f"repeat {repeat + 1} of {asked.repeats}: all of them shared")
                for name, seen in run(root / f"shared{repeat}", model, works).items():
                    shared[name].append(seen)
    except PlexrlError as error:
        print(f"bench.counterfactual: {error}", file=sys.stderr)
        return error.exit_code
    rows = [row(work, alone[work.name], shared[work.name]) for work in works]
    found = {"rows": rows, "repeats": asked.repeats, "steps": asked.steps, "cores": os.cpu_count()}
    if asked.json:
        print(json.dumps(found))
    else:
        for each in rows:
            print("  ".join(f"{name} {value}" for name, value in each.items()))
    return 1 if any(each["holds"] is False for each in rows) else 0


def _tell(text: str) -> None:
    print(f"bench.counterfactual: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
