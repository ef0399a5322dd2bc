"""What is published, and to whom."""

from types import SimpleNamespace

import msgspec
import pytest

from plexrl.accounting.figures import figures
from plexrl.accounting.published import compute, for_reader
from plexrl.accounting.window import Window
from plexrl.types import BadInput, SpanClass
from plexrl.types import records as r
from tests.unit.accounting.scene import S

END = 96.0
KEYS = {
    "pool_gpu_seconds",
    "sacct_gpu_seconds",
    "charged_gpu_seconds",
    "overhead_gpu_seconds",
    "unattributed_gpu_seconds",
    "dedicated_gpu_seconds",
    "dedicated_split_gpu_seconds",
    "saved_gpu_seconds",
    "saved_percent",
    "confidence",
    "shares",
    "jobs",
}


def published(scene, end=END, now=None):
    return compute(scene.records, scene.intervals(end), scene.us(now or end + 5))


def row(scene, gpus, start, end):
    return SimpleNamespace(gpus=gpus, start=scene.us(start) // S, end=None if end is None else scene.us(end) // S)


def test_the_sums_of_a_pool(scene):
    found = figures(published(scene), rows=[row(scene, 2, 0, END)])
    assert found.keys() >= KEYS
    assert found["pool_gpu_seconds"] == found["sacct_gpu_seconds"] == 192
    assert found["charged_gpu_seconds"] == 160
    assert found["overhead_gpu_seconds"] == 2 * (10 + 5 + 1)  # startup from StartTime on, idle, drain
    assert found["unattributed_gpu_seconds"] == 0
    assert found["shares"] == pytest.approx(
        {
            "busy": 128 / 192,
            "switch": 16 / 192,
            "kept": 16 / 192,
            "idle": 10 / 192,
            "startup": 20 / 192,
            "drain": 2 / 192,
        },
        abs=1e-6,
    )
    assert found["confidence"] == "replayed" and found["fit_error"] == 0
    assert not found["running"]
    assert [job["charged"] for job in found["jobs"]] == [80, 80]
    assert [(job["slurm_id"], job["user"], job["account"]) for job in found["jobs"]] == [
        (11, "ada", "ml"),
        (12, "bob", "bio"),
    ]


def test_saved_is_dedicated_less_the_pool_also_below_zero(scene):
    found = figures(published(scene))
    # each job alone: build 1 s, four calls of 8 s, thought between them, alone on two GPUs
    assert found["dedicated_gpu_seconds"] == sum(job["dedicated"] for job in found["jobs"])
    assert found["saved_gpu_seconds"] == pytest.approx(found["dedicated_gpu_seconds"] - 192)
    assert found["saved_percent"] == pytest.approx(
        100 * found["saved_gpu_seconds"] / found["dedicated_gpu_seconds"], abs=0.01
    )
    lonely = [x for x in scene.records if not (isinstance(x, r.JobAttached) and x.job == "12.0")]
    alone = figures(compute(lonely, scene.intervals(END), scene.us(END)))
    assert alone["saved_gpu_seconds"] < 0
    assert alone["saved_percent"] < 0


def test_a_user_gets_own_jobs_and_sums_that_name_nobody(scene):
    whole = published(scene)
    mine = for_reader(whole, 1001)
    raw = msgspec.msgpack.encode(mine)
    for foreign in (b"bob", b"bio", b"12.0"):
        assert foreign not in raw
    assert [job.user for job in mine.jobs] == ["ada"]
    assert {job for bar in mine.timeline for job, _ in bar.shares} == {"11.0"}
    both = figures(whole), figures(mine)
    for key in KEYS - {"jobs"}:
        assert both[0][key] == both[1][key]
    with pytest.raises(BadInput, match="your own jobs only"):
        figures(mine, user="bob")
    assert [job["user"] for job in figures(whole, user="bob")["jobs"]] == ["bob"]


def test_since_counts_from_its_minute_on(scene):
    whole = published(scene)
    late = figures(whole, Window(scene.us(60)), rows=[row(scene, 2, 0, END)])
    assert late["pool_gpu_seconds"] == late["sacct_gpu_seconds"] == 2 * (END - 60)
    early = figures(whole, Window(scene.us(-1000)))
    assert early["dedicated_gpu_seconds"] == figures(whole)["dedicated_gpu_seconds"] > late["dedicated_gpu_seconds"] > 0
    with pytest.raises(BadInput, match="later"):
        figures(whole, Window(scene.us(500)))


def test_while_a_head_runs_the_report_ends_with_its_last_closed_spans(scene):
    scene.records = [x for x in scene.records if x.now_us <= scene.us(60)]
    scene.records = [x for x in scene.records if not (isinstance(x, r.SpanClosed) and x.span.end_us > scene.us(50))]
    found = figures(compute(scene.records, scene.intervals(60), scene.us(61)), rows=[row(scene, 2, 0, None)])
    assert found["running"]
    assert found["pool_gpu_seconds"] == found["sacct_gpu_seconds"] == 100
    assert found["unattributed_gpu_seconds"] == 0
    assert all(job["running"] for job in found["jobs"])


def test_a_pool_that_died_owes_an_explanation(scene):
    scene.records = [x for x in scene.records if x.now_us <= scene.us(40)]
    died = compute(scene.records, scene.intervals(70), scene.us(3600))
    found = figures(died)
    assert not found["running"]
    assert found["unattributed_gpu_seconds"] == 2 * 30
    assert found["pool_gpu_seconds"] == 140
    assert "vanished" in found["notes"][0]
    assert died.jobs[0].ended_us == scene.us(40)


def test_the_next_head_of_an_allocation_does_not_start_it_again(scene):
    scene.records = [x for x in scene.records if x.now_us <= scene.us(40)]
    scene.epoch(0, 52)
    for gpu in scene.gpus:
        scene.span(gpu, 40, 44, "startup")
        scene.span(gpu, 52, 60, "idle")
    scene.stop(60)
    whole = compute(scene.records, scene.intervals(60), scene.us(200))
    assert sum(m.unattributed_us for m in whole.minutes) == 2 * 8 * S
    assert ["vanished" in note for note in whole.notes] == [True]
    assert sum(m.classes.get(SpanClass.STARTUP, 0) for m in whole.minutes) == 2 * 14 * S


def test_a_lost_agent_ends_what_its_gpu_cost(scene):
    short = [i if i.gpu == "n1:0" else msgspec.structs.replace(i, end_us=scene.us(50)) for i in scene.intervals(END)]
    found = figures(compute(scene.records, short, scene.us(200)))
    assert found["pool_gpu_seconds"] == END + 50
    total = found["charged_gpu_seconds"] + found["overhead_gpu_seconds"] + found["unattributed_gpu_seconds"]
    assert total == pytest.approx(END + 50)


def test_only_slurm_jobs_are_asked_of_slurm(scene):
    assert published(scene).slurm_jobs == (7,)
    private = [msgspec.structs.replace(scene.records[0], slurm_job=0)]
    assert compute(private, [], scene.us(9)).slurm_jobs == ()


def test_an_empty_pool_has_a_report():
    found = figures(compute([], [], 0))
    assert found["pool_gpu_seconds"] == 0
    assert found["saved_percent"] is None


def test_a_job_ends_with_its_last_session_not_when_that_is_noticed(scene):
    opened = r.SessionOpened(now_us=scene.us(10), session="s", job="11.0", uid=1001, account="ml", key="")
    closed = r.SessionEnded(now_us=scene.us(85), session="s", reason="success")
    scene.records = sorted([*scene.records, opened, closed], key=lambda x: x.now_us)
    assert published(scene).jobs[0].ended_us == scene.us(85)
    assert published(scene).jobs[1].ended_us == scene.us(90)
