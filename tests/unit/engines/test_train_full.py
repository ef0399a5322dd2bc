"""Full-parameter training against plain transformers and torch.optim.AdamW."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from plexrl.types import Role
from tests.unit.engines.conftest import Node, logprobs, loss, request, run, sft

ADAM = {"learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "grad_clip_norm": 1.0}


def reference_logprobs(model, item: dict[str, np.ndarray]) -> torch.Tensor:
    logits = model(input_ids=torch.from_numpy(item["tokens"])[None].long()).logits[0].float()
    return torch.log_softmax(logits, -1).gather(1, torch.from_numpy(item["target_tokens"])[:, None])[:, 0]


def reference_step(model, optimizer, data, params) -> tuple[float, list[np.ndarray]]:
    parts = [reference_logprobs(model, item) for item in data]
    value = sum(-(lp * torch.from_numpy(item["weights"])).sum() for lp, item in zip(parts, data, strict=True))
    value.backward()
    if params["grad_clip_norm"]:
        torch.nn.utils.clip_grad_norm_(
            [p for g in optimizer.param_groups for p in g["params"]], params["grad_clip_norm"]
        )
    optimizer.param_groups[0].update(
        lr=params["learning_rate"],
        betas=(params["beta1"], params["beta2"]),
        eps=params["eps"],
        weight_decay=params["weight_decay"],
    )
    optimizer.step()
    optimizer.zero_grad()
    return value.item(), [lp.detach().numpy() for lp in parts]


@pytest.mark.parametrize("name", ["tied", "untied", "qwen"])
def test_steps_equal_plain_transformers(node: Node, models: dict[str, str], name: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(models[name])
    optimizer = torch.optim.AdamW(model.parameters())
    engine = node.build(models[name], Role.TRAIN, "full", micro_batch_tokens=24)
    engine.create("d", node.state(models[name], None), None, 0, True, True, True)
    for step in range(3):
        data = sft(step)
        params = ADAM | {"learning_rate": 1e-3 * (step + 1), "grad_clip_norm": (0.0, 1.0, 5.0)[step]}
        value, expected = reference_step(model, optimizer, data, params)
        result, yields = run(engine.forward_backward("d", request("cross_entropy", data), False))
        assert yields == 2
        assert result.units == sum(len(item["tokens"]) for item in data)
        assert loss(result.body) == pytest.approx(value, rel=1e-5)
        for got, want in zip(logprobs(result.body), expected, strict=True):
            np.testing.assert_allclose(got, want, atol=2e-4)
        answer = engine.optim_step("d", json.dumps({"adam_params": params}).encode())
        assert json.loads(answer.body)["metrics"]["grad_norm"] > 0
    views = engine._use(engine._deployments["d"], "weights")[0].views["weights"]
    for key, tensor in model.named_parameters():
        torch.testing.assert_close(views[key], tensor.detach(), atol=2e-5, rtol=1e-3)
