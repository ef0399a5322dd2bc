"""`python -m bench.sample [--json]`: tokens per second of the pool's vLLM, through the API, beside the same vLLM alone.

The pool has one pretend GPU; vLLM alone runs in this run too, in turn with it, on that GPU's core and as nice. Rows of
case `base`: requests at once on the base model. Of case `tenants`: several LoRA deployments in one batch, and the
reference is one deployment's requests alone, on the same pool. ratio: tokens_per_s over reference_tokens_per_s.
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
from bench.samplework import MODEL, Work
from plexrl.types import BadInput, PlexrlError

# The pool with its engine hosts and vLLM alone, both at once.
MEMORY = 7 << 30


def measure(work: Work, folder: Path) -> list[dict]:
    """Start a pool in the folder, attach the program, end the pool."""
    config = {
        "models": {
            MODEL: {
                "path": work.model,
                "dtype": "bfloat16",
                "max_context": work.context,
                "train": {"gpus": 1, "engine": "torch"},
                "sample": {
                    "engine": "vllm",
                    "replicas": 1,
                    "kv_bytes": work.kv_bytes,
                    "max_batch": work.max_batch,
                },
                "lora": {"max_rank": work.rank, "slots": work.tenants},
            }
        },
        "device": {"kind": "cpu", "bytes": "2GiB"},
        "host": {"bytes": "2GiB"},
    }
    print("bench.sample: starting a private pool", file=sys.stderr, flush=True)
    with LocalPool(folder, config, 1) as pool:
        return pool.measure("bench.sampleclient", msgspec.json.encode(work).decode())


def row_of(work: Work, found: dict) -> dict[str, object]:
    """Medians over rounds; the ratio is of seconds of the same round."""
    tokens = found["concurrency"] * work.new
    ours, reference = zip(*found["pairs"], strict=True)
    ratios = [b / a for a, b in found["pairs"]]
    return {
        "case": found["case"],
        "concurrency": found["concurrency"],
        "tenants": found["tenants"],
        "tokens_per_s": round(tokens / statistics.median(ours), 1),
        "reference_tokens_per_s": round(tokens / statistics.median(reference), 1),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_spread": [round(min(ratios), 3), round(max(ratios), 3)],
    }


def main() -> int:
    """The command."""
    end_in_order()
    parser = argparse.ArgumentParser(prog="python -m bench.sample", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--model", type=Path, default=Path(".cache/models/smollm2-135m"), help="SmolLM2-135M's folder")
    parser.add_argument("--dir", type=Path, default=Path("/var/tmp"), help="folder for the pool's state")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32], help="requests at once, a row each")
    parser.add_argument("--new", type=int, default=64, help="new tokens of each request")
    parser.add_argument("--prompt", type=int, default=16, help="prompt tokens of each request")
    parser.add_argument("--rounds", type=int, default=3, help="figures are medians over rounds")
    parser.add_argument("--tenants", type=int, default=4, help="LoRA deployments in one batch")
    asked = parser.parse_args()
    model = asked.model.absolute()
    work = Work(
        model=str(model),
        concurrency=tuple(asked.concurrency),
        tenants=asked.tenants,
        tenant_requests=8,
        prompt=asked.prompt,
        new=asked.new,
        rounds=asked.rounds,
        rank=16,
        core=0,
        context=256,
        kv_bytes=192 << 20,
        max_batch=32,
    )
    try:
        if not (model / "config.json").is_file():
            raise BadInput(f"there is no model in {model}", f"Run: plexrl model smollm2 {model}")
        if (free := psutil.virtual_memory().available) < MEMORY:
            raise BadInput(
                f"{free >> 20} MiB of memory are available, {MEMORY >> 20} are needed", "End what else runs here first"
            )
        with tempfile.TemporaryDirectory(prefix="plexrl-bench-", dir=asked.dir) as folder:
            os.chmod(folder, 0o755)
            rows = [row_of(work, found) for found in measure(work, Path(folder))]
    except PlexrlError as error:
        print(f"bench.sample: {error}", file=sys.stderr)
        return error.exit_code
    told = {
        "model": model.name,
        "dtype": "bfloat16",
        "new_tokens": work.new,
        "prompt_tokens": work.prompt,
        "rows": rows,
    }
    if asked.json:
        print(json.dumps(told))
    else:
        for row in rows:
            print("  ".join(f"{name} {value}" for name, value in row.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
