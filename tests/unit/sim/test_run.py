"""Whole runs: two jobs worked out by hand, books that balance, runs that repeat, jobs alone."""

import pytest
from msgspec import structs

from plexrl.scheduler import Policy
from plexrl.scheduler.costs import ServiceModel
from plexrl.sim.generate import job as drawn
from plexrl.sim.named import POLICIES
from plexrl.sim.nodes import gpus_of
from plexrl.sim.program import GAP_US
from plexrl.sim.run import alone_in, run
from plexrl.sim.workload import Cluster, Recorded, RecordedCall, Stalls, Workload
from plexrl.types import BadInput, CallKind, GpuRole, Role
from tests.unit.sim.small import MS, PLAIN, SWITCH, S, job, sample, train, workload


def mixed(jobs=4, nodes=1, seed=0, **changed):
    """Jobs of several GPUs each, both lags, on too few GPUs."""
    plans = tuple(
        drawn(f"j{i}", "1.5B", train_share=0.3, lag=i % 2, steps=3, arrival_us=i * 10 * S, **changed)
        for i in range(jobs)
    )
    return Workload(name="mixed", gpus=Cluster(nodes=nodes), jobs=plans, switch=SWITCH, seed=seed)


def test_two_jobs_on_one_trainer_by_hand():
    found = run(workload(job("a"), job("b")), PLAIN, keep_timeline=True)
    one, two = found.jobs
    # Both roll out for 1 s beside each other and submit their training; the first to ask trains until 3 s. It asks to
    # publish a round trip later, when the other has the GPU until 5 s; the other's own publication waits for that one.
    assert one.end_us == 5 * S + 100 * MS
    assert two.end_us == 5 * S + 200 * MS
    assert found.wall_us == two.end_us
    assert (one.busy_us, two.busy_us) == (3 * S + 100 * MS, 3 * S + 100 * MS)
    assert found.classes["busy"] == 6 * S + 200 * MS
    assert found.train_busy_us == 4 * S + 200 * MS
    # a's sampler is a's until 5.1 s, b's until 5.2 s, and so is the trainer's GPU
    assert found.held_us == 5100 * MS + 2 * 5200 * MS
    assert found.train_held_us == 5200 * MS
    assert one.alone_us == two.alone_us == 3 * S + 100 * MS + GAP_US
    busy = [
        (bar.job, bar.start_us, bar.end_us) for bar in found.timeline if bar.kind == "busy" and bar.gpu == "n0000:0"
    ]
    assert busy == [
        ("a", 1 * S, 3 * S),
        ("b", 3 * S, 5 * S),
        ("a", 5 * S, 5 * S + 100 * MS),
        ("b", 5 * S + 100 * MS, 5 * S + 200 * MS),
    ]


def test_states_that_do_not_fit_together_are_switched_and_only_what_changed_moves_out():
    # 60,000 of 100,000 bytes each: 60 us in, and as much out once a step has changed it.
    plans = [train(job(name), device_bytes=60_000, host_bytes=60_000) for name in "ab"]
    found = run(workload(*plans), PLAIN)
    # a is built and leaves clean for b's build; a in (b leaves clean) ... a trains, leaves changed, b comes in: 120 us;
    # b trains, leaves changed for a's publication: 120 us; a leaves clean? It has not trained since: 60 us.
    assert found.jobs[0].end_us == 5 * S + 100 * MS + 60 + 120 + 120
    assert found.jobs[1].end_us == 5 * S + 200 * MS + 60 + 120 + 120 + 60
    assert found.switches == 4
    assert found.classes["switch"] == 60 + 120 + 120 + 60


