"""Losses are sums: over calls, micro-batches and targets; what weighs nothing changes nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from tests.unit.engines.conftest import VOCABULARY, Node, loss, run
from tests.unit.engines.lossdata import CONFIG, EVERY, SEEDS, Datum, body, close, gradients, sampled_data, trainer


@pytest.fixture(scope="module")
def engines(models: dict[str, str]) -> dict[int, object]:
    """By micro-batch size: one datum at a time, a few, all at once."""
    return {size: trainer(Node(), models, micro_batch_tokens=size) for size in (1, 24, 2048)}


def split(data: list[Datum], seed: int) -> list[list[Datum]]:
    """In random order into random pieces, none empty."""
    rng = np.random.default_rng(seed)
    mixed = [data[i] for i in rng.permutation(len(data))]
    cuts = np.flatnonzero(rng.random(len(data) - 1) < 0.5) + 1
    return [mixed[a:b] for a, b in zip([0, *cuts], [*cuts, len(mixed)], strict=True)]


def summed(engine, name: str, calls: list[list[Datum]], **config: float) -> tuple[float, dict[str, Tensor]]:
    """loss:sum over the calls, and the gradients that they left together."""
    total = sum(loss(run(engine.forward_backward("d", body(name, call, **config), False))[0].body) for call in calls)
    return total, gradients(engine)


@EVERY
@settings(max_examples=6)
@given(seed=SEEDS)
def test_calls_and_micro_batches_add_up(engines: dict[int, object], name: str, seed: int) -> None:
    """A batch has one loss and one gradient, however the client chunks it and the engine packs and pads it."""
    rng = np.random.default_rng(seed)
    lengths = tuple(int(n) for n in rng.integers(3, 40, 6))
    data, config = sampled_data(name, seed, lengths), CONFIG.get(name, {})
    total, whole = summed(engines[2048], name, [data], **config)
    for size in (1, 24):
        value, parts = summed(engines[size], name, split(data, seed), **config)
        assert value == pytest.approx(total, rel=1e-4, abs=1e-3)
        close(parts, whole, 1e-3)


@EVERY
@settings(max_examples=4)
@given(seed=SEEDS)
def test_calls_add_up_bit_for_bit_over_equal_micro_batches(engines: dict[int, object], name: str, seed: int) -> None:
    """Micro-batches go longest first; calls that bring the same ones in the same order leave the same bits."""
    rng = np.random.default_rng(seed)
    lengths = tuple(sorted((int(n) for n in rng.choice(np.arange(3, 40), 5, replace=False)), reverse=True))
    data = sampled_data(name, seed, lengths)
    _, whole = summed(engines[1], name, [data])
    _, parts = summed(engines[1], name, [[item] for item in data])
    assert all(torch.equal(whole[key], parts[key]) for key in whole)


@EVERY
def test_losses_are_sums_and_no_means(engines: dict[int, object], name: str) -> None:
    data = sampled_data(name, 4)
    once, gradient = summed(engines[24], name, [data])
    twice, double = summed(engines[24], name, [data + data])
    assert twice == pytest.approx(2 * once, rel=1e-4)
    close(double, {key: 2 * value for key, value in gradient.items()}, 1e-3)


@EVERY
def test_positions_without_weight_change_nothing(engines: dict[int, object], name: str) -> None:
    """Other targets, and other logprobs where no advantage is, leave the same bits."""
    data = sampled_data(name, 5)
    weighing = "weights" if name == "cross_entropy" else "advantages"
    changed = []
    for item in data:
        idle = item[weighing] == 0
        if name in ("dro", "stable_reinforce"):
            idle &= item["logprobs"] == 0  # what was sampled is held to the sampler whatever its advantage
        if name == "gspo":
            idle &= item["sequence_ratio_mask"] == 0
        assert idle.any()
        other = {"target_tokens": np.where(idle, 7, item["target_tokens"])}
        if name not in ("cross_entropy", "dro"):
            other["logprobs"] = np.where(idle, -1, item["logprobs"]).astype(np.float32)
        changed.append(item | other)
    before, gradient = summed(engines[24], name, [data])
    after, same = summed(engines[24], name, [changed])
    assert before == after
    assert all(torch.equal(gradient[key], same[key]) for key in gradient)


def test_several_targets_per_position_are_their_sum(engines: dict[int, object]) -> None:
    """(N, K) targets against K requests of one target each; datums of different K in one micro-batch."""
    rng = np.random.default_rng(6)
    data = []
    for length, width in ((9, 3), (14, 1), (5, 2)):
        tokens = rng.integers(3, VOCABULARY, length)
        targets = rng.integers(3, VOCABULARY, (length, width))
        weights = rng.normal(size=(length, width)).astype(np.float32)
        data.append({"tokens": tokens, "target_tokens": targets, "weights": weights})
    total, whole = summed(engines[2048], "cross_entropy", [data])
    single = [
        {"tokens": d["tokens"], "target_tokens": d["target_tokens"][:, k].copy(), "weights": d["weights"][:, k].copy()}
        for d in data
        for k in range(d["target_tokens"].shape[1])
    ]
    value, parts = summed(engines[24], "cross_entropy", [single])
    assert value == pytest.approx(total, rel=1e-4)
    close(parts, whole, 1e-3)
