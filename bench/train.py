"""`python -m bench.train [--json]`: the pool's DeepSpeed, through the API, against the same DeepSpeed alone.

SmolLM2-135M in bfloat16, ZeRO 1 on one pretend GPU; LoRA and full parameters. Each step gathers the gradients of a few
micro-batches and steps; both sides take turns. ratio is the pool's seconds over the plain program's, the median over
steps; 1 would be a pool that costs nothing.
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
from bench.trainwork import DTYPE, LENGTH, MICRO_BATCH, MODEL, Work
from plexrl.engines import footprint
from plexrl.types import BadInput, PlexrlError, Role

CASES = {"lora": 16, "full": 0}
PAGE = 2 << 20
SAMPLER = 512 << 20
"""Bytes of a device that could also sample this model: a pool's file is refused where a role fits nowhere."""
MARGIN = 5 << 30
"""Bytes for both sides' processes and activations, and for the plain program's training state."""


def use(work: Work) -> footprint.Use:
    """The pool's worker group."""
    return footprint.Use(
        engine="deepspeed",
        role=Role.TRAIN,
        kind="lora" if work.rank else "full",
        model_dir=work.model,
        dtype=DTYPE,
        world=1,
        zero_stage=work.stage,
        lora_slots=1,
        lora_max_rank=max(work.rank, 1),
        kv_bytes=0,
        max_batch=1,
        max_context=LENGTH,
        micro_batch_tokens=work.tokens,
    )


def needs(work: Work) -> tuple[int, int]:
    """Bytes of the device and of the host arena, in whole pages."""
    group = footprint.group(use(work))
    trained = footprint.Trained(lora_rank=work.rank or None, attn=True, mlp=True, unembed=False)
    host = group.base_bytes + footprint.state(use(work), trained) + (128 << 20)
    return tuple(-(-size // PAGE) * PAGE for size in (max(group.device_bytes + (16 << 20), SAMPLER), host))


def measure(work: Work, folder: Path) -> list[tuple[float, float]]:
    """Seconds per step: of the pool, of the plain program."""
    device, host = needs(work)
    config = {
        "models": {
            MODEL: {
                "path": work.model,
                "dtype": DTYPE,
                "max_context": LENGTH,
                "micro_batch_tokens": work.tokens,
                "train": {"gpus": 1, "engine": "deepspeed", "zero_stage": work.stage},
                "lora": {"max_rank": max(work.rank, 1), "slots": 1},
                "sample": {"kv_bytes": PAGE},
            }
        },
        "device": {"kind": "cpu", "bytes": device, "roles": {"local": ["train"]}},
        "host": {"bytes": host},
    }
    with LocalPool(folder, config) as pool:
        return pool.measure("bench.trainclient", msgspec.json.encode(work).decode())


def main() -> int:
    """The command."""
    end_in_order()
    parser = argparse.ArgumentParser(prog="python -m bench.train", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--model", type=Path, default=Path(".cache/models/smollm2-135m"), help="SmolLM2-135M's folder")
    parser.add_argument("--dir", type=Path, default=Path("/var/tmp"), help="folder for the pools' state")
    parser.add_argument("--steps", type=int, default=5, help="figures are medians over steps")
    parser.add_argument("--sequences", type=int, default=2 * MICRO_BATCH, help=f"of {LENGTH} tokens, per step")
    parser.add_argument("--stage", type=int, default=1, choices=(1, 2, 3), help="of ZeRO")
    parser.add_argument("--case", choices=sorted(CASES), help="this one only")
    asked = parser.parse_args()
    model, rows = asked.model.absolute(), []
    core = sorted(os.sched_getaffinity(0))[0]
    try:
        if not (model / "config.json").is_file():
            raise BadInput(f"there is no model in {model}", f"Run: plexrl model smollm2 {model}")
        for case, rank in CASES.items():
            if asked.case in (case, None):
                work = Work(str(model), rank, asked.stage, asked.steps, asked.sequences, core)
                wanted, free = sum(needs(work)) + MARGIN, psutil.virtual_memory().available
                if free < wanted:
                    raise BadInput(f"{free >> 20} MiB of memory are available, {wanted >> 20} are needed", "End others")
                print(f"bench.train: {case}", file=sys.stderr, flush=True)
                with tempfile.TemporaryDirectory(prefix="plexrl-bench-", dir=asked.dir) as folder:
                    os.chmod(folder, 0o755)
                    rows.append(row(case, measure(work, Path(folder))))
    except PlexrlError as error:
        print(f"bench.train: {error}", file=sys.stderr)
        return error.exit_code
    found = {"model": model.name, "dtype": DTYPE, "stage": asked.stage, "rows": rows}
    if asked.json:
        print(json.dumps(found))
        return 0
    for each in rows:
        print("  ".join(f"{name} {value}" for name, value in each.items()))
    return 0


def row(case: str, steps: list[tuple[float, float]]) -> dict[str, object]:
    """Of one case."""
    ratios = [pool / plain for pool, plain in steps]
    return {
        "case": case,
        "ratio": round(statistics.median(ratios), 3),
        "ratio_spread": [round(min(ratios), 3), round(max(ratios), 3)],
        "seconds": round(statistics.median(pool for pool, _ in steps), 3),
        "reference_seconds": round(statistics.median(plain for _, plain in steps), 3),
    }


if __name__ == "__main__":
    sys.exit(main())
