"""The baseline against histories whose dedicated run can be worked out by hand."""

import pytest
from msgspec.structs import replace

from plexrl.accounting.fit import Fit
from plexrl.accounting.replay import colocated, separate
from plexrl.accounting.trace import traces
from plexrl.scheduler.costs import ServiceModel
from plexrl.types import CallKind, Role
from tests.unit.accounting.scene import S, Scene

TRAIN, SAMPLE = CallKind.FORWARD_BACKWARD, CallKind.SAMPLE


def model(group, **service):
    return Fit(group=group, calls=1, observed=1, service=ServiceModel(**service), error=0.0)


# The scene's calls have ten tokens: 5 s a training call; 2 s a sample, and as much more for each beside it.
MODELS = {
    "t": model("t", train_us_per_token=S / 2),
    "s": model("s", decode_us_per_sequence=S / 5),
}


def rl_job(stretch=1.0, samples=4):
    """Two steps: a burst of samples on 2 replicas, 3 s of thought, one training call on 2 GPUs.

    stretch: how much slower the shared run was.
    """
    scene = Scene()
    scene.attach(10, "11.0")
    scene.place(11, "t", Role.TRAIN, gang_size=2, owner="11.0")
    scene.place(11, "s", Role.SAMPLE, replicas=2, owner="11.0")
    scene.model(11, "11.0", "m", "t")
    scene.end(14, "11.0", "m:0", cpu=0, gang="")
    at, after = 15.0, "m:0"
    for step in range(2):
        burst = [f"s:{step}:{i}" for i in range(samples)]
        for id in burst:
            scene.call(at, "11.0", id, "s", after=after)
        at += samples * stretch
        for i, id in enumerate(burst):
            scene.end(at, "11.0", id, cpu=2, gang=f"s/{i % 2}")
        at += 3
        scene.call(at, "11.0", f"t:{step}", "t", TRAIN, after=burst[-1])
        at += 5 * stretch
        scene.end(at, "11.0", f"t:{step}", cpu=5, gang="t/0")
        after = f"t:{step}"
        at += 1
    scene.job_ended(at, "11.0")
    return scene, at


def replays(scene, until, device_bytes=1000, models=MODELS):
    trace = traces(scene.records, scene.us(until))["11.0"]
    both = colocated(trace, device_bytes, models), separate(trace, models)
    for replay in both:
        assert sum(leg.us for leg in replay.legs) == replay.wall_us
        assert all(part >= 0 for leg in replay.legs for part in (leg.think_us, leg.wait_us, leg.run_us))
    return both


def test_alone_the_job_takes_its_work_and_its_thought():
    scene, end = rl_job()
    both = replays(scene, end)
    # 1 s to the model, 1 s to the first burst; per step 4 s of samples on two replicas, 3 s, 5 s, and 1 s after it
    expected = 1 + 1 + 2 * (4 + 3 + 5 + 1)
    assert [replay.wall_us for replay in both] == [expected * S, expected * S]
    assert [replay.gpus for replay in both] == [2, 4]
    assert both[0].gpu_us == 2 * expected * S


def test_a_slower_pool_does_not_make_the_baseline_larger():
    fast, slow = rl_job(), rl_job(stretch=7.0)
    assert replays(*fast)[0].wall_us == replays(*slow)[0].wall_us


def test_one_sample_alone_uses_one_replica():
    scene, end = rl_job(samples=1)
    (trace,) = traces(scene.records, scene.us(end)).values()
    assert trace.needs["s"].gangs == 1
    assert colocated(trace, 1000, MODELS).wall_us == (2 + 2 * (2 + 3 + 5 + 1)) * S


def test_building_counts_once_and_beside_each_other_when_apart():
    scene, end = rl_job()
    for gpu in scene.gpus:
        scene.span(gpu, 11, 13, "switch", "t/0", j11_0=1)
    scene.span("n1:0", 13, 14, "switch", "s/0", j11_0=1)
    scene.span("n2:0", 13, 13.5, "switch", "s/1", j11_0=1)
    scene.span("n2:0", 20, 29, "switch", "s/1", j11_0=1)  # a switch later on is no build
    both = replays(scene, end)
    assert [replay.wall_us for replay in both] == [(28 + 2 + 1) * S, (28 + 2 + 1) * S]


def test_hand_overs_cost_their_measured_time_only_where_both_do_not_fit():
    scene, end = rl_job()
    for gang, seconds in (("t/0", 0.4), ("s/0", 0.2)):
        scene.switched(20, gang, "n1:0", True, bytes_in=5, seconds=seconds)
        scene.switched(21, gang, "n1:0", False, bytes_out=5, seconds=seconds)
    assert replays(scene, end, device_bytes=200)[0].wall_us == 28 * S
    # model, samples, train, samples, train: each group is built at its first use, two hand-overs are left,
    # each the mean of in plus out: (0.8 + 0.4) / 2
    assert replays(scene, end, device_bytes=199)[0].wall_us == pytest.approx((28 + 3 * 0.6) * S, abs=S)


