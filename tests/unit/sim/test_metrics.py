"""Metrics by hand; bounds against runs."""

import pytest
from msgspec import structs

from plexrl.scheduler import Policy
from plexrl.scheduler.costs import SWITCH_PRIOR
from plexrl.sim import metrics
from plexrl.sim.alone import least_steps
from plexrl.sim.baselines import BASELINES, baseline
from plexrl.sim.generate import job as drawn
from plexrl.sim.named import POLICIES
from plexrl.sim.result import Bar
from plexrl.sim.run import run
from plexrl.sim.workload import Cluster, SampleWork, Stalls, Workload
from plexrl.types import BadInput
from tests.unit.sim import made
from tests.unit.sim.small import MS, PLAIN, S, job, train, workload

HOUR = made.HOUR


def test_gpu_time_per_step():
    found = made.result(held_us=6 * HOUR)
    assert metrics.gpu_hours_per_step(found) == 6 / 20
    assert metrics.pool_gpu_hours_per_step(found) == 4 / 20
    with pytest.raises(BadInput, match="no training step"):
        metrics.gpu_hours_per_step(structs.replace(found, jobs=()))


def test_shares_of_time():
    found = made.result(held_us=2 * HOUR)
    assert metrics.duty_cycle(found) == pytest.approx(0.8)
    assert metrics.use(found) == pytest.approx(0.4)
    assert metrics.bubble_ratio(found) == pytest.approx(0.8)
    assert metrics.duty_cycle(made.result(held_us=0)) == 0
    assert metrics.bubble_ratio(made.result(train_held_us=0)) == 0


