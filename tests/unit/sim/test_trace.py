"""Traces in files, and as workloads: what the fits find in calls that were made by known models."""

import gzip
from pathlib import Path

import pytest
from msgspec import structs

from plexrl.scheduler.costs import SWITCH_PRIOR, ServiceModel, SwitchModel
from plexrl.sim import trace as t
from plexrl.sim.files import read as read_workload
from plexrl.sim.fitted import fit, fit_switch, workload
from plexrl.types import BadInput, CallKind, Role

DEMO = Path(__file__).parent / "data" / "demo.jsonl.gz"
TRAINER = ServiceModel(train_us_per_token=50.0, optim_us=40_000.0, call_us=10_000.0)
SAMPLER = ServiceModel(decode_base_us=2_000.0, decode_us_per_sequence=100.0)


@pytest.fixture
def recording():
    """One job, three steps: two samples at once, a forward_backward, an optim_step, a publication."""
    calls, now, given, after = [], 0, 0, ""

    def call(kind, group, units, us, start, seen, think, seq=None):
        nonlocal after
        id = f"c{len(calls)}"
        calls.append(
            t.Request(
                id=id, job="7.0", group=group, kind=kind, seq=seq, gang=f"{group}/0", units=units, served_us=us,
                accepted_us=start, started_us=start, ended_us=start + us, delivered_us=start + us, seen=seen,
                think_us=think, after=after,
            )
        )  # fmt: skip
        return start + us

    for step in range(3):
        seen, start = given, now + 1000
        for tokens in (100 + 20 * step, 200):
            # The shorter leaves half of the longer alone, or less: the batch's mean is between 1 and 2.
            shorter = 100 + 20 * step
            us = shorter * 2_200 + (tokens - shorter) * 2_100
            now = call(CallKind.SAMPLE, "s", tokens, us, start, seen, 1000 if step else 500)
        given += 2
        after = calls[-1].id
        for kind, units in ((CallKind.FORWARD_BACKWARD, 1000 * (step + 1)), (CallKind.OPTIM_STEP, 1)):
            us = TRAINER.train_us(units) if kind is CallKind.FORWARD_BACKWARD else TRAINER.step_optimizer_us()
            now = call(kind, "t", units, us, now + 2000, given, 2000, seq=len(calls))
            given += 1
            after = calls[-1].id
        now = call(CallKind.PUBLISH, "t", 1, 7_000 + 1000 * step, now + 3000, given, 3000, seq=len(calls))
        given += 1
        after = calls[-1].id
    return t.Recording(
        header=t.Header(version=1, pool="lab", from_us=10, until_us=now, gpus=("n1:0", "n1:1"), gpu_bytes=100),
        jobs=[t.Job(job="7.0", user="ada", account="ml", arrival_us=0, ended_us=now, busy_us=5)],
        groups=[
            t.Group(
                group="t",
                role=Role.TRAIN,
                base="m",
                device_bytes=60,
                host_bytes=50,
                residual_bytes=1,
                seats=(t.Seat(gang="t/0", gpus=("n1:0", "n1:1"), build_us=9, switches=2, switch_us=700_000),),
            ),
            t.Group(
                group="s", role=Role.SAMPLE, base="m", device_bytes=30, seats=(t.Seat(gang="s/0", gpus=("n1:0",)),)
            ),
        ],
        moves=[
            t.Move(gang="t/0", gpu=gpu, at_us=5, took_us=200_000, **moved)
            for gpu in ("n1:0", "n1:1")
            for moved in ({"incoming": True, "bytes_in": 4 * 10**9}, {"incoming": False, "bytes_out": 2 * 10**9})
        ],
        calls=calls,
    )


def test_a_file_gives_back_what_was_written(recording, tmp_path):
    recording = structs.replace(recording, links=[t.Link(node="n1", gbps_in=8.0, overhead_us=7)])
    t.write(recording, tmp_path / "t.jsonl")
    assert t.read(tmp_path / "t.jsonl") == recording
    (tmp_path / "t.gz").write_bytes(gzip.compress(t.encode(recording)))
    assert t.read(tmp_path / "t.gz") == recording


def test_the_fits_find_the_models_that_made_the_calls(recording):
    found = fit(recording)
    assert found["t"].error < 1e-6
    assert found["t"].service.train_us_per_token == pytest.approx(50)
    assert found["t"].service.optim_us == pytest.approx(40_000)
    assert found["t"].other_us == {CallKind.PUBLISH: 8_000}
    # A batch is averaged over time, and steps of two take longer than steps of one: not exact.
    assert found["s"].service.decode_base_us == pytest.approx(2_000, rel=0.01)
    assert found["s"].service.decode_us_per_sequence == pytest.approx(100, rel=0.05)


def test_calls_of_one_length_still_take_a_time_per_token(recording):
    """One length and one batch: overhead and steps cannot be told apart, and a replay needs steps."""
    calls = [
        structs.replace(call, units=100, started_us=i * 10**6, ended_us=i * 10**6 + 500_000, served_us=500_000)
        for i, call in enumerate(c for c in recording.calls if c.kind is CallKind.SAMPLE)
    ]
    found = fit(structs.replace(recording, calls=calls))["s"]
    assert found.service.step_us(1) == pytest.approx(5_000)


