"""`python -m bench.residency [--json]`: what eight LoRA deployments on one base take of a node, in real processes.

Pools of real engine hosts, seen from outside: proportional set sizes of all their processes plus their shared memory,
once with one deployment and once with eight, each after a training step. `ratio` is the difference over seven times
what a deployment has to keep (adapter, gradients, both moments, counter, random state). `base_copies` counts a piece
of the base's weights wherever it stands: on the host (arena and all private memory), and on each pretend GPU. The
second pool has two engines: each deployment has also published a version, and a sampler on the other GPU has drawn
from it; there a version counts to what has to be kept.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch
from safetensors import safe_open

from bench.footprint import Footprint, copies, footprint
from bench.localpool import LocalPool, end_in_order
from bench.residencyclient import MODEL
from plexrl.engines import sizing
from plexrl.engines.layout import architecture
from plexrl.types import BadInput, PlexrlError, Role

DEPLOYMENTS = 8
DTYPE = "float32"
KV_BYTES = 16 << 20
MARGIN = 3 << 30
"""Bytes that the processes may take beside the tensors."""

_SIGNATURE = 4096
_SETTLE_S = 3.0


class Sizes:
    """Bytes of one deployment of the given rank, and of the pool for all of them."""

    def __init__(self, model: str, rank: int, sample: bool) -> None:
        shape = (rank, True, True, True)
        self.state = sizing.state_bytes(model, DTYPE, "lora", *shape)
        self.version = sizing.snapshot_bytes(model, DTYPE, "lora", *shape)
        self.gradients = self.version
        self.kept = self.state + (self.version if sample else 0)
        roles = (Role.TRAIN, Role.SAMPLE) if sample else (Role.TRAIN,)
        groups = [sizing.sizes(model, DTYPE, role, "lora", 1, rank, KV_BYTES) for role in roles]
        self.device = max(group.device_bytes for group in groups) + (16 << 20)
        self.host = groups[0].base_bytes + DEPLOYMENTS * self.kept + sum(g.park_bytes for g in groups) + (64 << 20)


def measure(model: str, rank: int, sample: bool, folder: Path) -> dict[str, object]:
    """Both footprints of a pool of its own, with a trainer and perhaps a sampler, and the copies of the base."""
    sizes = Sizes(model, rank, sample)
    page, roles = 2 << 20, ["train", "sample"] if sample else ["train"]
    config = {
        "models": {
            MODEL: {
                "path": model,
                "dtype": DTYPE,
                "max_context": 128,
                "micro_batch_tokens": 256,
                "train": {"gpus": 1},
                "sample": {"replicas": 1, "kv_bytes": KV_BYTES, "max_batch": 8},
                "lora": {"max_rank": rank, "slots": 1},
            }
        },
        "device": {"kind": "cpu", "bytes": -(-sizes.device // page) * page, "roles": {"local": roles}},
        "host": {"bytes": -(-sizes.host // page) * page},
        "limits": {"models_per_job": DEPLOYMENTS},
    }
    with LocalPool(folder, config, gpus=len(roles)) as pool:
        settings = json.dumps({"rank": rank, "sample": sample})
        command = [sys.executable, "-m", "bench.residencyclient", settings]
        program = pool.attach(command, stderr=None, stdin=True)
        try:
            one, eight = (_with(program, pool, count) for count in (1, DEPLOYMENTS))
            found = copies(_signature(model), pool.processes(""))
        finally:
            family = [program, *psutil.Process(program.pid).children(recursive=True)]
            program.stdin.close()
            try:
                program.wait(timeout=60)
            except subprocess.TimeoutExpired:
                for process in family:  # it waits for the pool
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
                program.wait()
    difference = eight.total - one.total
    others = DEPLOYMENTS - 1
    gpus = [count for name, count in sorted(found.items()) if name.startswith("gpu")]
    return {
        "ratio": round(difference / (others * sizes.kept), 3),
        "ratio_without_gradients": round(difference / (others * (sizes.kept - sizes.gradients)), 3),
        "difference_bytes": difference,
        "private_difference_bytes": eight.private - one.private,
        "shared_difference_bytes": eight.shared - one.shared,
        "deployment_bytes": sizes.kept,
        "private_bytes": eight.private,
        "shared_bytes": eight.shared,
        "base_copies": {"host": sum(found.values()) - sum(gpus), "devices": gpus},
    }


def _with(program: subprocess.Popen[str], pool: LocalPool, count: int) -> Footprint:
    """The pool's footprint when the program has so many deployments and nothing runs."""
    program.stdin.write(f"{count}\n")
    program.stdin.flush()
    if program.stdout.readline().strip() != str(count):
        raise PlexrlError(f"the program ended early\n{pool.logs()}", "See its messages above")
    time.sleep(_SETTLE_S)
    return footprint(pool.processes(""))