@pytest.mark.parametrize("name", [*POLICIES, "round_robin", "fair", "eager"])
def test_every_gpu_microsecond_is_in_one_class(name):
    policy = {
        "round_robin": Policy(order="round_robin"),
        "fair": Policy(order="fair"),
        "eager": Policy(lazy=False, prefetch=False),
    } | POLICIES
    found = run(mixed(), structs.replace(policy[name], paranoid=True))
    assert sum(found.classes.values()) == found.wall_us * found.gpus
    assert found.wall_us == max(job.end_us for job in found.jobs)
    assert sum(job.busy_us for job in found.jobs) == found.classes["busy"]
    assert sum(job.switch_us for job in found.jobs) == found.classes["switch"]
    assert all(job.steps == 3 for job in found.jobs)
    assert all(job.arrival_us <= job.placed_us < job.start_us < job.end_us for job in found.jobs)
    assert 0 < found.train_busy_us < found.classes["busy"] <= found.held_us <= found.wall_us * found.gpus


def test_fixed_extents_keep_the_books_too():
    found = run(mixed(), Policy(), virtual=False)
    assert sum(found.classes.values()) == found.wall_us * found.gpus


def test_equal_runs_are_equal_and_others_are_not():
    found = run(mixed(), Policy(), keep_timeline=True)
    again = run(mixed(), Policy(), keep_timeline=True)
    assert found.fingerprint() == again.fingerprint()
    assert run(mixed(seed=1), Policy(), keep_timeline=True).fingerprint() != found.fingerprint()


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("size", ["1.5B", "7B"])
def test_a_job_alone_takes_as_long_as_its_closed_form_says(lag, size):
    plan = drawn("j", size, train_share=0.3, lag=lag, steps=5)
    gpus, replicas = plan.train.gpus, plan.sample.replicas
    apart = Cluster(nodes=gpus + replicas, per_node=1, train_nodes=gpus, sample_nodes=replicas)
    given = Workload(name="alone", gpus=apart, jobs=(plan,), switch=SWITCH)
    (found,) = run(given, Policy(placement="isolated", order="fifo")).jobs
    # The simulator rounds to microseconds at every end of a call.
    assert abs(found.end_us - found.placed_us - found.alone_us) <= 5 * plan.rollout.calls
    assert found.alone_us == alone_in(given, plan).wall_us


def test_one_step_of_lag_overlaps_rollout_and_training():
    given = {lag: run(workload(job("a", steps=4, lag=lag)), PLAIN) for lag in (0, 1)}
    whole = 3 * S + 100 * MS + 2 * GAP_US  # a step, and a round trip to the next
    new_weights = 1  # microsecond: what the sampler takes in
    assert given[0].wall_us == 4 * whole - GAP_US + 3 * new_weights
    for at, step in enumerate(given[0].steps):
        assert step.start_us == at * whole + max(0, at - 1) * new_weights
    # lag 1: training is the bottleneck, each step's begins a round trip after the publication before
    assert given[1].wall_us == 1 * S + 4 * (2 * S + 100 * MS + GAP_US) + 3 * GAP_US
    starts = [step.start_us for step in given[1].steps]
    assert starts[1] == 1 * S + GAP_US  # before the first step is trained
    assert starts[2] == given[1].steps[0].end_us + GAP_US  # on its weights


def test_jobs_of_a_base_share_its_engines():
    plans = [job(name, base="llama", steps=2) for name in "ab"]
    found = run(workload(*plans, train=1, sample=1), PLAIN)
    assert found.builds == 2
    assert [job.steps for job in found.jobs] == [2, 2]
    # their first rollouts are one batch: a second for both
    assert found.classes["busy"] == sum(job.busy_us for job in found.jobs) <= 11 * S + 400 * MS


def test_a_later_job_of_a_base_finds_its_engines_built():
    late = job("b", base="llama", arrival_us=2 * S)
    early = train(job("a", base="llama"), build_us=S)
    found = run(workload(early, train(late, build_us=S), train=1, sample=1), PLAIN)
    assert found.jobs[1].placed_us == found.jobs[1].start_us == 2 * S
    assert found.builds == 2


def test_waits_for_tools_leave_the_gpu():
    plan = job("a")
    stalls = Stalls(turns_min=10, turns_max=10, quick_share=1.0, quick_us=S, sigma=0.0, spread=0.0)
    rollout = structs.replace(plan.rollout, stalls=stalls)
    found = run(workload(structs.replace(plan, rollout=rollout)), PLAIN)
    assert found.wall_us == 1 * S + 10 * S + 2 * S + 100 * MS + GAP_US
    assert found.classes["busy"] == 3 * S + 100 * MS
    assert found.jobs[0].alone_us == found.wall_us


