"""Parked or read again: the rule, and what it is fed with."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plexrl.engines.parking import Costs, Meter, keep

TOKENS = st.integers(1, 100_000)
POSITIVE = st.floats(1e-6, 1e12)


@given(TOKENS, st.integers(1, 1 << 20), POSITIVE)
def test_what_was_not_measured_says_nothing_for_reading_again(tokens: int, size: int, bps: float) -> None:
    assert keep(tokens, size, Costs())
    assert keep(tokens, size, Costs(copy_bps=bps))
    assert keep(tokens, size, Costs(read_token_s=bps))


@given(TOKENS, st.integers(1, 1 << 20), POSITIVE, st.floats(0, 10), POSITIVE)
def test_the_cheaper_way_is_taken(tokens: int, size: int, bps: float, fixed: float, each: float) -> None:
    costs = Costs(copy_bps=bps, read_fixed_s=fixed, read_token_s=each)
    assert keep(tokens, size, costs) == (2 * tokens * size / bps <= fixed + tokens * each)


def test_a_slow_link_has_long_sequences_read_again_and_short_ones_parked() -> None:
    costs = Costs(copy_bps=1e6, read_fixed_s=0.1, read_token_s=1e-4)
    assert [keep(tokens, 100, costs) for tokens in (1, 500, 1100, 5000)] == [True, True, False, False]


def test_a_meter_finds_the_line_through_the_prefixes_and_the_slower_direction() -> None:
    meter = Meter()
    assert meter.costs == Costs()
    for tokens in (10, 200, 50, 400, 100):
        meter.read(tokens, 0.25 + 5e-4 * tokens)
    meter.copied("out", 2_000_000, 1.0)
    meter.copied("in", 8_000_000, 1.0)
    assert meter.costs.copy_bps == 2_000_000
    assert meter.costs.read_fixed_s == pytest.approx(0.25, rel=1e-6)
    assert meter.costs.read_token_s == pytest.approx(5e-4, rel=1e-6)


@given(st.lists(st.tuples(st.integers(1, 5000), st.floats(1e-6, 10)), min_size=1, max_size=60))
def test_whatever_was_measured_no_cost_is_negative(prefixes: list[tuple[int, float]]) -> None:
    meter = Meter()
    for tokens, seconds in prefixes:
        meter.read(tokens, seconds)
    costs = meter.costs
    assert costs.read_fixed_s >= -1e-9 and costs.read_token_s >= 0
    assert costs.read_fixed_s + costs.read_token_s > 0


def test_one_length_alone_gives_a_rate() -> None:
    meter = Meter()
    for _ in range(5):
        meter.read(100, 0.2)
    assert meter.costs.read_token_s == pytest.approx(0.002)
    assert meter.costs.read_fixed_s == pytest.approx(0, abs=1e-9)


def test_nothing_copied_measures_nothing() -> None:
    meter = Meter()
    meter.copied("out", 0, 1e-5)
    assert meter.costs.copy_bps == 0
