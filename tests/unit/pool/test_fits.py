"""What no pool could place is told before one starts, with file, line and mend."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from plexrl.config import load, read
from plexrl.pool import fits
from plexrl.pool.needs import group_sizes
from plexrl.types import BadInput, Role

SMALL = {"sample": {"kv_bytes": "2MiB"}, "lora": {"max_rank": 8, "slots": 1}}


@pytest.fixture
def write(tmp_path: Path, tiny_model: Path):
    def write(model: dict | None = None, **sections: object) -> Path:
        config = {
            "state_dir": f"{tmp_path}/state",
            "models": {"tiny": {"path": str(tiny_model), **SMALL, **(model or {})}},
            "device": {"bytes": "64MiB"},
            "host": {"bytes": "64MiB"},
            **sections,
        }
        path = tmp_path / "plexrl.yaml"
        path.write_text(json.dumps(config, indent=1))
        return path

    return write


def refused(path: Path) -> str:
    with pytest.raises(BadInput) as caught:
        load(path, fits.problems)
    return str(caught.value)


def test_what_fits_is_let_through(write):
    assert load(write(), fits.problems).models["tiny"].engine_of("train") == "torch"


def test_a_gpu_that_holds_neither_kind(write):
    model = load(write()).models["tiny"]
    need = {role: [group_sizes(model, role, kind).device_bytes for kind in ("lora", "full")] for role in Role}
    assert min(need[Role.SAMPLE]) > max(need[Role.TRAIN])
    between = min(need[Role.SAMPLE]) - 64
    said = refused(write(device={"bytes": between}))
    assert "models.tiny.sample: torch cannot sample: with adapters: " in said and "with all parameters: " in said
    assert f"device.bytes is {between}" in said and said.endswith("Raise device.bytes")
    assert "torch cannot train" not in said
    # One kind is enough: the other is refused to whoever asks for it.
    large = {"sample": {"kv_bytes": 4096}, "lora": {"max_rank": 64, "slots": 8}}
    model = load(write(large)).models["tiny"]
    adapters, everything = (group_sizes(model, Role.TRAIN, kind).device_bytes for kind in ("lora", "full"))
    assert everything < adapters
    assert load(write(large, device={"bytes": everything}), fits.problems)


def test_host_memory_that_holds_no_base(write):
    said = refused(write(host={"bytes": 4096}))
    assert "host.bytes is 4096" in said and said.endswith("Raise host.bytes")


def test_a_model_whose_weights_cannot_be_read_is_told_with_its_line(write, tiny_model, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    for name in ("config.json", "tokenizer_config.json"):
        (broken / name).write_bytes((tiny_model / name).read_bytes())
    (broken / "model.safetensors").write_bytes(b"pickle")
    path = write({"path": str(broken)})
    assert f"{path}:4: models.tiny.train: torch cannot train" in refused(path)
    assert "not a safetensors file" in refused(path)


def test_a_gang_larger_than_the_pool(write):
    config = read(write({"train": {"gpus": 2}}))
    assert fits.gangs(config, 2) == []
    ((where, what, _),) = fits.gangs(config, 1)
    assert (where, what) == (("models", "tiny", "train", "gpus"), "2 GPUs, and the pool has 1")


def test_pool_run_refuses_at_once(write, tmp_path):
    path = write({"train": {"gpus": 2}})
    registry = tmp_path / "registry"
    registry.mkdir(mode=0o755)

    def pool(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "plexrl.cli.main", "pool", *arguments, "--registry", str(registry)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert pool("declare", "lab", "--private", "--config", str(path)).returncode == 0
    run = pool("run", "lab", "--gpus", "1")
    assert run.returncode == 2 and f"{path}:" in run.stderr and "2 GPUs, and the pool has 1" in run.stderr
    path.write_text(path.read_text().replace('"64MiB"', '"2MiB"'))
    declared = pool("declare", "lab", "--private", "--config", str(path))
    assert declared.returncode == 2 and "Raise device.bytes" in declared.stderr
