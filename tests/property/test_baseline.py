"""The replay of any history adds up, and no wording or cutting of a report changes its sums."""

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from plexrl.accounting.figures import figures, sacct_gpu_us
from plexrl.accounting.fit import Fit
from plexrl.accounting.groups import KEYS, rows
from plexrl.accounting.published import compute, dedicated, for_reader, per_minute
from plexrl.accounting.replay import colocated, separate
from plexrl.accounting.sweep import held
from plexrl.accounting.trace import traces
from plexrl.accounting.window import ALL
from plexrl.scheduler.costs import ServiceModel
from plexrl.types import CallKind, Role
from plexrl.types import records as r
from tests.unit.accounting.scene import S, Scene

USERS = (("ada", 1001, "ml"), ("bob", 1002, "bio"), ("cem", 1003, "bio"))
KINDS = {"t": (CallKind.FORWARD_BACKWARD, CallKind.OPTIM_STEP, CallKind.SAVE_STATE), "s": (CallKind.SAMPLE,)}


@st.composite
def histories(draw):
    """Jobs that call trainers and samplers in any order, with any number of calls in flight, some never ended."""
    scene = Scene(gpus=("n1:0", "n1:1"))
    count = draw(st.integers(1, 3))
    for number in range(count):
        user, uid, account = USERS[number]
        scene.attach(5, f"{11 + number}.0", uid, user, account, declared_gpus=draw(st.integers(0, 4)))
        scene.place(5, f"t{number}", Role.TRAIN, gang_size=draw(st.integers(1, 2)))
        scene.place(5, f"s{number}", Role.SAMPLE, replicas=draw(st.integers(1, 2)))
    at, flying = 6.0, []
    for call in range(draw(st.integers(0, 14))):
        job, what = draw(st.integers(0, count - 1)), draw(st.sampled_from("ts"))
        id = f"{job}:{call}"
        sequences = draw(st.integers(1, 3))
        kind = draw(st.sampled_from(KINDS[what]))
        scene.call(at, f"{11 + job}.0", id, f"{what}{job}", kind, prompt_tokens=5, sequences=sequences)
        flying.append((job, what, id, at))
        at += draw(st.floats(0, 3))
        while flying and draw(st.booleans()):
            job, what, id, began = flying.pop(draw(st.integers(0, len(flying) - 1)))
            at += draw(st.floats(0.001, 4))
            gang = f"{what}{job}/0"
            scene.span(
                "n1:0", began, at, draw(st.sampled_from(("busy", "switch", "kept"))), gang, **{f"j{11 + job}_0": 1}
            )
            wall = draw(st.floats(0, at - began))
            scene.end(at, f"{11 + job}.0", id, cpu=wall / 2, wall=wall, gang=gang, units=draw(st.integers(1, 40)))
    for number in range(count):
        if draw(st.booleans()):
            scene.job_ended(at, f"{11 + number}.0")
    if draw(st.booleans()):
        scene.stop(at)
    return scene, at + draw(st.floats(0, 200))


@given(histories())
def test_the_legs_of_a_baseline_are_its_wall_time_and_its_minutes_are_all_of_it(history):
    scene, end = history
    found = list(dedicated(scene.records, scene.us(end), 150))
    assert found
    for _, *both, _ in found:
        for replay in both:
            assert sum(leg.us for leg in replay.legs) == replay.wall_us >= 0
            parts = [(leg.think_us, leg.wait_us, leg.build_us, leg.move_us, leg.run_us) for leg in replay.legs]
            assert min((part for leg in parts for part in leg), default=0) >= -1  # times are rounded one by one
            assert sum(per_minute(replay).values()) == replay.gpu_us
            assert list(replay.progress) == sorted(replay.progress)


