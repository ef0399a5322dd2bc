"""What a loss cannot be given: the refusal says what, where and the mend, and nothing is lost."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from plexrl.engines.losses import LOSSES
from plexrl.engines.protocol import UserError
from plexrl.engines.torch import batch
from tests.unit.engines.conftest import VOCABULARY, Node, request, run
from tests.unit.engines.lossdata import EVERY, body, sampled_data, trainer


def spoilt(name: str, key: str, value: object) -> bytes:
    """A good request whose third datum has one input changed."""
    data = sampled_data(name, 7)
    data[2] = {k: v for k, v in data[2].items() if k != key} | ({} if value is None else {key: value})
    return body(name, data)


def faults(name: str) -> list[tuple[bytes, str]]:
    """(request, what the refusal says)"""
    good = sampled_data(name, 7)[2]
    length = len(good["tokens"])
    weighing = "weights" if name == "cross_entropy" else "advantages"
    numbers = [weighing] if name == "cross_entropy" else ["advantages", "logprobs"]
    found = [(spoilt(name, "target_tokens", None), f"datum 2: {name} needs 'target_tokens'. It takes target_tokens")]
    for key in numbers:
        nan, endless = good[key].copy(), good[key].copy()
        nan[-1], endless[-1] = np.nan, np.inf
        found += [
            (spoilt(name, key, nan), f"datum 2: {key} holds NaN or infinity. Send finite numbers"),
            (spoilt(name, key, endless), f"datum 2: {key} holds NaN or infinity"),
            (
                spoilt(name, key, good[key][1:]),
                rf"datum 2: {key} is float32\[{length - 1}\]. Send float32 \[{length}\]",
            ),
            (spoilt(name, key, good[key].astype(np.int64)), rf"datum 2: {key} is int64\[{length}\]. Send float32"),
        ]
        if name != "cross_entropy":
            found.append((spoilt(name, key, None), f"datum 2: {name} needs '{key}'. It takes target_tokens, logprobs"))
    found.append((spoilt(name, "mask", good[weighing]), f"datum 2: {name} does not use 'mask'. It takes target_tokens"))
    found.append(
        (body(name, [good], nonsense=1.0), f"'nonsense' in the loss_fn_config of {name} is unknown. It takes ")
    )
    for key in LOSSES[name].settings:
        where = f"'{key}' in the loss_fn_config of {name} is"
        found += [
            (body(name, [good], **{key: float("nan")}), f"{where} nan. Give "),
            (body(name, [good], **{key: -0.5}), f"{where} -0.5. Give "),
            (body(name, [good], **{key: "much"}), f"{where} the text 'much'. Give a number"),
        ]
    if "clip_high_threshold" in LOSSES[name].settings:
        found += [
            (body(name, [good], clip_high_threshold=0.2), "is 0.2. Give 1 to .* 1.2 for an epsilon of 0.2"),
            (body(name, [good], clip_low_threshold=1.1), "is 1.1. Give 0 to 1: it bounds the ratio itself"),
            (
                spoilt(name, "clip_high_threshold", np.full(length, 0.2, np.float32)),
                "datum 2: a clip_high_threshold is 0.2. Give 1 to",
            ),
        ]
    if name == "gspo":
        found.append((spoilt(name, "sequence_ratio_mask", np.zeros(length, np.float32)), "marks no position. Mark the"))
    if name == "stable_reinforce":
        found += [
            (
                spoilt(name, "sampled", None),
                "datum 2: stable_reinforce needs provenance. Say with Datum.with_provenance",
            ),
            (spoilt(name, "sampled", good["sampled"][1:]), f"datum 2: provenance does not tile its {length} targets"),
            (
                spoilt(name, "advantages", np.ones(length, np.float32)),
                "position 0 has an advantage and was not sampled",
            ),
        ]
    return found


@EVERY
def test_faults_are_named_and_lose_nothing(node: Node, models: dict[str, str], name: str) -> None:
    """A refused call leaves the gradients of the calls before it as they were, bit for bit."""
    engine = trainer(node, models)
    run(engine.forward_backward("d", body(name, sampled_data(name, 8)), False))
    bound, _ = engine._use(engine._deployments["d"])
    before = bound.grads.clone()
    assert before.any()
    for asked, text in faults(name):
        with pytest.raises(UserError, match=text):
            run(engine.forward_backward("d", asked, False))
    assert torch.equal(bound.grads, before)


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "gspo"])
def test_a_loss_beyond_all_numbers_is_refused(node: Node, models: dict[str, str], name: str) -> None:
    """Negative advantages are never clipped from above: the sampler's logprobs must be wrong."""
    engine = trainer(node, models)
    run(engine.forward_backward("d", body(name, sampled_data(name, 8)), False))
    bound, _ = engine._use(engine._deployments["d"])
    before = bound.grads.clone()
    data = sampled_data(name, 9)
    length = len(data[1]["tokens"])
    data[1] |= {"advantages": np.full(length, -1, np.float32), "logprobs": np.full(length, -1e4, np.float32)}
    with pytest.raises(UserError, match="the loss is not finite. Check the logprobs sent"):
        run(engine.forward_backward("d", body(name, data), False))
    assert torch.equal(bound.grads, before)


def test_unknown_losses() -> None:
    for name, text in (
        ("grpo", "'grpo' is no loss function. Use one of cross_entropy, "),
        ("custom", "in your program"),
    ):
        with pytest.raises(UserError, match=text):
            batch.parse(request(name, []), VOCABULARY, 128)
