"""What is refused before anything is built, and by the sizes that the head asks for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec import structs

from plexrl.config import engines
from plexrl.engines import footprint
from plexrl.engines.vllm import build, sizing
from plexrl.types import BadInput, Role
from tests.unit.engines.vllm.conftest import Replica


def use(folder: str, **more: object) -> footprint.Use:
    settings = {
        "engine": "vllm",
        "role": Role.SAMPLE,
        "kind": "lora",
        "model_dir": folder,
        "dtype": "float32",
        "world": 1,
        "zero_stage": 0,
        "lora_slots": 2,
        "lora_max_rank": 8,
        "kv_bytes": 1 << 20,
        "max_batch": 8,
        "max_context": 128,
        "micro_batch_tokens": 1024,
    }
    return footprint.Use(**settings | more)


def test_sizes_share_the_base_with_the_torch_engine(vllm_models) -> None:
    ours, theirs = footprint.group(use(vllm_models["tied"])), footprint.group(use(vllm_models["tied"], engine="torch"))
    assert (ours.base_bytes, ours.base_form) == (theirs.base_bytes, theirs.base_form)
    assert ours.park_bytes == 1 << 20
    more = footprint.group(use(vllm_models["tied"], lora_max_rank=9))
    assert (
        more.device_bytes > ours.device_bytes == footprint.group(use(vllm_models["tied"], lora_max_rank=3)).device_bytes
    )


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"head_dim": 16}, "heads of 16"),
        ({"vocab_size": 300_000}, "more than"),
        ({"max_position_embeddings": 64}, "positions"),
    ],
)
def test_models_that_it_does_not_serve(vllm_models, tmp_path: Path, config: dict, said: str) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((Path(vllm_models["tied"]) / name).read_bytes())
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    with pytest.raises(BadInput, match=said):
        footprint.group(use(str(tmp_path)))


@pytest.mark.parametrize(
    ("more", "said"),
    [({"kv_bytes": 4096}, "kv_bytes"), ({"lora_max_rank": 600}, "max_rank"), ({"role": Role.TRAIN}, "samples only")],
)
def test_settings_that_it_does_not_take(vllm_models, more: dict, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        footprint.group(use(vllm_models["tied"], **more))


@pytest.mark.parametrize(("version", "said"), [(None, "not installed"), ("0.31.0", "0.31.0 is installed")])
def test_a_missing_or_other_vllm(vllm_models, monkeypatch, version: str | None, said: str) -> None:
    monkeypatch.setattr(engines, "installed", lambda distribution: version)
    node = Replica()
    with pytest.raises(BadInput, match=said):
        build(node.replica_spec(vllm_models["tied"]), node.device, node.map)


def test_sizes_need_neither_torch_nor_vllm() -> None:
    code = "import sys, plexrl.engines.vllm.sizing; assert not {'torch', 'vllm'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_ranks_are_rounded_up_to_what_vllm_takes() -> None:
    assert [sizing.rank_of(rank) for rank in (1, 8, 9, 33, 512)] == [8, 8, 16, 64, 512]


def test_a_spec_of_another_role(vllm_models) -> None:
    node = Replica()
    with pytest.raises(BadInput, match="samples only"):
        build(structs.replace(node.replica_spec(vllm_models["tied"]), role=Role.TRAIN), node.device, node.map)
