"""LoRA training against plain peft; several adapters on one base."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from plexrl.engines import layout
from plexrl.engines.protocol import UserError
from plexrl.engines.torch.lora import ALPHA
from plexrl.types import BadInput, Role
from tests.unit.engines.conftest import Node, loss, request, run, sft
from tests.unit.engines.test_train_full import ADAM, reference_logprobs, reference_step

OPTIM = json.dumps({"adam_params": ADAM}).encode()


def trainer(node: Node, model_dir: str, **more: object):
    return node.build(model_dir, Role.TRAIN, "lora", micro_batch_tokens=24, **more)


def add(node: Node, engine, model_dir: str, name: str, rank: int = 4, unembed: bool = True, seed: int = 3) -> None:
    engine.create(name, node.state(model_dir, rank, unembed), rank, seed, True, True, unembed)


def step(engine, name: str, seed: int) -> float:
    result, _ = run(engine.forward_backward(name, request("cross_entropy", sft(seed)), False))
    engine.optim_step(name, OPTIM)
    return loss(result.body)


def weights(engine, name: str) -> dict[str, torch.Tensor]:
    bound, _ = engine._use(engine._deployments[name])
    return {key: value.clone() for key, value in bound.views["weights"].items()}


@pytest.mark.parametrize("name", ["tied", "untied", "qwen"])
def test_steps_equal_plain_peft(node: Node, models: dict[str, str], name: str, tmp_path) -> None:
    engine = trainer(node, models[name])
    add(node, engine, models[name], "d")
    engine.save("d", tmp_path / "start", optimizer=False)
    base = AutoModelForCausalLM.from_pretrained(models[name])
    model = PeftModel.from_pretrained(base, tmp_path / "start", is_trainable=True)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert len(trained) == 2 * (7 * 2 + 1)
    optimizer = torch.optim.AdamW(trained)
    for count in range(3):
        value, _ = reference_step(model, optimizer, sft(count), ADAM)
        assert step(engine, "d", count) == pytest.approx(value, rel=1e-4)
    engine.save("d", tmp_path / "end", optimizer=True)
    saved = load_file(tmp_path / "end" / "adapter_model.safetensors")
    for key, tensor in model.named_parameters():
        if tensor.requires_grad:
            # Adam's first steps are +-lr whatever the gradient's size, so rounding near zero may show as a step.
            torch.testing.assert_close(saved[key.replace(".default", "")], tensor.detach(), atol=3e-4, rtol=1e-2)


def test_gradients_equal_plain_peft(node: Node, models: dict[str, str], tmp_path) -> None:
    engine = trainer(node, models["qwen"])
    add(node, engine, models["qwen"], "d")
    step(engine, "d", 5)  # so that B is not zero
    engine.save("d", tmp_path / "start", optimizer=False)
    base = AutoModelForCausalLM.from_pretrained(models["qwen"])
    model = PeftModel.from_pretrained(base, tmp_path / "start", is_trainable=True)
    for item in sft(1):
        (-(reference_logprobs(model, item) * torch.from_numpy(item["weights"])).sum()).backward()
    run(engine.forward_backward("d", request("cross_entropy", sft(1)), False))
    bound, _ = engine._use(engine._deployments["d"])
    for key, parameter in model.named_parameters():
        if parameter.requires_grad:
            grad = bound.views["grads"][key.replace(".default", "")]
            torch.testing.assert_close(grad, parameter.grad, atol=1e-3, rtol=1e-3)


def test_fresh_adapter_is_the_base_and_shaped_as_pefts(node: Node, models: dict[str, str]) -> None:
    engine = trainer(node, models["tied"])
    add(node, engine, models["tied"], "d")
    base = AutoModelForCausalLM.from_pretrained(models["tied"])
    plain = get_peft_model(
        base, LoraConfig(r=4, lora_alpha=ALPHA, target_modules=list(layout.ATTENTION | layout.MLP) + ["lm_head"])
    )
    names = {key.replace(".default", ""): p.shape for key, p in plain.named_parameters() if p.requires_grad}
    mine = weights(engine, "d")
    assert {key: value.shape for key, value in mine.items()} == names
    assert all(value.abs().max() == 0 for key, value in mine.items() if "lora_B" in key)
    assert all(value.abs().max() > 0 for key, value in mine.items() if "lora_A" in key)


def test_adapters_of_one_base_do_not_touch_each_other(node: Node, models: dict[str, str]) -> None:
    """Three adapters of two shapes share one slot; each ends bit for bit where it ends alone."""
    alone = {}
    for name, rank, unembed in (("a", 4, True), ("b", 8, False), ("c", 4, True)):
        engine = trainer(Node(), models["tied"], lora_slots=1)
        own = Node()
        engine = trainer(own, models["tied"], lora_slots=1)
        add(own, engine, models["tied"], name, rank, unembed, seed=rank)
        alone[name] = ([step(engine, name, ord(name) + i) for i in range(3)], weights(engine, name))
    engine = trainer(node, models["tied"], lora_slots=1)
    for name, rank, unembed in (("a", 4, True), ("b", 8, False), ("c", 4, True)):
        add(node, engine, models["tied"], name, rank, unembed, seed=rank)
    losses = {name: [] for name in alone}
    for count in range(3):
        for name in alone:
            losses[name].append(step(engine, name, ord(name) + count))
    for name, (want, end) in alone.items():
        assert losses[name] == want
        mine = weights(engine, name)
        assert all(torch.equal(mine[key], end[key]) for key in end)


def test_a_switch_moves_only_the_adapter_and_only_what_is_dirty(node: Node, models: dict[str, str]) -> None:
    engine = trainer(node, models["tied"], lora_slots=1)
    for name in "ab":
        add(node, engine, models["tied"], name, seed=ord(name))
        step(engine, name, 1)
    arch = layout.architecture(models["tied"])
    one = layout.packed(layout.adapter_specs(arch, 4, True, True, True))
    result, _ = run(engine.forward_backward("a", request("cross_entropy", sft(2)), True))
    # Out: b's weights, moments, step counter. In: a's weights; nothing else is needed to look ahead.
    assert result.moved_bytes == (3 * one + 64) + one
    assert result.moved_us > 0
    # Gradients are zero and are not copied; the step needs all that the other one had to give up.
    result, _ = run(engine.forward_backward("a", request("cross_entropy", sft(2)), False))
    assert result.moved_bytes == 0
    assert engine.optim_step("a", OPTIM).moved_bytes == 2 * one + 64


def test_rank_and_shape_are_checked(node: Node, models: dict[str, str], tmp_path) -> None:
    engine = trainer(node, models["tied"])
    with pytest.raises(BadInput, match="rank 9 is outside 1 to 8"):
        engine.create("d", node.state(models["tied"], 9), 9, 0, True, True, True)
    add(node, engine, models["tied"], "d")
    with pytest.raises(BadInput, match="exists already"):
        add(node, engine, models["tied"], "d")
    engine.save("d", tmp_path / "s", optimizer=False)
    add(node, engine, models["tied"], "e", rank=8)
    with pytest.raises(UserError, match="rank"):
        engine.load("e", tmp_path / "s", optimizer=False)
    with pytest.raises(UserError, match="no optimizer"):
        engine.load("d", tmp_path / "s", optimizer=True)


def test_bfloat16_base_has_float32_adapter(node: Node, models: dict[str, str]) -> None:
    engine = trainer(node, models["tied"], dtype="bfloat16")
    add(node, engine, models["tied"], "d")
    first = step(engine, "d", 0)
    losses = [step(engine, "d", 0) for _ in range(8)]
    assert losses[-1] < first
    assert all(tensor.dtype == torch.float32 for tensor in weights(engine, "d").values())
    assert np.isfinite(losses).all()
