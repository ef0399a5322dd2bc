"""Sizes computed from headers are those that the engines use; no torch is imported for them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from plexrl.engines import layout, sizing
from plexrl.engines.torch.home import manifest
from plexrl.types import BadInput, Role


def test_layout_is_the_manifests(models: dict[str, str]) -> None:
    for folder in models.values():
        arch = layout.architecture(folder)
        for rank in (None, 5):
            buckets = layout.state_buckets(layout.weight_specs(arch, "float32", rank, True, True, True))
            kind = "full" if rank is None else "lora"
            size = sizing.state_bytes(folder, "float32", kind, rank, True, True, True)
            assert manifest(buckets).size == size == layout.packed_all(buckets)
            assert (
                sizing.snapshot_bytes(folder, "float32", kind, rank, True, True, True)
                == manifest({"weights": buckets["weights"]}).size
            )


def test_sizes_add_up(models: dict[str, str]) -> None:
    tied, untied = models["tied"], models["untied"]
    ask = ("float32", Role.SAMPLE, "lora", 2, 8, 1 << 20)
    small, large = sizing.sizes(tied, *ask), sizing.sizes(untied, *ask)
    assert large.base_bytes - small.base_bytes == 512 * 64 * 4  # the head of its own
    assert small.device_bytes == small.base_bytes + small.park_bytes + 2 * sizing.slot_bytes(tied, Role.SAMPLE, 8)
    assert small.park_bytes <= 1 << 20
    train = sizing.sizes(tied, "float32", Role.TRAIN, "full", 2, 8, 0)
    assert train.device_bytes == sizing.state_bytes(tied, "float32", "full", None, True, True, True)
    assert sizing.sizes(tied, "bfloat16", Role.TRAIN, "full", 2, 8, 0).base_bytes * 2 == small.base_bytes


def test_generator_state_has_the_size_of_the_layout() -> None:
    assert torch.Generator().get_state().numel() == layout.RNG_BYTES


def test_no_torch_for_sizes(models: dict[str, str]) -> None:
    code = (
        "import sys; from plexrl.engines import protocol, sizing;"
        f"sizing.sizes({models['tied']!r}, 'float32', 'train', 'lora', 1, 8, 0);"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])


def test_what_is_no_model_is_refused(models: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"config\.json"):
        layout.architecture(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(BadInput, match="no safetensors"):
        layout.architecture(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"\x80\x02pickle")
    with pytest.raises(BadInput, match="not a safetensors file"):
        layout.architecture(str(tmp_path))
    with pytest.raises(BadInput, match="nothing to adapt"):
        sizing.state_bytes(models["tied"], "float32", "lora", 4, False, False, False)
    with pytest.raises(BadInput, match="rank for lora"):
        sizing.state_bytes(models["tied"], "float32", "lora", None, True, True, True)
    with pytest.raises(BadInput, match="not one token"):
        sizing.sizes(models["tied"], "float32", Role.SAMPLE, "lora", 1, 8, 100)
