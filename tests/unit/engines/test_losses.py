"""Every loss against its plain float64 reference, sums over calls and micro-batches, masks, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tinker.proto import tinker_public_pb2 as pb
from torch import Tensor
from transformers import AutoModelForCausalLM

from plexrl.engines.losses import LOSSES
from plexrl.engines.protocol import UserError
from plexrl.engines.torch import batch
from plexrl.engines.torch import losses as torch_losses
from plexrl.types import Role
from tests.unit.engines import reference_losses
from tests.unit.engines.conftest import VOCABULARY, Node, logprobs, loss, request, run

Datum = dict[str, np.ndarray]
SEEDS = st.integers(0, 2**32 - 1)
EVERY = pytest.mark.parametrize("name", list(LOSSES))
CONFIG = {
    "ppo": {"clip_low_threshold": 0.7, "clip_high_threshold": 1.1},
    "cispo": {"clip_low_threshold": 0.5, "clip_high_threshold": 1.5},
    "dro": {"beta": 0.3},
    "gspo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.05},
    "stable_reinforce": {"kl_coeff": 0.2},
}


def sampled_data(name: str, seed: int, lengths: tuple[int, ...] = (5, 12, 9, 17)) -> list[Datum]:
    """Random prompts and answers, with everything that the loss may be given."""
    rng = np.random.default_rng(seed)
    data = []
    for length in lengths:
        tokens = rng.integers(3, VOCABULARY, length + 1)
        given: Datum = {"tokens": tokens[:-1], "target_tokens": tokens[1:].astype(np.int64)}
        sampled = np.arange(length) >= length // 3
        if name == "cross_entropy":
            given["weights"] = (rng.normal(size=length) * sampled).astype(np.float32)
        else:
            given["advantages"] = (rng.normal(size=length) * sampled).astype(np.float32)
            given["advantages"][rng.integers(length)] = 0
            given["logprobs"] = ((rng.normal(size=length) - 8) * sampled).astype(np.float32)
        if name == "gspo":
            given["sequence_ratio_mask"] = sampled.astype(np.float32)
        if name in ("ppo", "cispo", "gspo") and rng.random() < 0.5:
            given["clip_low_threshold"] = rng.uniform(0.3, 1, length).astype(np.float32)
            given["clip_high_threshold"] = rng.uniform(1, 2, length).astype(np.float32)
        if name == "stable_reinforce":
            given["sampled"] = sampled
        data.append(given)
    return data


def body(name: str, data: list[Datum], **config: float | str) -> bytes:
    """A request with loss_fn_config as the SDK writes it, and provenance where a datum says what was sampled."""
    inputs = [{key: value for key, value in item.items() if key != "sampled"} for item in data]
    message = pb.ForwardBackwardRequest.FromString(request(name, inputs))
    for key, value in config.items():
        if isinstance(value, str):
            message.loss_fn_config_v2[key].text = value
        else:
            message.loss_fn_config[key] = value
            message.loss_fn_config_v2[key].number = value
    for item, datum in zip(data, message.data, strict=True):
        if "sampled" in item:
            prompt = int(np.argmax(item["sampled"]))
            for spans in (datum.model_input_spans, datum.loss_fn_input_spans):
                spans.add().prompt_tokens.MergeFrom(pb.PromptProvenanceSpan(sequence_id="s:0", length=prompt))
                spans.add().sampled_tokens.MergeFrom(
                    pb.SampledProvenanceSpan(sequence_id="s:0", length=len(item["sampled"]) - prompt)
                )
    return message.SerializeToString()


def trainer(node: Node, models: dict[str, str], rank: int | None = None, micro_batch_tokens: int = 24):
    kind = "full" if rank is None else "lora"
    engine = node.build(models["tied"], Role.TRAIN, kind, micro_batch_tokens=micro_batch_tokens)
    engine.create("d", node.state(models["tied"], rank), rank, 3, True, True, True)
    return engine


def gradients(engine) -> dict[str, Tensor]:
    """What the engine holds, taken away from it."""
    bound, _ = engine._use(engine._deployments["d"])
    found = {key: value.clone() for key, value in bound.views["grads"].items()}
    bound.grads.zero_()
    return found


def close(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float) -> None:
    """Within the tolerance of the largest element of each tensor."""
    assert got.keys() == want.keys()
    for key, value in want.items():
        torch.testing.assert_close(
            got[key].double(), value.double(), rtol=0, atol=tolerance * max(float(value.abs().max()), 1e-6)
        )


# -- formulas ----------------------------------------------------------------------------------------------------------


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
    assert float(got) == pytest.approx(float(want), rel=1e-4, abs=1e-4 * size)
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
    assert loss(result.body) == pytest.approx(float(total), rel=1e-4)
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
    assert float(got) == pytest.approx(-4 * 1.2)
    assert not mine.grad.any()


# -- sums --------------------------------------------------------------------------------------------------------------


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


# -- bad input ---------------------------------------------------------------------------------------------------------

RL = [name for name in LOSSES if name != "cross_entropy"]


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
