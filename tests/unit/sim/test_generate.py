"""Families of workloads: what they promise about shares, loads and layouts."""

from statistics import fmean

import pytest
from msgspec import structs

from plexrl.sim.draws import draw
from plexrl.sim.generate import SIZES, duration_us, generate, job, rollout_us, step_us, train_us, with_share
from plexrl.sim.workload import GIB, Stalls
from plexrl.types import BadInput


@pytest.mark.parametrize("size", SIZES)
def test_every_size_fits_its_gpus(size):
    plan = job("j", size, train_share=0.2)
    for part in (plan.train, plan.sample):
        assert part.device_bytes + part.residual_bytes <= 80 * GIB
        assert 0 < part.host_bytes < part.device_bytes


@pytest.mark.parametrize("share", [0.1, 0.35])
def test_training_takes_the_share_that_was_asked_for(share):
    plan = job("mean", "7B", train_share=share)
    works = [draw(plan, step, 0) for step in range(5)]
    rollout = sum(rollout_us(plan, work) for work in works)
    training = sum(train_us(plan, work) - plan.train.publish_us for work in works)
    assert training / (rollout + training) == pytest.approx(share, abs=1e-6)


def test_jobs_of_one_kind_differ_in_name_only():
    a, b = (job(name, "7B", train_share=0.2) for name in "ab")
    assert structs.replace(a, job="b") == b


def test_a_rollout_by_hand():
    """One replica, two calls of one sequence: ten steps of two sequences, then ten of one, after the prefill."""
    plan = job("j", "0.5B", train_share=0.2)
    service = structs.replace(
        plan.sample.service, prefill_us_per_token=1, decode_base_us=100, decode_us_per_sequence=10, call_us=7
    )
    lengths = structs.replace(plan.rollout.lengths, prompt_tokens=5)
    plan = structs.replace(
        plan,
        sample=structs.replace(plan.sample, service=service),
        rollout=structs.replace(plan.rollout, prompts=1, group=2, lengths=lengths),
    )
    work = draw(plan, 0, 0)
    short, long = (structs.replace(call, tokens=tokens) for call, tokens in zip(work.samples, (10, 20), strict=True))
    work = structs.replace(work, samples=(short, long))
    assert rollout_us(plan, work) == 7 + 2 * 5 + 10 * 120 + 10 * 110
    stalled = structs.replace(work, samples=(structs.replace(short, stall_us=10_000), long))
    assert rollout_us(plan, stalled) == 7 + 2 * 5 + 10 * 120 + 10_000


def test_with_lag_the_longer_phase_makes_the_step():
    plan = job("j", "7B", train_share=0.3)
    lagged = structs.replace(plan, lag=1)
    works = [draw(plan, step, 0) for step in range(5)]
    assert step_us(plan) == pytest.approx(fmean(rollout_us(plan, w) + w.reward_us + train_us(plan, w) for w in works))
    assert step_us(lagged) == pytest.approx(fmean(rollout_us(plan, w) + w.reward_us for w in works))


def test_a_share_is_set_anew():
    plan = with_share(job("j", "7B", train_share=0.1), 0.3)
    assert plan.train == job("j", "7B", train_share=0.3).train


def test_mixed_spans_what_it_says():
    workload = generate("mixed", 1, jobs=200, nodes=32)
    assert workload == generate("mixed", 1, jobs=200, nodes=32)
    assert workload != generate("mixed", 2, jobs=200, nodes=32)
    jobs = workload.jobs
    assert [plan.arrival_us for plan in jobs] == sorted(plan.arrival_us for plan in jobs)
    assert {plan.model for plan in jobs} == {"0.5B", "1.5B", "7B", "7B-16"}
    assert len({plan.account for plan in jobs}) == 3
    assert len({plan.user for plan in jobs}) == 6
    assert 0.35 < fmean(plan.lag for plan in jobs) < 0.65
    assert 0.15 < fmean(plan.rollout.stalls != Stalls() for plan in jobs) < 0.35


def test_mixed_offers_the_load_that_was_asked_for():
    workload = generate("mixed", 1, jobs=400, nodes=32, load=2.0)
    held = sum(
        (plan.train.gpus + plan.sample.replicas * plan.sample.gpus) * duration_us(plan) for plan in workload.jobs
    )
    assert held / (workload.jobs[-1].arrival_us * workload.gpus.size) == pytest.approx(2.0, rel=0.15)


@pytest.mark.parametrize(("shared", "nodes"), [(False, 3), (True, 2)])
def test_equal_has_one_trainer_pool(shared, nodes):
    workload = generate("equal", 0, jobs=2, size="7B", share_samplers=shared)
    assert (workload.gpus.nodes, workload.gpus.train_nodes) == (nodes, 1)
    assert workload.gpus.per_node == workload.jobs[0].train.gpus == 8
    assert len({plan.train for plan in workload.jobs}) == 1
    apart = workload.jobs[1].arrival_us - workload.jobs[0].arrival_us
    assert apart == pytest.approx(step_us(workload.jobs[0]) / 2)


@pytest.mark.parametrize(
    ("family", "given", "told"),
    [
        ("mixd", {}, "mixd"),
        ("mixed", {"jbos": 3}, "jbos"),
        ("mixed", {"jobs": 0}, "$.jobs"),
        ("mixed", {"sizes": {"9B": 1}}, "9B"),
        ("mixed", {"load": 0}, "$.load"),
        ("mixed", {"sizes": {}}, "sizes"),
        ("mixed", {"steps": [60, 20]}, "steps"),
        ("equal", {"size": "9B"}, "9B"),
        ("equal", {"train_share": 1}, "train_share"),
    ],
)
def test_a_wrong_parameter_is_named(family, given, told):
    with pytest.raises(BadInput) as error:
        generate(family, 0, **given)
    assert told in str(error.value)