def test_time_without_a_head_is_not_thought():
    scene, end = rl_job()
    at = next(i for i, x in enumerate(scene.records) if getattr(x, "id", "") == "t:0")
    calm = replays(scene, end)[0].wall_us
    scene, end = rl_job()
    cut = scene.records[at].now_us
    late = [x for x in scene.records if x.now_us >= cut]
    scene.records = [x for x in scene.records if x.now_us < cut]
    gap = 100.0
    scene.epoch(0, (cut - scene.us(0)) / S - 0.5 + gap)
    scene.records += [replace(x, now_us=x.now_us + round(gap * S)) for x in late]
    assert abs(replays(scene, end + gap)[0].wall_us - calm) <= S


def test_training_and_samples_exclude_each_other_only_where_colocated():
    scene = Scene()
    scene.attach(10, "11.0")
    scene.place(10, "t", Role.TRAIN, owner="11.0")
    scene.place(10, "s", Role.SAMPLE, owner="11.0")
    scene.call(11, "11.0", "a", "t", TRAIN)
    scene.call(11, "11.0", "b", "s", SAMPLE)
    scene.end(30, "11.0", "a", cpu=6, gang="t/0")
    scene.end(31, "11.0", "b", cpu=4, gang="s/0")
    scene.job_ended(31, "11.0")
    both = replays(
        scene, 31, models={"t": model("t", train_us_per_token=0.6 * S), "s": model("s", decode_base_us=0.4 * S)}
    )
    assert [replay.wall_us for replay in both] == [(1 + 10) * S, (1 + 6) * S]
    assert [replay.gpus for replay in both] == [1, 2]


def test_calls_that_have_not_ended_do_not_count():
    scene, end = rl_job()
    scene.records = [x for x in scene.records if x.now_us < scene.us(30)]
    trace = traces(scene.records, scene.us(30))["11.0"]
    assert trace.running
    assert all(step.ended for step in trace.steps)
    replay = colocated(trace, 1000, MODELS)
    assert replay.wall_us <= 20 * S
    assert replay.progress[-1] == (scene.us(30), replay.wall_us)


def test_a_job_that_called_nothing_would_have_held_nothing():
    scene = Scene()
    scene.attach(10, "11.0")
    scene.job_ended(30, "11.0")
    assert [replay.gpu_us for replay in replays(scene, 31)] == [0, 0]


def test_samples_that_ran_together_are_cheaper_than_one_by_one():
    """What the shared pool bunched, the replay takes apart: it goes by the tokens, not by the recorded seconds."""
    models = {"t": MODELS["t"], "s": model("s", decode_base_us=0.18 * S, decode_us_per_sequence=0.02 * S)}
    scene, end = rl_job()
    # two samples on each replica: ten steps of 0.18 + 2 * 0.02 s
    assert replays(scene, end, models=models)[0].wall_us == (1 + 1 + 2 * (2.2 + 3 + 5 + 1)) * S


def test_reading_a_prompt_keeps_those_waiting_that_draw():
    scene = Scene()
    scene.attach(0, "11.0")
    scene.place(0, "s", Role.SAMPLE, owner="11.0")
    for number, at in enumerate((1, 2)):
        scene.call(at, "11.0", f"s:{number}", "s", SAMPLE, prompt_tokens=100)
    for number in range(2):
        scene.end(20, "11.0", f"s:{number}", cpu=1, gang="s/0", units=110)
    scene.job_ended(20, "11.0")
    models = {"s": model("s", prefill_us_per_token=S / 100, decode_base_us=S / 10)}
    # the first is read by 2 and draws 0 tokens; the second is read by 3; both draw ten until 4
    assert replays(scene, 20, models=models)[0].wall_us == 4 * S


def test_a_group_without_a_model_takes_what_was_recorded():
    scene, end = rl_job()
    assert replays(scene, end, models={})[0].wall_us == (1 + 1 + 2 * (2 * 2 + 3 + 5 + 1)) * S


def test_the_legs_name_what_the_wall_time_consists_of():
    scene, end = rl_job()
    for gpu in scene.gpus:
        scene.span(gpu, 11, 13, "switch", "t/0", j11_0=1)
    legs = replays(scene, end)[0].legs
    assert [leg.kind for leg in legs] == ["create", "sample", "forward_backward", "sample", "forward_backward", "end"]
    assert legs[0].build_us == 2 * S and legs[0].think_us == S
    assert [leg.run_us // S for leg in legs[1:5]] == [4, 5, 4, 5]
    assert legs[2].think_us == 3 * S and legs[-1].think_us == S