@given(histories())
def test_nobodys_view_changes_a_sum_and_every_way_of_adding_up_agrees(history):
    scene, end = history
    whole = compute(scene.records, scene.intervals(end), scene.us(end), 150, True)
    told = figures(whole)
    parts = ("charged_gpu_seconds", "overhead_gpu_seconds", "unattributed_gpu_seconds")
    assert round(1e6 * sum(told[part] for part in parts)) == round(1e6 * told["pool_gpu_seconds"])
    assert round(1e6 * (told["dedicated_gpu_seconds"] - told["pool_gpu_seconds"])) == round(
        1e6 * told["saved_gpu_seconds"]
    )
    assert told["saved_gpu_seconds"] <= told["ideal_saved_gpu_seconds"] + 1e-6 or told["pool_gpu_seconds"] < max(
        job["dedicated"] for job in told["jobs"]
    )
    for key in KEYS:
        found = rows([(whole, whole.jobs)], ALL, (key,))
        assert abs(sum(row["charged"] for row in found) - told["charged_gpu_seconds"]) < 1e-5
        assert abs(sum(row["dedicated"] for row in found) - told["dedicated_gpu_seconds"]) < 1e-5
    mine = for_reader(whole, 1001, {"none"})
    assert {job.uid for job in mine.jobs} <= {1001}
    assert {name for bar in mine.timeline for name, _ in bar.shares} <= {"", "11.0"}
    assert figures(mine)["pool_gpu_seconds"] == told["pool_gpu_seconds"]


@given(
    st.lists(st.tuples(st.sampled_from(("n1:0", "n1:1", "n2:0")), st.integers(0, 300), st.integers(1, 200)), max_size=6)
)
def test_slurms_sum_is_the_agents_sum_where_both_saw_the_same(runs):
    """Requeued and resized allocations are rows of their own in sacct, and intervals of their own of the agents."""
    used: dict[str, int] = {}
    intervals, sacct = [], []
    for job, (gpu, gap, length) in enumerate(runs):
        start = used.get(gpu, 0) + gap
        used[gpu] = start + length
        begin, end = start * S, (start + length) * S
        intervals.append(
            r.AgentInterval(now_us=end, node=gpu[:2], gpu=gpu, slurm_job=job, start_us=begin, end_us=end, final=True)
        )
        sacct.append(SimpleNamespace(gpus=1, start=start, end=start + length))
    holding = held(intervals, 10**12)
    assert sacct_gpu_us(sacct, 0, 10**12) == sum(end - start for pieces in holding.values() for start, end in pieces)


@given(st.integers(1, 20), st.integers(1, 8), st.floats(0, 0.5), st.floats(0, 0.2))
def test_a_synchronous_jobs_baseline_is_what_its_model_says(steps, samples, base, each):
    """One burst, one training call, a second of thought: worked out beside the replay."""
    scene = Scene(gpus=("n1:0",))
    scene.attach(0, "11.0")
    scene.place(0, "t", Role.TRAIN)
    scene.place(0, "s", Role.SAMPLE)
    at = 0.0
    for step in range(steps):
        for sample in range(samples):
            scene.call(at + 1, "11.0", f"s:{step}:{sample}", "s", CallKind.SAMPLE)
        for sample in range(samples):
            scene.end(at + 2, "11.0", f"s:{step}:{sample}", cpu=1, gang="s/0")
        scene.call(at + 2, "11.0", f"t:{step}", "t", CallKind.FORWARD_BACKWARD)
        scene.end(at + 4, "11.0", f"t:{step}", cpu=2, gang="t/0")
        at += 4
    scene.job_ended(at, "11.0")
    models = {
        "s": _model("s", decode_base_us=base * S, decode_us_per_sequence=each * S),
        "t": _model("t", train_us_per_token=S / 10),
    }
    (trace,) = traces(scene.records, scene.us(at)).values()
    expected = steps * (1 + 10 * (base + each * samples) + 1)
    for replay in (colocated(trace, None, models), separate(trace, models)):
        assert abs(replay.wall_us / S - expected) < 1e-3 * max(1, steps)


def _model(group, **service):
    return Fit(group=group, calls=1, observed=1, service=ServiceModel(**service), error=0.0)
