"""Drawn steps: shapes as the facts have them, and the same whatever else was drawn."""

from math import log
from statistics import correlation, fmean, pstdev

import pytest
from msgspec import structs

from plexrl.sim.draws import _drift, draw
from plexrl.sim.generate import job
from plexrl.sim.workload import Lengths, Rollout, Stalls


@pytest.fixture(scope="module")
def plan():
    return job("j", "7B", train_share=0.2)


def each(plan, **lengths):
    """The plan with one call per sequence on one replica, so that every length shows."""
    rollout = structs.replace(plan.rollout, calls=10_000, lengths=Lengths(**lengths))
    return structs.replace(plan, sample=structs.replace(plan.sample, replicas=1), rollout=rollout)


def test_a_step_depends_on_seed_job_and_step_alone(plan):
    forward = [draw(plan, step, 1) for step in range(6)]
    other = structs.replace(plan, job="other")
    backward = [(draw(other, step, 1), draw(plan, step, 1))[1] for step in reversed(range(6))]
    assert backward[::-1] == forward
    assert len({work.train_tokens for work in forward}) == 6
    assert draw(plan, 0, 2) != forward[0]
    assert draw(other, 0, 1) != forward[0]


def test_a_known_step_stays_as_it_is(plan):
    work = draw(plan, 3, 1)
    assert (len(work.samples), work.train_tokens, work.samples[-1].units) == (80, 2598950, 89539)


def test_the_slowest_tenth_holds_30_to_50_percent_of_the_rollout(plan):
    shares = []
    for step in range(100):
        lengths = [sample.tokens for sample in draw(each(plan), step, 1).samples]
        shares.append(1 - lengths[len(lengths) * 9 // 10 - 1] / lengths[-1])
    assert 0.3 <= fmean(shares) <= 0.5


def test_the_share_at_the_cap(plan):
    at_cap = [
        sum(sample.tokens == 8192 for sample in work.samples) / len(work.samples)
        for step in range(100)
        if (work := draw(each(plan, at_cap=0.05, drift=0), step, 1))
    ]
    assert fmean(at_cap) == pytest.approx(0.05, abs=0.005)


def test_lengths_of_a_prompt_are_alike(plan):
    """Between two samples of one prompt, log lengths correlate as the variances say: .7^2 / (.7^2 + .4^2) = 0.75."""
    wide = each(plan, at_cap=0, drift=0, max_tokens=10**9)
    one = structs.replace(wide, rollout=structs.replace(wide.rollout, prompts=1, group=2))
    pairs = [[log(sample.tokens) for sample in draw(one, step, 1).samples] for step in range(4000)]
    # The two are sorted: half of their squared difference is the variance within, all else is the prompt's.
    within = fmean((a - b) ** 2 / 2 for a, b in pairs)
    total = pstdev([value for pair in pairs for value in pair]) ** 2
    assert 1 - within / total == pytest.approx(0.75, abs=0.03)


def test_the_mean_without_a_cut(plan):
    free = each(plan, at_cap=0, drift=0, max_tokens=10**9, mean_tokens=1000)
    units = [work.train_tokens / 1024 - 512 for step in range(100) if (work := draw(free, step, 1))]
    assert fmean(units) == pytest.approx(1000, rel=0.03)


def test_the_drift_is_an_ar1_series():
    lengths = Lengths(drift=0.2, memory=0.9)
    series = [_drift(1, f"j{j}", lengths, step) for j in range(20) for step in range(500)]
    assert pstdev(series) == pytest.approx(0.2, rel=0.1)
    one = [_drift(1, "j0", lengths, step) for step in range(3000)]
    assert correlation(one[1:], one[:-1]) == pytest.approx(0.9, abs=0.03)


def test_no_drift_and_no_variation(plan):
    flat = each(plan, drift=0, at_cap=0, sigma_prompt=0, sigma_sample=0, mean_tokens=500)
    assert {sample.tokens for sample in draw(flat, 0, 1).samples} == {501}


def test_a_replicas_share_is_cut_by_length(plan):
    work = draw(plan, 0, 1)
    assert len(work.samples) == plan.sample.replicas * plan.rollout.calls
    assert sum(sample.sequences for sample in work.samples) == 1024
    for replica in range(8):
        tokens = [sample.tokens for sample in work.samples[replica::8]]
        assert tokens == sorted(tokens)
    assert all(sample.prompt_tokens == 512 * sample.sequences for sample in work.samples)
    assert all(sample.units <= sample.tokens * sample.sequences for sample in work.samples)
    assert work.train_tokens == sum(sample.units + sample.prompt_tokens for sample in work.samples)
    assert all(sample.stall_us == 0 for sample in work.samples)


def test_more_replicas_than_samples(plan):
    few = structs.replace(plan, rollout=Rollout(prompts=1, group=3))
    assert [sample.sequences for sample in draw(few, 0, 1).samples] == [1, 1, 1]


def test_tools_stall_and_the_slow_ones_stay_slow(plan):
    tools = structs.replace(plan, rollout=structs.replace(plan.rollout, stalls=Stalls(turns_min=5, turns_max=15)))
    ends = {
        name: fmean(
            sample.stall_us for step in range(10) for sample in draw(structs.replace(tools, job=name), step, 1).samples
        )
        for name in "abcdefgh"
    }
    # Ten turns of 0.8 x 0.57 + 0.18 x 5.7 + 0.02 x 165 s are 48 s; the slowest of 12 waits longer.
    assert 30e6 < fmean(ends.values()) < 300e6
    assert max(ends.values()) > 2 * min(ends.values())
