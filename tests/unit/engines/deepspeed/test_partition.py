"""Which elements a rank has, what they take, and what is refused."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest

from plexrl.config import engines as chosen
from plexrl.engines import footprint, layout
from plexrl.engines.deepspeed import build, sizing
from plexrl.engines.deepspeed.partition import Partition, buckets
from plexrl.engines.protocol import EngineSpec
from plexrl.types import BadInput, Role

ODD = [("a", (3, 5), "float32"), ("b", (7,), "float32"), ("c", (2, 9), "float32"), ("d", (1,), "float32")]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("world", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_element_is_some_ranks_and_nobody_elses(stage: int, world: int, dtype: str) -> None:
    specs = [(name, shape, dtype) for name, shape, _ in ODD]
    cuts = Partition(specs, stage, world)
    taken: dict[int, set[int]] = {rank: set() for rank in range(world)}
    for name, shape, _ in specs:
        at = 0
        for rank in range(world):
            cut = cuts.cut(name, rank)
            if not cut.count:
                continue
            assert cut.start == at
            at += cut.count
            places = set(range(cut.at, cut.at + cut.count))
            assert not places & taken[rank] and max(places) < cuts.part
            taken[rank] |= places
        assert at == math.prod(shape)
    assert cuts.part * world == cuts.total


@pytest.mark.parametrize("world", [1, 2, 3])
def test_replicated_weights_lie_as_a_snapshot_does(world: int) -> None:
    held = buckets(ODD, None, 2, world)["weights"]
    assert held[: len(ODD)] == ODD
    assert layout.packed(held) >= Partition(ODD, 2, world).total * 4


def use(stage: int, world: int, model_dir: str, kind: str = "full") -> footprint.Use:
    spec = EngineSpec(engine="deepspeed", role=Role.TRAIN, kind=kind, model_dir=model_dir, dtype="bfloat16")
    return footprint.Use(
        **{n: getattr(spec, n) for n in footprint.Use.__struct_fields__} | {"zero_stage": stage, "world": world}
    )


def test_ranks_take_less_the_more_they_share_out(models: dict[str, str]) -> None:
    sizes = [sizing.sizes(use(stage, 2, models["untied"])).device_bytes for stage in (1, 2, 3)]
    assert sizes[0] > sizes[1] > sizes[2]
    assert sizing.sizes(use(3, 4, models["untied"])).device_bytes < sizes[2]
    for kind in ("full", "lora"):
        trained = footprint.Trained(lora_rank=None if kind == "full" else 32, attn=True, mlp=True, unembed=True)
        group = use(2, 3, models["untied"], kind)
        assert footprint.state(group, trained) <= sizing.sizes(group).device_bytes


def test_a_stage_that_is_not_served_is_refused_at_once(models: dict[str, str]) -> None:
    with pytest.raises(BadInput, match="zero_stage 0 is not served"):
        sizing.sizes(use(0, 2, models["untied"]))
    with pytest.raises(BadInput, match="zero_stage 0 is not served"):
        build(EngineSpec(engine="deepspeed", role=Role.TRAIN, kind="full", model_dir=models["untied"]), None, None)


@pytest.mark.parametrize(("version", "said"), [(None, "is not installed here"), ("0.18.0", "0.18.0 is installed")])
def test_a_missing_or_another_deepspeed_is_named(monkeypatch, version: str | None, said: str) -> None:
    from plexrl.engines.deepspeed import start

    monkeypatch.setattr(chosen, "installed", lambda name: version)
    with pytest.raises(BadInput, match=said):
        start.load("cpu")


def test_sizing_needs_neither_torch_nor_deepspeed() -> None:
    script = "import sys; import plexrl.engines.deepspeed.sizing; print({'torch', 'deepspeed'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"


def test_preparing_compiles_nothing(tmp_path) -> None:
    command = [sys.executable, "-m", "plexrl.engines.deepspeed.prepare", "--cache", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=True)
    assert "nothing to compile" in done.stdout
    assert list(tmp_path.iterdir()) == []