def test_relative_completion_and_finish_time_fairness():
    isolated = made.result(wall_us=2 * HOUR, jobs=(made.job("one", end_us=2 * HOUR), made.job("two", end_us=HOUR // 2)))
    found = made.result()
    assert metrics.relative_completion(found, isolated) == 0.5
    assert metrics.finish_time_fairness(found, isolated) == [0.5, 2.0]
    with pytest.raises(BadInput, match="different jobs"):
        metrics.relative_completion(found, made.result(names=("one", "three")))


def test_stretch_counts_the_queue_and_slowdown_does_not():
    jobs = (made.job("one", placed_us=HOUR // 2), made.job("two", arrival_us=HOUR // 2, placed_us=HOUR // 2))
    found = made.result(jobs=jobs)
    assert metrics.stretches(found) == [2.0, 1.0]
    assert metrics.slowdowns(found) == [1.0, 1.0]
    assert metrics.queue_waits(found) == [HOUR // 2, 0]
    assert metrics.jain(found) == pytest.approx((0.5 + 1) ** 2 / (2 * (0.25 + 1)))
    with pytest.raises(BadInput, match="alone was not computed"):
        metrics.stretches(made.result(jobs=(made.job("one", alone_us=0),)))


def test_percentiles():
    assert metrics.p95(range(1, 101)) == 95
    assert metrics.p95([3.0]) == 3.0
    with pytest.raises(BadInput, match="no values"):
        metrics.p95([])


def test_students_interval():
    # five values, t of 4 degrees of freedom
    found = metrics.interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert found.mean == 3.0
    assert found.half == pytest.approx(2.776 * 2.5**0.5 / 5**0.5)
    assert metrics.interval([7.0]) == metrics.Interval(7.0, 0.0)
    with pytest.raises(BadInput, match="no values"):
        metrics.interval([])
    assert metrics.interval([float(i % 2) for i in range(100)]).half == pytest.approx(1.96 * 0.0502519)
    both = metrics.mean_interval([{"a": 1.0, "b": None}, {"a": 3.0, "b": 2.0}])
    assert (both["a"].mean, both["b"]) == (2.0, None)


def test_switches_per_hour():
    assert metrics.switches_per_hour(made.result(wall_us=2 * HOUR)) == 5


@pytest.mark.parametrize(("shift", "sign"), [(0, 1), (1, -1)])
def test_jobs_that_fill_each_others_gaps_are_anticorrelated(shift, sign):
    slot = HOUR // 16
    bars = [
        Bar(f"n:{i}", at * slot, (at + 1) * slot, "busy", f"{name}/0", name)
        for i, (name, first) in enumerate([("one", 0), ("two", shift)])
        for at in range(first, 16, 2)
    ]
    found = made.result(timeline=tuple(bars), jobs=(made.job("one"), made.job("two")))
    assert metrics.correlation(found, bins=64) == pytest.approx(sign)


def test_no_correlation_without_a_timeline_or_a_pair():
    assert metrics.correlation(made.result(timeline=())) is None
    assert metrics.correlation(made.result(names=("one",), jobs=(made.job("one"),))) is None


def test_the_ideal_bound():
    assert metrics.ideal_bound(2, 8, 16) == pytest.approx(1 / 3)
    assert metrics.ideal_bound(2, 24, 96) == pytest.approx(0.4)
    assert metrics.ideal_bound(1, 8, 16) == 0


def test_the_lower_bound_by_hand():
    alone = 3 * S + 120 * MS  # with the round trip before the publication
    assert metrics.lower_bound(workload(job("a"))) == alone
    assert metrics.lower_bound(workload(job("a"), job("b", arrival_us=5 * S))) == 5 * S + alone
    # ten jobs' training, 2.1 s each, on one GPU from 1 s on: the bound does not know of the rollouts before them
    ten = [job(f"j{i}", arrival_us=1 * S) for i in range(10)]
    assert metrics.lower_bound(workload(*ten)) == 1 * S + 10 * 2100 * MS
    # 31 GPU-seconds on three GPUs that take both
    assert metrics.lower_bound(workload(*ten, train=0, sample=0, any_role=3)) == 1 * S + 31 * S // 3


def test_calls_that_move_save_the_base_of_what_they_leave():
    def calls(*tokens):
        return [SampleWork(0, n, 1, 0, n) for n in tokens]

    shares = [calls(10, 90, 100), calls(50, 60)]
    assert least_steps(shares, 0) == 160
    assert least_steps(shares, 2) == 160 - 90  # both long ones of the first
    assert least_steps(shares, 5) == 0
    # one call: half of the two that are worth 90 together, which no schedule reaches and which is below all that do
    assert least_steps(shares, 1) == 160 - 45


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("stalls", [Stalls(), Stalls(turns_min=1, turns_max=9)])
def test_no_schedule_beats_the_lower_bound(seed, stalls):
    plans = tuple(
        drawn(f"j{i}", "1.5B", train_share=0.2 + 0.1 * i, lag=i % 2, steps=3, arrival_us=i * 30 * S, stalls=stalls)
        for i in range(4)
    )
    given = Workload(name="four", gpus=Cluster(nodes=2), jobs=plans, switch=SWITCH_PRIOR, seed=seed)
    bound = metrics.lower_bound(given)
    assert bound > max(plan.arrival_us for plan in plans)
    for name, policy in POLICIES.items():
        assert run(given, policy, name=name).wall_us >= bound
    for name in BASELINES:
        if name not in ("colocated", "split_async"):  # they change the jobs
            assert baseline(name, given).wall_us >= bound


@pytest.mark.parametrize("k", [2, 3])
def test_no_saving_is_above_the_ideal_bound(k):
    """k jobs on a shared trainer against as many jobs with trainers of their own, over the same steps."""
    plans = [train(job(f"j{i}", steps=20, arrival_us=i * 700 * MS), service=job("a").train.service) for i in range(k)]
    shared = run(workload(*plans, train=1, sample=k), PLAIN)
    apart = run(workload(*plans, train=k, sample=k), structs.replace(PLAIN, placement="isolated"))
    saving = 1 - metrics.gpu_hours_per_step(shared) / metrics.gpu_hours_per_step(apart)
    assert saving <= metrics.ideal_bound(k, 1, 1)


def test_all_figures_of_a_run():
    given = workload(job("a", steps=3), job("b", steps=3))
    isolated = run(given, Policy(placement="spread"), keep_timeline=True)
    found = metrics.figures(run(given, PLAIN, keep_timeline=True), isolated)
    assert set(found) >= {
        "gpu_hours_per_step",
        "relative_completion",
        "duty_cycle",
        "stretch_p95",
        "jain",
        "correlation",
    }
    assert all(value is not None for value in found.values())