def test_a_recorded_job_submits_when_what_it_waited_for_is_there():
    calls = (
        RecordedCall(kind=CallKind.SAMPLE, role=Role.SAMPLE, seen=0, think_us=1 * S, service_us=2 * S),
        RecordedCall(kind=CallKind.FORWARD_BACKWARD, role=Role.TRAIN, seen=1, think_us=S // 2, service_us=S, units=7),
        RecordedCall(kind=CallKind.OPTIM_STEP, role=Role.TRAIN, seen=1, think_us=S // 2, service_us=S),
        RecordedCall(kind=CallKind.PUBLISH, role=Role.TRAIN, seen=3, think_us=0, service_us=S, step=1),
    )
    plan = job("a", recorded=Recorded(calls=calls, delivered=(0, 2, 1, 3)))
    found = run(workload(plan), PLAIN)
    assert found.wall_us == (1 + 2) * S + S // 2 + 3 * S
    assert [(step.start_us, step.end_us) for step in found.steps] == [
        (1 * S, 5 * S + S // 2),
        (5 * S + S // 2, 6 * S + S // 2),
    ]
    assert found.jobs[0].tokens == 7
    assert found.jobs[0].alone_us == found.wall_us


def test_a_recorded_job_whose_samples_take_no_time_is_refused():
    calls = (RecordedCall(kind=CallKind.SAMPLE, role=Role.SAMPLE, seen=0, think_us=0, service_us=1),)
    plan = sample(job("a", recorded=Recorded(calls=calls, delivered=(0,))), service=ServiceModel())
    with pytest.raises(BadInput, match="decoding takes no time"):
        run(workload(plan), PLAIN)


def test_jobs_that_can_never_fit_are_named_and_the_others_run():
    found = run(workload(train(job("big"), gpus=5), job("a")), PLAIN)
    assert [done.job for done in found.jobs] == ["a"]
    assert "big" in found.jobs_refused["big"]


def test_jobs_wait_for_their_place_in_the_queue():
    isolated = structs.replace(PLAIN, placement="isolated")
    found = run(workload(job("a"), job("b"), train=1, sample=1), isolated)
    first, second = found.jobs
    assert second.placed_us == first.end_us == second.wait_us
    assert second.end_us - second.placed_us == first.end_us


def test_known_duties_are_used_when_warm():
    cold, warm = (run(mixed(jobs=6, nodes=2), POLICIES["plexrl"], warm=warm) for warm in (False, True))
    assert cold.fingerprint() != warm.fingerprint()


def test_progress_is_told_of_jobs_events_and_time(monkeypatch):
    monkeypatch.setattr("plexrl.sim.run._EVERY", 100)
    told = []
    found = run(mixed(), POLICIES["plexrl"], progress=lambda *seen: told.append(seen))
    assert len(told) > 3
    assert all(ended <= 4 and events <= found.events and now <= found.wall_us for ended, events, now in told)


def test_nodes_have_roles_and_host_bytes():
    gpus, roles, hosts = gpus_of(Cluster(nodes=3, per_node=2, bytes=7, host_bytes=9, train_nodes=1, sample_nodes=1))
    assert list(gpus) == ["n0000:0", "n0000:1", "n0001:0", "n0001:1", "n0002:0", "n0002:1"]
    assert roles == {
        "n0000:0": GpuRole.TRAIN,
        "n0000:1": GpuRole.TRAIN,
        "n0001:0": GpuRole.SAMPLE,
        "n0001:1": GpuRole.SAMPLE,
    }
    assert hosts == {"n0000": 9, "n0001": 9, "n0002": 9}
    with pytest.raises(BadInput, match="of 1"):
        gpus_of(Cluster(nodes=1, train_nodes=1, sample_nodes=1))
