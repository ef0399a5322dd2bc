"""Learned durations, the service and switch models, their fit, and the scores made of them."""

from math import isclose
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plexrl.scheduler.costs import (
    CALL_PRIOR_US,
    SWITCH_PRIOR,
    Learned,
    Observation,
    ServiceModel,
    SwitchModel,
    anticipation_us,
    hrrs,
    non_negative,
    service_prior,
)
from plexrl.types import BadInput, CallKind

TRUE = ServiceModel(
    prefill_us_per_token=40,
    decode_base_us=6_000,
    decode_us_per_sequence=110,
    train_us_per_token=130,
    forward_us_per_token=44,
    optim_us=60_000,
    call_us=2_000,
)


def record(model: ServiceModel, random: Random, kind: CallKind, noise: float = 0.0) -> Observation:
    """A call of that kind as the model would have it, off by at most `noise` of its time."""
    prompt, sequences, batch = random.randrange(10, 3000), random.randrange(1, 9), random.randrange(1, 256)
    each = random.randrange(100, 5000)
    tokens = each * sequences
    us = {
        CallKind.SAMPLE: model.sample_us(prompt, each, batch),
        CallKind.FORWARD: model.forward_us(tokens),
        CallKind.FORWARD_BACKWARD: model.train_us(tokens),
        CallKind.OPTIM_STEP: model.step_optimizer_us(),
    }[kind]
    us = round(us * random.uniform(1 - noise, 1 + noise))
    return Observation(kind=kind, prompt_tokens=prompt, tokens=tokens, sequences=sequences, batch=batch, seconds_us=us)


KINDS = [CallKind.SAMPLE, CallKind.FORWARD, CallKind.FORWARD_BACKWARD, CallKind.OPTIM_STEP]


# ---- learned


def test_the_prior_until_something_is_seen():
    assert (Learned(500).mean, Learned(500).upper, Learned(500).count) == (500, 1000, 0)
    assert (Learned().mean, Learned().upper) == (0, 0)


def test_by_hand():
    learned = Learned(1)
    learned.observe(100)
    assert (learned.mean, learned.upper, learned.count) == (100, 200, 1)  # deviation 50
    learned.observe(200)
    # deviation 50 + 0.3 * (100 - 50) = 65, mean 100 + 0.3 * 100 = 130
    assert (learned.mean, learned.upper, learned.count) == (130, 260, 2)


@given(st.integers(0, 10**12), st.integers(40, 100))
def test_what_is_always_the_same_is_known_exactly(us: int, times: int):
    learned = Learned()
    for _ in range(times):
        learned.observe(us)
    assert learned.mean == us and us <= learned.upper <= us * 1.000_01 + 1


@given(st.lists(st.integers(0, 10**12), min_size=1))
def test_the_mean_stays_among_what_was_seen(seen: list[int]):
    learned = Learned(10**15)
    for us in seen:
        learned.observe(us)
    assert min(seen) - 1 <= learned.mean <= max(seen) + 1
    assert learned.upper >= learned.mean and learned.count == len(seen)


# ---- the service model


def test_service_by_hand():
    assert TRUE.step_us(10) == 7_100
    assert TRUE.sample_us(100, 50, 10) == 2_000 + 4_000 + 50 * 7_100
    assert TRUE.train_us(1000) == 132_000
    assert TRUE.forward_us(1000) == 46_000
    assert TRUE.step_optimizer_us() == 62_000


@given(st.integers(0, 2**32))
def test_fit_finds_the_model_that_made_the_calls(seed: int):
    random = Random(seed)
    model, error = ServiceModel.fit(record(TRUE, random, kind) for kind in KINDS for _ in range(30))
    assert error < 1e-5
    for name in ServiceModel.__struct_fields__:
        assert isclose(getattr(model, name), getattr(TRUE, name), rel_tol=0.02), name


def test_fit_says_how_wrong_it_is():
    random = Random(0)
    model, error = ServiceModel.fit(record(TRUE, random, kind, 0.2) for kind in KINDS for _ in range(100))
    assert 0.05 < error < 0.15  # the noise is uniform within 20 %: 10 % on average
    assert isclose(model.train_us(3000), TRUE.train_us(3000), rel_tol=0.1)


@given(st.integers(0, 2**32), st.lists(st.sampled_from(KINDS), min_size=1, max_size=12))
def test_fit_is_never_negative_and_never_worse_than_nothing(seed: int, kinds: list[CallKind]):
    random = Random(seed)
    model, error = ServiceModel.fit([record(TRUE, random, kind, 0.9) for kind in kinds])
    assert all(getattr(model, name) >= 0 for name in ServiceModel.__struct_fields__)
    assert 0 <= error <= 1


