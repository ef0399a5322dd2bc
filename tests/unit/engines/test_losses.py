"""Every loss against its plain float64 reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from plexrl.engines.losses import LOSSES
from plexrl.engines.torch import batch
from plexrl.engines.torch import losses as torch_losses
from tests.unit.engines import reference_losses
from tests.unit.engines.conftest import VOCABULARY, Node, logprobs, loss, request, run
from tests.unit.engines.lossdata import CONFIG, EVERY, SEEDS, body, close, gradients, sampled_data, trainer


@EVERY
@settings(max_examples=60)
@given(seed=SEEDS, config=st.booleans(), scale=st.sampled_from([0.01, 1.0, 5.0]))
def test_value_and_gradient_equal_the_float64_reference(name: str, seed: int, config: bool, scale: float) -> None:
    """Over logprobs: values, and gradients by autograd in float64. scale: how far the policy is from the sampler."""
    chosen = CONFIG.get(name, {}) if config else {}
    data = sampled_data(name, seed)
    work = batch.parse(body(name, data, **chosen), VOCABULARY, 128)
    rng = np.random.default_rng(seed + 1)
    anchors = [d.get("logprobs", np.full(len(d["tokens"]), -3, np.float32)) for d in data]
    policy = [(a + scale * rng.normal(size=a.shape)).astype(np.float32) for a in anchors]
    plain = [torch.tensor(p, dtype=torch.float64, requires_grad=True) for p in policy]
    settings_used = {key: setting.default for key, setting in LOSSES[name].settings.items()} | chosen
    want = sum(reference_losses.loss(name, d, p, settings_used) for d, p in zip(data, plain, strict=True))
    want.backward()

    inputs = {key: torch.from_numpy(np.concatenate([d.inputs[key] for d in work.data])) for key in work.data[0].inputs}
    rows = torch.repeat_interleave(torch.arange(len(data)), torch.tensor([len(p) for p in policy]))
    mine = torch.tensor(np.concatenate(policy))[:, None].requires_grad_()
    counts = torch_losses.counted(name, inputs, work.settings)
    got = torch_losses.value(name, mine, inputs, work.settings, counts, rows)
    got.backward()
    gradient = torch.cat([p.grad for p in plain])
    size = max(1.0, float(gradient.abs().max()))
    assert got.item() == pytest.approx(want.item(), rel=1e-4, abs=1e-4 * size)
    torch.testing.assert_close(mine.grad[:, 0].double(), gradient, rtol=1e-4, atol=1e-5 * size)
    assert not gradient[~counts].any()


@EVERY
def test_parameters_gradients_equal_a_float64_model(node: Node, models: dict[str, str], name: str) -> None:
    """The whole way: request, micro-batches, gradients of all parameters, against plain transformers in float64."""
    data, config = sampled_data(name, 1), CONFIG.get(name, {})
    model = AutoModelForCausalLM.from_pretrained(models["tied"]).double()
    total, plain = 0.0, []
    for item in data:
        logits = model(input_ids=torch.from_numpy(item["tokens"])[None]).logits[0]
        picked = torch.log_softmax(logits, -1).gather(1, torch.from_numpy(item["target_tokens"])[:, None])[:, 0]
        if "logprobs" in item:
            # A sampler near the policy, on both sides of every threshold.
            near = picked.detach().numpy() + 0.3 * np.random.default_rng(len(item["tokens"])).normal(size=len(picked))
            item["logprobs"] = np.where(item["logprobs"] != 0, near, 0).astype(np.float32)
        total = total + reference_losses.loss(name, item, picked, config)
        plain.append(picked.detach().numpy())
    total.backward()
    engine = trainer(node, models)
    result, yields = run(engine.forward_backward("d", body(name, data, **config), False))
    assert yields == 2
    assert loss(result.body) == pytest.approx(total.item(), rel=1e-4)
    for got, want in zip(logprobs(result.body), plain, strict=True):
        np.testing.assert_allclose(got, want, atol=2e-4)
    close(gradients(engine), {key: p.grad for key, p in model.named_parameters()}, 5e-4)


@EVERY
def test_forward_alone_has_the_same_value_and_no_gradient(node: Node, models: dict[str, str], name: str) -> None:
    engine = trainer(node, models)
    asked = body(name, sampled_data(name, 2))
    forward, _ = run(engine.forward_backward("d", asked, True))
    assert not any(value.any() for value in gradients(engine).values())
    both, _ = run(engine.forward_backward("d", asked, False))
    assert loss(forward.body) == pytest.approx(loss(both.body), rel=1e-5)


def test_left_out_weights_are_ones(node: Node, models: dict[str, str]) -> None:
    engine = trainer(node, models)
    data = sampled_data("cross_entropy", 3)
    ones = [item | {"weights": np.ones(len(item["tokens"]), np.float32)} for item in data]
    bare = [{key: item[key] for key in ("tokens", "target_tokens")} for item in data]
    bodies, found = [], []
    for each in (ones, bare):
        bodies.append(run(engine.forward_backward("d", request("cross_entropy", each), False))[0].body)
        found.append(gradients(engine))
    assert bodies[0] == bodies[1]
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])


def test_a_left_out_ratio_mask_marks_the_advantages(node: Node, models: dict[str, str]) -> None:
    engine = trainer(node, models)
    data = sampled_data("gspo", 3)
    for item in data:
        item["sequence_ratio_mask"] = (item["advantages"] != 0).astype(np.float32)
    bare = [{key: value for key, value in item.items() if key != "sequence_ratio_mask"} for item in data]
    assert len({run(engine.forward_backward("d", body("gspo", each), True))[0].body for each in (data, bare)}) == 1


@pytest.mark.parametrize("name", ["ppo", "gspo"])
def test_a_ratio_beyond_all_numbers_is_clipped_without_nan(name: str) -> None:
    """exp(200) is infinite in float32: the clipped side counts, and no 0 x inf comes into the gradient."""
    far = {
        "tokens": np.arange(3, 7),
        "target_tokens": np.arange(4, 8),
        "advantages": np.ones(4, np.float32),
        "logprobs": np.full(4, -200, np.float32),
    }
    work = batch.parse(body(name, [far]), VOCABULARY, 128)
    inputs = {key: torch.from_numpy(value.copy()) for key, value in work.data[0].inputs.items()}
    mine = torch.zeros(4, 1, requires_grad=True)
    counts = torch_losses.counted(name, inputs, work.settings)
    got = torch_losses.value(name, mine, inputs, work.settings, counts, torch.zeros(4, dtype=torch.int64))
    got.backward()
    assert got.item() == pytest.approx(-4 * 1.2)
    assert not mine.grad.any()
