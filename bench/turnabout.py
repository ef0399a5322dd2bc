"""`python -m bench.turnabout [--json]`: two worker groups of two engines on one GPU that has room for one of them.

A program trains and draws by turns, so that each call switches the GPU from trainer to sampler or back. Memory that is
private to the pool's processes, their descriptors and their number are read after the first switches and at the end.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil

from bench.localpool import LocalPool, end_in_order
from plexrl.config import PoolConfig
from plexrl.config.engines import missing, resolved
from plexrl.pool.needs import group_sizes
from plexrl.types import BadInput, PlexrlError, Role, records

MODEL = "model"
MIB = 1 << 20


def measure(folder: Path, model: Path, trainer: str, engine: str, switches: int, warm: int) -> dict[str, object]:
    """Run a pool in the folder for that many switches after `warm` first ones; what it took before and after."""
    with LocalPool(folder, configuration(model, trainer, engine)) as pool:
        settings = json.dumps({"base": MODEL, "rounds": [warm // 2, switches // 2]})
        client = pool.attach([sys.executable, "-m", "bench.turnaboutclient", settings], stderr=None, stdin=True)
        try:
            before = _after_round(pool, client)
            after = _after_round(pool, client)
        except BaseException:
            client.terminate()
            client.wait()
            raise
        client.communicate("\n")
        done = [record for record in pool.records() if isinstance(record, records.Switched) and record.incoming]
    return {
        "trainer": trainer,
        "sampler": engine,
        "switches": switches,
        "switches_in_all": len(done),
        "before": before,
        "after": after,
        "grown": {name: after[name] - before[name] for name in before},
    }


def configuration(model: Path, trainer: str, engine: str) -> dict:
    """Of a pool with one GPU, on which trainer and sampler do not fit together."""
    described = {
        "path": str(model),
        "max_context": 128,
        "micro_batch_tokens": 256,
        "train": {"gpus": 1, "engine": trainer},
        "sample": {"engine": engine, "kv_bytes": "8MiB", "max_batch": 8},
        "lora": {"max_rank": 8, "slots": 1},
    }
    config = resolved(PoolConfig.model_validate({"state_dir": "/", "models": {MODEL: described}}))
    need = [group_sizes(config.models[MODEL], role, "lora") for role in Role]
    device = -(-max(sizes.device_bytes for sizes in need) // MIB) * MIB
    if device >= sum(sizes.device_bytes for sizes in need):
        raise BadInput(f"both groups fit {device} bytes together", "Take a larger model")
    host = sum(sizes.base_bytes + sizes.park_bytes for sizes in need) // MIB + 256
    return {
        "models": {MODEL: described},
        "device": {"kind": "cpu", "bytes": device},
        "host": {"bytes": host * MIB},
        "scheduler": {"anticipation": "1ms", "gradient_anticipation": "1ms", "min_turn_factor": 0.0},
    }


def _after_round(pool: LocalPool, client: subprocess.Popen[str]) -> dict[str, int]:
    """Have the client go on; what the pool's processes take when it has done its round."""
    client.stdin.write("\n")
    client.stdin.flush()
    if not client.stdout.readline():
        raise PlexrlError(f"the program ended with {client.wait()}\n{pool.logs()}")
    family = pool.processes("")
    return {
        "private_bytes": sum(process.memory_full_info().uss for process in family),
        "descriptors": sum(process.num_fds() for process in family),
        "processes": len(family),
    }


def main() -> int:
    """The command."""
    end_in_order()
    parser = argparse.ArgumentParser(prog="python -m bench.turnabout", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--model", type=Path, default=Path(".cache/models/smollm2-135m"), help="a model folder")
    parser.add_argument("--trainer", default="deepspeed", help="torch or deepspeed")
    parser.add_argument("--sampler", default="vllm", help="torch or vllm")
    parser.add_argument("--switches", type=int, default=100)
    parser.add_argument("--dir", type=Path, default=Path("/var/tmp"), help="folder for the pool's state")
    asked = parser.parse_args()
    try:
        for name in {asked.trainer, asked.sampler} - {"torch"}:
            if why := missing(name, "cpu"):
                raise BadInput(why)
        if (free := psutil.virtual_memory().available) < 6 << 30:
            raise BadInput(f"{free >> 20} MiB of memory are available, 6144 are needed", "End what else runs first")
        with tempfile.TemporaryDirectory(prefix="plexrl-bench-", dir=asked.dir) as folder:
            os.chmod(folder, 0o755)
            model = asked.model.absolute()
            found = measure(Path(folder), model, asked.trainer, asked.sampler, asked.switches, warm=20)
    except PlexrlError as error:
        print(f"bench.turnabout: {error}", file=sys.stderr)
        return error.exit_code
    found |= {"model": asked.model.name, "cores": os.cpu_count()}
    if asked.json:
        print(json.dumps(found))
    else:
        for name, value in found.items():
            print(f"{name:18} {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