def test_the_switch_model(recording):
    """Rates of the copies; two switches of 0.7 s together, of which each copied 0.2 s in and 0.2 s out."""
    found = fit_switch(recording)
    assert found.gbps_in == pytest.approx(20)
    assert found.gbps_out == pytest.approx(10)
    assert found.overhead_us == 150_000
    assert fit_switch(structs.replace(recording, moves=[], groups=[])) == structs.replace(SWITCH_PRIOR, exchange=False)


def test_the_switch_model_of_a_pool_that_had_learned_its_links(recording):
    links = [
        t.Link(node="n1", gbps_in=8.0, gbps_out=4.0, gbps_refill=1.0, overhead_us=2_000),
        t.Link(node="n2", gbps_in=4.0, overhead_us=1_000),  # nothing has left it yet
    ]
    found = fit_switch(structs.replace(recording, links=links))
    assert found == SwitchModel(gbps_in=6.0, gbps_out=4.0, overhead_us=1_500, exchange=True)
    assert found.switch_us(6 * 10**9, 10**9) == 1_001_500


def test_the_workload_has_the_calls_with_their_edges(recording):
    given = workload(recording)
    (plan,) = given.jobs
    assert (given.name, given.gpus.nodes, given.gpus.per_node, given.gpus.bytes) == ("lab", 1, 2, 100)
    assert (plan.train.gpus, plan.train.device_bytes, plan.train.build_us, plan.sample.gpus) == (2, 60, 9, 1)
    assert (plan.steps, plan.user, plan.base) == (3, "ada", "")
    assert [call.step for call in plan.recorded.calls] == [0] * 5 + [1] * 5 + [2] * 5
    assert [call.seen for call in plan.recorded.calls[:7]] == [0, 0, 2, 3, 4, 5, 5]
    assert [call.role for call in plan.recorded.calls[:3]] == [Role.SAMPLE, Role.SAMPLE, Role.TRAIN]
    assert [call.think_us for call in plan.recorded.calls[:3]] == [500, 500, 2000]
    assert plan.recorded.calls[2].service_us == pytest.approx(60_000, abs=2)
    assert sorted(plan.recorded.delivered) == list(range(15))


def test_adapters_of_a_base_share_its_groups(recording):
    groups = [structs.replace(group, shared=True) for group in recording.groups]
    second = [structs.replace(call, id=f"d{call.id}", job="8.0") for call in recording.calls]
    both = structs.replace(
        recording,
        groups=groups,
        jobs=[*recording.jobs, structs.replace(recording.jobs[0], job="8.0")],
        calls=recording.calls + second,
    )
    a, b = workload(both).jobs
    assert a.base == b.base == "t s"
    assert (a.train, a.sample) == (b.train, b.sample)


@pytest.mark.parametrize("role", list(Role))
def test_a_job_of_one_role(recording, role):
    keep = "s" if role is Role.SAMPLE else "t"
    calls = [structs.replace(call, seen=0) for call in recording.calls if call.group == keep]
    groups = [group for group in recording.groups if group.group == keep]
    (plan,) = workload(structs.replace(recording, calls=calls, groups=groups)).jobs
    assert {call.role for call in plan.recorded.calls} == {role}


def test_a_trace_is_a_workload_file():
    given = read_workload(DEMO, seed=4)
    assert given == structs.replace(workload(t.read(DEMO)), seed=4)
    assert [len(plan.recorded.calls) for plan in given.jobs] == [425, 217]


def test_no_job_is_no_workload(recording):
    with pytest.raises(BadInput, match="no job"):
        workload(structs.replace(recording, calls=[]))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda lines: [], "empty"),
        (lambda lines: lines[1:], ":1: the header is missing"),
        (lambda lines: [lines[0], lines[0]], ":2: a second header"),
        (lambda lines: [lines[0].replace(b'"version":1', b'"version":9')], "version 9"),
        (lambda lines: [*lines[:2], b'{"type":"call"}'], ":3: "),
        (lambda lines: [*lines[:2], lines[2][:-5]], ":3: "),
        (lambda lines: [lines[0], *lines[2:]], "its job '7.0' has no line"),
        (lambda lines: [*lines[:2], *lines[4:]], "its group 's' has no line"),
    ],
)
def test_a_wrong_file_is_told_where(recording, change, told):
    lines = change(t.encode(recording).splitlines())
    with pytest.raises(BadInput) as error:
        t.parse(lines, "t.jsonl")
    assert told in str(error.value)
    assert "t.jsonl" in str(error.value)


def test_files_that_cannot_be_used(recording, tmp_path):
    with pytest.raises(BadInput, match="cannot be read"):
        t.read(tmp_path / "none")
    with pytest.raises(BadInput, match="cannot be written"):
        t.write(recording, tmp_path / "no" / "t.jsonl")
    (tmp_path / "cut.gz").write_bytes(gzip.compress(t.encode(recording))[:-9])
    with pytest.raises(BadInput, match="cannot be read"):
        t.read(tmp_path / "cut.gz")
    assert not t.is_trace(tmp_path / "none")