def _signature(model: str) -> bytes:
    """Bytes from the middle of the base's largest weight that has a layer to itself, as the pool keeps them."""
    arch = architecture(model)
    name = max((n for n in arch.shapes if ".0." in n), key=lambda n: torch.Size(arch.shapes[n]).numel())
    with safe_open(str(Path(model) / arch.files[name]), framework="pt") as tensors:
        weight = tensors.get_tensor(name).to(getattr(torch, DTYPE)).reshape(-1)
    middle = weight.numel() // 2
    return weight[middle : middle + _SIGNATURE // weight.element_size()].numpy().tobytes()


def random_model(folder: Path) -> str:
    """A Llama of some 15 million random parameters with one token per byte, for machines without the real one."""
    from transformers import LlamaConfig, LlamaForCausalLM

    subprocess.run([sys.executable, "-m", "plexrl.cli.main", "model", "tiny", str(folder)], check=True, timeout=110)
    torch.manual_seed(0)
    shape = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 6}
    config = LlamaConfig(**json.loads((folder / "config.json").read_text()) | shape | {"head_dim": 64})
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def main() -> int:
    """The command."""
    end_in_order()
    parser = argparse.ArgumentParser(prog="python -m bench.residency", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--model", type=Path, default=Path(".cache/models/smollm2-135m"), help="folder of the base")
    parser.add_argument("--random", action="store_true", help="a smaller base of random weights instead")
    parser.add_argument("--rank", type=int, default=32, help="of the adapters")
    parser.add_argument("--dir", type=Path, default=Path("/var/tmp"), help="folder for the pools' state")
    asked = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory(prefix="plexrl-bench-", dir=asked.dir) as folder:
            os.chmod(folder, 0o755)
            root = Path(folder)
            model = random_model(root / "model") if asked.random else str(asked.model.absolute())
            if not (Path(model) / "config.json").is_file():
                raise BadInput(f"there is no model in {model}", f"Run: plexrl model smollm2 {model}; or use --random")
            found: dict[str, object] = {"model": Path(model).name, "rank": asked.rank, "deployments": DEPLOYMENTS}
            for name, sample in (("trainer", False), ("trainer_and_sampler", True)):
                need = Sizes(model, asked.rank, sample)
                wanted = need.host + need.device * (1 + sample) + MARGIN
                free = psutil.virtual_memory().available
                if free < wanted:
                    raise BadInput(
                        f"{free >> 20} MiB of memory are available, {wanted >> 20} are needed",
                        "End what else runs here first, or use --random",
                    )
                print(f"bench.residency: a pool with {name.replace('_', ' ')}", file=sys.stderr, flush=True)
                (root / name).mkdir(mode=0o755)
                found[name] = measure(model, asked.rank, sample, root / name)
    except PlexrlError as error:
        print(f"bench.residency: {error}", file=sys.stderr)
        return error.exit_code
    if asked.json:
        print(json.dumps(found))
        return 0
    for name, value in found.items():
        if isinstance(value, dict):
            print(name.replace("_", " "))
            for key, figure in value.items():
                print(f"  {key:26} {figure}")
        else:
            print(f"{name:28} {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
