"""The Philly trace as jobs: the mapping by hand, and errors that name the place."""

import gzip

import pytest

from plexrl.sim.generate import step_us
from plexrl.sim.philly import philly
from plexrl.types import BadInput

HEAD = "timestamp,duration,num_gpus,gpu_time,cluster\n"
ROWS = (
    "2017-10-01 00:10:00,6059.0,8,48000.0,bb\n"
    "2017-10-01 00:00:00,1200.0,1,1200.0,aa\n"
    "2017-10-01 00:05:00,1199.9,1,1199.9,aa\n"
    "2017-10-01 01:00:00,60000.0,32,1.0,aa\n"
)


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "philly.csv"
    path.write_text(HEAD + ROWS)
    return path


def test_the_mapping(trace):
    found = philly(trace)
    small, node, large = found.workload.jobs
    assert found.dropped == 1
    assert [plan.arrival_us for plan in found.workload.jobs] == [0, 600_000_000, 3_600_000_000]
    assert [plan.steps for plan in found.workload.jobs] == [2, 10, 100]
    assert [plan.account for plan in found.workload.jobs] == ["aa", "bb", "aa"]
    assert [plan.model for plan in found.workload.jobs] == ["0.5B", "7B", "32B"]
    assert [plan.train.gpus for plan in found.workload.jobs] == [1, 8, 32]
    assert [(plan.sample.replicas, plan.sample.gpus) for plan in found.workload.jobs] == [(1, 1), (4, 1), (4, 4)]
    assert found.workload.gpus.size == 512
    for plan in (small, node, large):
        assert plan.train.device_bytes + plan.train.residual_bytes < found.workload.gpus.bytes
        assert plan.sample.device_bytes + plan.sample.residual_bytes < found.workload.gpus.bytes


def test_a_step_alone_lasts_as_long_as_stated(trace):
    for plan in philly(trace, step_s=300).workload.jobs:
        assert step_us(plan, steps=100) == pytest.approx(300e6, rel=0.08)


def test_arrivals_come_faster(trace):
    assert [plan.arrival_us for plan in philly(trace, compress=10).workload.jobs][1] == 60_000_000


def test_the_first_jobs_by_arrival_are_kept(trace):
    found = philly(trace, jobs=2)
    assert [plan.train.gpus for plan in found.workload.jobs] == [1, 8]
    assert found.dropped == 1
    assert philly(trace, jobs=1).dropped == 0


def test_a_gzipped_file_is_the_same(trace, tmp_path):
    packed = tmp_path / "philly.csv.gz"
    packed.write_bytes(gzip.compress(trace.read_bytes()))
    assert philly(packed) == philly(trace)


def test_seeds_differ_in_phases_only(trace):
    a, b = (philly(trace, seed=seed).workload for seed in (0, 1))
    assert a.jobs != b.jobs
    assert [plan.steps for plan in a.jobs] == [plan.steps for plan in b.jobs]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (HEAD.replace("num_gpus", "gpus") + ROWS, "num_gpus"),
        (HEAD + "2017-10-01 00:00:00,long,1,1,aa\n", "philly.csv:2: duration: 'long'"),
        (HEAD + "2017-10-01 00:00:00,1e4,1,1,aa\nyesterday,1e4,1,1,aa\n", "philly.csv:3: timestamp"),
        (HEAD + "2017-10-01 00:00:00,1e4\n", "num_gpus"),
        (HEAD + "2017-10-01 00:00:00,60,1,1,aa\n", "no job lasts"),
        ("", "timestamp"),
    ],
)
def test_a_wrong_file_is_told_where(tmp_path, text, told):
    path = tmp_path / "philly.csv"
    path.write_text(text)
    with pytest.raises(BadInput) as error:
        philly(path)
    assert told in str(error.value)


def test_a_missing_file_says_where_to_get_it(tmp_path):
    with pytest.raises(BadInput, match="osdi21-artifact"):
        philly(tmp_path / "none.csv")


def test_a_damaged_archive(tmp_path):
    (tmp_path / "p.gz").write_bytes(gzip.compress(HEAD.encode())[:-9])
    with pytest.raises(BadInput, match="cannot be read"):
        philly(tmp_path / "p.gz")


@pytest.mark.parametrize("given", [{"step_s": 0}, {"compress": -1}])
def test_numbers_that_make_no_sense(trace, given):
    with pytest.raises(BadInput, match="above 0"):
        philly(trace, **given)
