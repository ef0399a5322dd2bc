"""Baselines: what they do to the same workload."""

import pytest
from msgspec import structs

from plexrl.scheduler.costs import SWITCH_PRIOR
from plexrl.sim.baselines import BASELINES, baseline, parted
from plexrl.sim.generate import job as drawn
from plexrl.sim.program import GAP_US
from plexrl.sim.workload import Cluster, Workload
from plexrl.types import BadInput
from tests.unit.sim.small import MS, S, job, sample, train, workload


@pytest.fixture(scope="module")
def given():
    plans = tuple(drawn(f"j{i}", "1.5B", train_share=0.3, steps=3, arrival_us=i * S) for i in range(4))
    return Workload(name="four", gpus=Cluster(nodes=2), jobs=plans, switch=SWITCH_PRIOR)


@pytest.fixture(scope="module")
def results(given):
    return {name: baseline(name, given) for name in BASELINES}


@pytest.mark.parametrize("name", BASELINES)
def test_all_run_the_whole_workload_and_balance(results, name):
    found = results[name]
    assert (found.policy, [job.steps for job in found.jobs]) == (name, [3] * 4)
    assert sum(found.classes.values()) == found.wall_us * found.gpus


def test_colocated_takes_turns_on_the_larger_of_both(results):
    found = results["colocated"]
    assert found.held_us == sum(4 * (job.end_us - job.placed_us) for job in found.jobs)
    # each of a step's phases is a hand-over; the first rollout's engines were built last
    assert found.switches >= 4 * 3


def test_colocated_sleeps_and_wakes_by_hand():
    plan = sample(
        train(job("a", steps=1), device_bytes=60_000, host_bytes=60_000), device_bytes=60_000, host_bytes=60_000
    )
    found = baseline("colocated", workload(plan, train=0, sample=0, any_role=1))
    # sampler is built last and rolls out; trainer in: 60 us, the sampler leaves nothing to copy
    assert found.wall_us == 1 * S + 60 + 2 * S + GAP_US + 100 * MS
    assert found.held_us == found.wall_us


def test_split_async_keeps_jobs_apart_and_a_step_ahead(results):
    found = results["split_async"]
    assert found.switches == 0
    assert any(
        later.start_us < step.end_us
        for step in found.steps
        for later in found.steps
        if later.job == step.job and later.step == step.step + 1
    )


def test_llmd_offloads_at_every_hand_over(results):
    found = results["llmd"]
    assert found.prefetches == found.gathers == found.pauses == 0
    assert found.switches >= 4 * 3


def test_rollmux_shares_apart_nodes_and_moves_tails(results):
    found = results["rollmux"]
    assert found.prefetches == 0
    assert found.gathers > 0


def test_nodes_are_parted_by_what_jobs_ask_for(given):
    found = parted(given).gpus
    assert (found.train_nodes, found.sample_nodes) == (1, 1)
    assert parted(parted(given)) == parted(given)
    wide = structs.replace(given, gpus=Cluster(nodes=9))
    small = tuple(structs.replace(plan, train=structs.replace(plan.train, gpus=2)) for plan in given.jobs)
    assert parted(structs.replace(wide, jobs=small)).gpus.train_nodes == 3


def test_nodes_that_cannot_be_parted_are_refused(given):
    with pytest.raises(BadInput, match="side by side"):
        parted(structs.replace(given, gpus=Cluster(nodes=1)))


def test_an_unknown_baseline_is_refused(given):
    with pytest.raises(BadInput, match="gandiva"):
        baseline("gandiva", given)