def test_fit_of_one_kind_tells_nothing_of_others():
    calls = [
        Observation(kind=CallKind.FORWARD_BACKWARD, tokens=tokens, seconds_us=1_000 + 5 * tokens)
        for tokens in (100, 1_000, 10_000)
    ]
    model, error = ServiceModel.fit(calls)
    assert error < 1e-9
    assert isclose(model.train_us_per_token, 5) and isclose(model.call_us, 1_000)
    assert (model.decode_base_us, model.forward_us_per_token, model.optim_us) == (0, 0, 0)


def test_fit_needs_a_call_that_is_modelled():
    with pytest.raises(BadInput, match="no call to fit"):
        ServiceModel.fit([Observation(kind=CallKind.PUBLISH, seconds_us=5)])
    with pytest.raises(BadInput):
        ServiceModel.fit([])


def test_columns_that_cannot_be_told_apart_leave_one():
    assert sorted(non_negative([[1, 1], [2, 2]])) == [0, pytest.approx(0.6)]  # min (w-1)^2 + (2w-1)^2


@given(st.lists(st.lists(st.floats(0, 100), min_size=3, max_size=3), min_size=1, max_size=8), st.data())
def test_non_negative_is_not_beaten(rows: list[list[float]], data: st.DataObject):
    def loss(weights: list[float]) -> float:
        return sum((sum(w * x for w, x in zip(weights, row, strict=True)) - 1) ** 2 for row in rows)

    found = non_negative(rows)
    other = data.draw(st.lists(st.floats(0, 10), min_size=3, max_size=3))
    steps = data.draw(st.lists(st.floats(-0.1, 0.1), min_size=3, max_size=3))
    near = [max(0.0, w + step) for w, step in zip(found, steps, strict=True)]
    assert min(found) >= 0
    assert loss(found) <= min(loss(other), loss(near)) + 1e-6 * len(rows)


def test_the_prior_is_where_public_figures_are():
    seven = service_prior(7e9, 1)
    assert isclose(128e6 / seven.step_us(128), 6300, rel_tol=1e-9)  # tokens/s
    # 1,200 tokens/s are published for 32B.
    assert 1000 < 128e6 / service_prior(32e9, 1).step_us(128) < 1500
    assert isclose(service_prior(7e9, 4).train_us_per_token * 4, seven.train_us_per_token)


# ---- the switch model


def test_switch_by_hand():
    model = SwitchModel(gbps_in=50, gbps_out=25, overhead_us=7)
    assert (model.in_us(10**9), model.out_us(10**9)) == (20_000, 40_000)
    assert model.switch_us(10**9, 10**9) == 60_007
    assert SwitchModel(gbps_in=50, gbps_out=25, overhead_us=7, exchange=True).switch_us(10**9, 10**9) == 40_007
    assert model.switch_us(0, 0) == 7


def test_priors_are_there_for_every_kind_of_call():
    assert set(CALL_PRIOR_US) == set(CallKind) and min(CALL_PRIOR_US.values()) > 0
    assert SWITCH_PRIOR.switch_us(8 * 10**9, 8 * 10**9) < 1_000_000


# ---- scores


def test_hrrs_by_hand():
    assert hrrs(0, 100, 0, 1) == 1
    assert hrrs(300, 100, 0, 1) == 4
    assert hrrs(300, 100, 50, 1) == 3
    assert hrrs(300, 10, 50, 1) == 4  # service counts as 50, not as 10
    assert hrrs(9, 0, 0, 0.5) == 5


def test_hrrs_prefers_the_resident_and_the_short_and_in_the_end_the_one_that_waits():
    assert hrrs(1000, 500, 0, 1) > hrrs(1000, 500, 400, 1)
    assert hrrs(1000, 500, 100, 1) > hrrs(1000, 5000, 100, 1)
    assert hrrs(100_000, 5000, 100, 1) > hrrs(1000, 500, 100, 1)


@given(st.integers(0, 10**12), st.integers(0, 10**12), st.integers(0, 10**9), st.floats(0.125, 1))
def test_hrrs_grows_with_waiting_from_the_factor_on(wait: int, service: int, switch: int, factor: float):
    rounded = 1 + 1e-12
    assert factor <= hrrs(wait, service, switch, factor) * rounded
    assert hrrs(wait, service, switch, factor) <= hrrs(wait + 1000, service, switch, factor) * rounded


def test_a_turn_is_kept_no_longer_than_switching_would_cost():
    think = Learned()
    assert anticipation_us(think, 50, 1000) == 50
    for _ in range(30):
        think.observe(300)
    assert anticipation_us(think, 50, 1000) == think.upper * 5 // 4 >= 375
    assert anticipation_us(think, 50, 100) == 0
    assert anticipation_us(think, 400, 100) == think.upper * 5 // 4
