"""`python -m bench.solo [--json]`: one GRPO job alone on a pool, against the same loop in plain transformers and peft.

The pool has two pretend GPUs: a training gang of two and two sampler replicas on the same two cores that the plain
process has. step_ratio is the pool's seconds per step over the plain program's; 1 would be a pool that costs nothing.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

import msgspec
import psutil

from bench.localpool import LocalPool, end_in_order
from bench.solowork import MODEL, Work
from plexrl.types import BadInput, PlexrlError

GPUS = 2
# The pool with its engine hosts and the plain program, both at once. With less the machine's paging would be measured.
MEMORY = 8 << 30


def measure(work: Work, folder: Path) -> list[tuple[dict[str, float], dict[str, float]]]:
    """Start a pool in the folder, attach the job, end the pool. Seconds per step: of the pool, of the plain program."""
    config = {
        "models": {
            MODEL: {
                "path": work.model,
                "max_context": 512,
                "micro_batch_tokens": 2048,
                "train": {"gpus": GPUS},
                "sample": {"replicas": GPUS, "kv_bytes": "128MiB", "max_batch": 48},
                "lora": {"max_rank": work.rank, "slots": 1},
            }
        },
        "device": {"kind": "cpu", "bytes": "2GiB"},
        "host": {"bytes": "2GiB"},
    }
    print("bench.solo: starting a private pool", file=sys.stderr, flush=True)
    with LocalPool(folder, config, GPUS) as pool:
        return pool.measure("bench.soloclient", msgspec.json.encode(work).decode())


def main() -> int:
    """The command."""
    end_in_order()
    parser = argparse.ArgumentParser(prog="python -m bench.solo", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--model", type=Path, default=Path(".cache/models/smollm2-135m"), help="SmolLM2-135M's folder")
    parser.add_argument("--dir", type=Path, default=Path("/var/tmp"), help="folder for the pool's state")
    parser.add_argument("--steps", type=int, default=7, help="figures are medians over steps")
    parser.add_argument("--groups", type=int, default=8, help="problems per step")
    parser.add_argument("--samples", type=int, default=4, help="answers per problem")
    parser.add_argument("--max-tokens", type=int, default=16, help="of every answer")
    asked = vars(parser.parse_args())
    as_json, where, model = asked.pop("json"), asked.pop("dir"), asked.pop("model").absolute()
    work = Work(model=str(model), rank=16, lr=1e-5, threads=GPUS, **asked)
    try:
        if not (model / "config.json").is_file():
            raise BadInput(f"there is no model in {model}", f"Run: plexrl model smollm2 {model}")
        if (os.cpu_count() or 1) < GPUS:
            raise BadInput(f"this machine has {os.cpu_count()} cores", f"Run it where there are {GPUS}")
        if (free := psutil.virtual_memory().available) < MEMORY:
            raise BadInput(
                f"{free >> 20} MiB of memory are available, {MEMORY >> 20} are needed", "End what else runs here first"
            )
        with tempfile.TemporaryDirectory(prefix="plexrl-bench-", dir=where) as folder:
            os.chmod(folder, 0o755)
            steps = measure(work, Path(folder))
    except PlexrlError as error:
        print(f"bench.solo: {error}", file=sys.stderr)
        return error.exit_code
    found: dict[str, object] = {}
    for part in ("step", "sampling", "training"):
        pool, plain = ([_seconds(side, part) for side in sides] for sides in zip(*steps, strict=True))
        ratios = [a / b for a, b in zip(pool, plain, strict=True)]
        found |= {
            f"{part}_ratio": round(statistics.median(ratios), 3),
            f"{part}_ratio_spread": [round(min(ratios), 3), round(max(ratios), 3)],
            f"{part}_s": round(statistics.median(pool), 3),
            f"plain_{part}_s": round(statistics.median(plain), 3),
        }
    for part in ("publish", "optim_step"):
        found[f"{part}_s"] = round(statistics.median(pool[part] for pool, _ in steps), 3)
    found |= msgspec.to_builtins(work) | {"model": model.name, "cores": os.cpu_count()}
    if as_json:
        print(json.dumps(found))
    else:
        for name, value in found.items():
            print(f"{name:22} {value}")
    return 0


def _seconds(side: dict[str, float], part: str) -> float:
    return side["sampling"] + side["training"] if part == "step" else side[part]


if __name__ == "__main__":
    sys.exit(main())
