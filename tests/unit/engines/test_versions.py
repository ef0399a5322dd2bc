"""From trainer to sampler: published versions, adapters side by side, full parameters one after the other."""

from __future__ import annotations

import json

import numpy as np
import pytest
from peft import PeftModel
from transformers import AutoModelForCausalLM

from plexrl.memory.transfer import Memcpy
from plexrl.types import BadInput, Role
from tests.unit.engines.conftest import Node, request, run, sft
from tests.unit.engines.test_sample import BOUND, ask, drain, draws, forced, sampler, tokens
from tests.unit.engines.test_train_full import ADAM

FAST = json.dumps({"adam_params": ADAM | {"learning_rate": 0.02}}).encode()


def trained(node: Node, model_dir: str, rank: int | None, seed: int, folder, unembed: bool = True):
    """A version's slab after two steps; the same weights in folder."""
    engine = node.build(model_dir, Role.TRAIN, "full" if rank is None else "lora")
    engine.create("d", node.state(model_dir, rank, unembed), rank, seed, True, True, unembed)
    for count in range(2):
        run(engine.forward_backward("d", request("cross_entropy", sft(seed + count)), False))
        engine.optim_step("d", FAST)
    slab = node.snapshot(model_dir, rank, unembed)
    engine.publish("d", slab, folder)
    engine.offload()
    return slab


@pytest.mark.parametrize("name", ["tied", "qwen"])
def test_adapters_of_several_shapes_in_one_batch(models: dict[str, str], tmp_path, name: str) -> None:
    """Three adapters and the base at once, over two slots; each draws by its own weights."""
    node = Node(1 << 28)
    shapes = {"a": (4, True), "b": (8, False), "c": (4, True)}
    slabs = {
        version: trained(node, models[name], rank, ord(version), tmp_path / version, unembed)
        for version, (rank, unembed) in shapes.items()
    }
    engine = sampler(node, models[name], lora_slots=2)
    for version, (rank, unembed) in shapes.items():
        engine.attach(version, slabs[version], rank, True, True, unembed)
    calls = {}
    for index in range(8):
        version = ("a", "b", "c", None)[index % 4]
        calls[str(index)] = version
        engine.add(str(index), version, ask([7, 8, 9 + index], 2, max_tokens=4 + index))
        engine.step()
    with pytest.raises(BadInput, match="in use"):
        engine.detach(calls[str(index - 1)])
    found = drain(engine)
    seen = set()
    for version in (None, *shapes):
        model = AutoModelForCausalLM.from_pretrained(models[name])
        if version is not None:
            model = PeftModel.from_pretrained(model, tmp_path / version).eval()
        for index in (i for i, v in calls.items() if v == version and i in found):
            for sequence in found[index].sequences:
                want = forced(model, [7, 8, 9 + int(index)], tokens(sequence))
                np.testing.assert_allclose(draws(sequence), want, atol=BOUND)
        seen.add(round(float(forced(model, [7, 8], [9])[0]), 4))
    assert len(seen) == 4
    engine.detach("a")
    with pytest.raises(BadInput, match="not attached"):
        engine.add("x", "a", ask([7], max_tokens=1))


def test_full_versions_take_turns(models: dict[str, str], tmp_path) -> None:
    node = Node(1 << 28)
    slabs = {version: trained(node, models["tied"], None, ord(version), tmp_path / version) for version in "ab"}
    engine = sampler(node, models["tied"], "full")
    for version, slab in slabs.items():
        engine.attach(version, slab, None, True, True, True)
    calls = {}
    for index in range(6):
        calls[str(index)] = ("a", "b", None)[index % 3]
        engine.add(str(index), calls[str(index)], ask([7, 8, 9 + index], 2, max_tokens=5))
    found = {}
    while engine.live():
        for call_id, result in engine.step():
            found[call_id] = result
        assert len({s.request.version for s in engine._table.rows}) <= 1
    assert len(found) == 6


def test_full_version_draws_by_its_own_weights(models: dict[str, str], tmp_path) -> None:
    node = Node(1 << 28)
    slab = trained(node, models["untied"], None, 1, tmp_path / "a")
    engine = sampler(node, models["untied"], "full")
    engine.attach("a", slab, None, True, True, True)
    for name, version in (("x", "a"), ("y", None), ("z", "a")):
        engine.add(name, version, ask([7, 8, 9], 2, max_tokens=6))
    found = drain(engine)
    for folder, names in ((str(tmp_path / "a"), "xz"), (models["untied"], "y")):
        model = AutoModelForCausalLM.from_pretrained(folder)
        for name in names:
            for sequence in found[name].sequences:
                np.testing.assert_allclose(draws(sequence), forced(model, [7, 8, 9], tokens(sequence)), atol=BOUND)
    engine.detach("a")
    engine.add("w", None, ask([7], max_tokens=1))
    drain(engine)


def test_an_update_that_breaks_off_draws_nothing(models: dict[str, str], tmp_path, monkeypatch) -> None:
    """After the first bytes of a new version no token is drawn before all that its layers need is there."""
    node = Node(1 << 28)
    slabs = {version: trained(node, models["untied"], None, ord(version), tmp_path / version) for version in "ab"}
    engine = sampler(node, models["untied"], "full")
    for version, slab in slabs.items():
        engine.attach(version, slab, None, True, True, True)
    engine.add("x", "a", ask([7, 8, 9], max_tokens=2))
    drain(engine)
    copy, copies = Memcpy.copy, []

    def breaks(self, target, source) -> None:
        copies.append(target.numel())
        if len(copies) == 3:
            raise OSError("no more of it today")
        copy(self, target, source)

    engine.add("y", "b", ask([7, 8, 9], 2, max_tokens=6))
    with monkeypatch.context() as patch:
        patch.setattr(Memcpy, "copy", breaks)
        with pytest.raises(OSError, match="no more of it"):
            engine.step()
    assert len(copies) == 3 and engine.drawn("y") == (0, b"")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "b")
    engine.cancel("y")
    engine.add("z", "b", ask([7, 8, 9], 2, max_tokens=6))
    for sequence in drain(engine)["z"].sequences:
        np.testing.assert_allclose(draws(sequence), forced(model, [7, 8, 9], tokens(sequence)), atol=BOUND)
