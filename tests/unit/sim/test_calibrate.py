"""A recorded run of the demo (two jobs, two pretend GPUs) against its simulation."""

from pathlib import Path

import pytest
from msgspec import structs

from plexrl.sim import trace as t
from plexrl.sim.calibrate import calibrate, policy
from plexrl.types import BadInput

DEMO = Path(__file__).parent / "data" / "demo.jsonl.gz"


@pytest.fixture(scope="module")
def recording():
    return t.read(DEMO)


def test_step_times_and_busy_shares_of_a_live_run_are_predicted(recording):
    found = calibrate(recording)
    assert [row.calls for row in found.rows] == [425, 217]
    for row in found.rows:
        assert abs(row.step_error) < 0.15
        assert abs(row.busy_error) < 0.05
        assert abs(row.wall_error) < 0.12
    assert all(one.error < 0.15 for one in found.fits)


def test_it_is_the_same_each_time(recording):
    assert calibrate(recording) == calibrate(recording)


def test_what_was_recorded_is_told_as_it_was(recording):
    """By hand from the trace: the mean over its steps, and the charge over GPUs and time."""
    row = calibrate(recording).rows[1]
    job = recording.jobs[1]
    assert row.wall_s == (job.ended_us - job.arrival_us) / 1e6
    assert row.busy == job.busy_us / 2 / (job.ended_us - job.arrival_us)
    publications = [c for c in recording.calls if c.job == job.job and c.kind == "publish"]
    mine = [c for c in recording.calls if c.job == job.job]
    bounds = [(0, 0), *((c.accepted_us, c.ended_us) for c in publications)]
    steps = []
    for (before, _), (last, _) in zip(bounds, bounds[1:], strict=False):
        step = [c for c in mine if before < c.accepted_us <= last]
        steps.append(max(c.ended_us for c in step) - min(c.accepted_us for c in step))
    tail = [c for c in mine if c.accepted_us > publications[-1].accepted_us]
    steps += [max(c.ended_us for c in tail) - min(c.accepted_us for c in tail)] if tail else []
    assert row.steps == len(steps)
    assert row.step_s == pytest.approx(sum(steps) / len(steps) / 1e6)


def test_the_policy_is_the_recorded_one(recording):
    found = policy(recording)
    assert (found.placement, found.order, found.quantum_us) == ("pack", "fifo", 10_000_000)
    header = structs.replace(recording.header, policy={"order": "alphabet"})
    with pytest.raises(BadInput, match="alphabet"):
        policy(structs.replace(recording, header=header))
    header = structs.replace(recording.header, policy={"quantum_us": "long"})
    with pytest.raises(BadInput, match="quantum_us"):
        policy(structs.replace(recording, header=header))


def test_a_job_without_a_place_is_named(recording):
    header = structs.replace(recording.header, gpu_bytes=10**6)
    with pytest.raises(BadInput, match="found no place"):
        calibrate(structs.replace(recording, header=header))
