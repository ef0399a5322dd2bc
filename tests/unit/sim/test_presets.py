"""Presets: what is frozen stays frozen, and the figures keep their bounds."""

import pytest
from msgspec import structs

from plexrl.sim.alone import alone
from plexrl.sim.presets import paper, policies
from plexrl.sim.presets import paper_parameters as fixed
from plexrl.sim.presets.paper_jobs import job, pool_of_all, right_size, whole_gangs, workload
from plexrl.sim.presets.per_step import Ends, Layout, saving, spent, stretch
from plexrl.sim.presets.policies_jobs import DIGEST, FROZEN, SEED, make
from plexrl.sim.result import StepSpan
from tests.unit.sim.made import job as made_job
from tests.unit.sim.made import result

SMALL = structs.replace(fixed.SETTINGS[0], prompts=16, group=4)


def steps(**ends: list[int]):
    """A run of jobs that made their steps at these times."""
    spans = [
        StepSpan(name, number, begin, end)
        for name, times in ends.items()
        for number, (begin, end) in enumerate(zip([0, *times], times, strict=False))
    ]
    return result(jobs=tuple(made_job(name) for name in ends), steps=tuple(spans))


def test_gpu_time_per_step_by_hand():
    shared = Ends(steps(a=[12, 24, 36], b=[10, 20, 30]))  # ends when b has made its three steps
    apart = Ends(steps(a=[10, 20, 30], b=[10, 20, 30]))
    assert shared.until_us == 30
    assert shared.made() == {"a": 2.5, "b": 3.0}
    assert (apart.took("a", 2.5), apart.took("b", 3.0)) == (25.0, 30.0)
    held = Layout(shared=4, private=2)
    assert spent(shared, held) == 4 * 30 + 2 * (30 + 30)
    assert saving(shared, held, apart, gpus=6) == pytest.approx(1 - 240 / (6 * 55))
    assert stretch(shared, apart) == pytest.approx((30 / 25 + 1) / 2)


def test_saving_without_stretch_is_the_bound():
    ends = Ends(steps(a=[10, 20], b=[10, 20]))
    held = Layout(shared=16, private=8)
    assert saving(ends, held, ends, gpus=24) == pytest.approx(1 / 2 * 16 / 24)


@pytest.mark.parametrize("setting", fixed.SETTINGS, ids=lambda setting: setting.model)
def test_training_takes_the_published_share_of_a_step(setting):
    plan = structs.replace(job(setting, "j0", 1), steps=fixed.STEPS)
    given = workload("w", [plan], 1, train=setting.train_gpus, sample=setting.sample_gpus)
    found = alone(plan, 1, given.switch)
    # The start and the last step's training lie outside of the overlap: a little less than the share.
    assert found.train_duty == pytest.approx(1 - setting.bubble, rel=0.05)


def test_published_figures_and_pools_are_those_of_the_paper():
    assert [(s.train_gpus, s.sample_gpus, s.published) for s in fixed.SETTINGS] == [
        (16, 8, 0.3136),
        (128, 64, 0.3010),
        (96, 24, 0.3758),
    ]
    assert [right_size(setting) for setting in fixed.SETTINGS] == [4, 48, 64]
    assert pool_of_all(fixed.SETTINGS[2], 2, busy=10.0) == 96  # the trainer must fit


def test_what_whole_gangs_cost_by_hand():
    """Training takes a share of 0.2933 of a step, on 128 GPUs; a sampler has 64."""
    middle = fixed.SETTINGS[1]
    share = middle.train_share
    assert whole_gangs(middle, 128, 3, private=64) == 1.0
    assert whole_gangs(middle, 128, 4, private=64) == pytest.approx(4 * share)  # one after the other on the same GPUs
    # 88 GPUs have no sampler, and 2 x 40 are trained on beside one: all of one rollout's, and some of the other's.
    assert whole_gangs(middle, 216, 2, private=0) == pytest.approx(1 + share)
    assert whole_gangs(middle, 320, 3, private=0) == 1.0  # room for all apart
    assert whole_gangs(middle, 432, 4, private=0) == pytest.approx(4 * share)  # 176 apart have no room for two


@pytest.mark.parametrize("k", fixed.JOBS)
@pytest.mark.parametrize("seed", [1, 2])
def test_no_saving_exceeds_the_bound(monkeypatch, k, seed):
    monkeypatch.setattr(fixed, "STEPS", 5)
    without = paper.Alone(SMALL, seed)
    for name in paper.LAYOUTS:
        held = paper.layout(SMALL, name, k, without.busy)
        ends = Ends(paper.together(SMALL, without.plans[:k], held, without.step_us, seed))
        baseline = without.of["split_async"]
        bound = 1 - held.held(k) / (k * baseline.gpus)
        assert saving(ends, held, baseline.ends, baseline.gpus) <= bound + 1e-9
    assert paper.layout(SMALL, "shared_training", k, 0.0) == Layout(shared=16, private=8)


def test_the_grid_saves_less_the_more_the_pool_is_used(monkeypatch):
    monkeypatch.setattr(fixed, "STEPS", 5)
    monkeypatch.setattr(fixed, "GRID_DUTY", (0.1, 0.8))
    monkeypatch.setattr(fixed, "GRID_VARIATION", (0.0,))
    low, high = paper.sensitivity(lambda share, words: None, SMALL)
    assert low["saving_vs_split_async"] > high["saving_vs_split_async"]


def test_the_calibrated_workload_is_frozen():
    assert make(FROZEN, SEED).digest() == DIGEST


def test_four_jobs_on_the_gpus_of_one_keep_them_busy():
    (row,) = policies._dense(policies._Work(lambda share, words: None, 1))
    assert 0.85 < row["duty_cycle"] < 1.0 and row["over_bound"] > 0.0
