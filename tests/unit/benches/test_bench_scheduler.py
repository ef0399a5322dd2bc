"""bench.scheduler: figures are there, what it drives are whole programs, and twice the same. No timing is asserted."""

import json

import pytest

from bench import scheduler as bench
from plexrl.scheduler import Policy, Scheduler
from plexrl.types import Role


def _drive(events: int) -> bench.Drive:
    specs = bench.deployments(24, 16)
    gpus = {f"n{i // 8}:{i % 8}": bench.GPU_BYTES for i in range(16)}
    core = Scheduler(gpus, Policy(**bench.POLICY, paranoid=True), virtual=True)
    core.start(0)
    drive = bench.Drive(core, specs, seed=3)
    drive.place_all()
    drive.begin()
    drive.events(events)
    return drive


def test_the_mix():
    specs = bench.deployments(1000, 2048)
    trainers = [spec for spec in specs if spec.role is Role.TRAIN]
    assert len(trainers) == 500 and {spec.gang_size for spec in trainers} == {1, 2, 4, 8}
    slots = sum(spec.gang_size * spec.replicas for spec in specs)
    assert specs[0].duty * slots == pytest.approx(bench.LOAD * 2048)


def test_programs_go_round_and_every_rule_holds():
    drive = _drive(2000)
    assert {"submit", "finished", "switched", "tick"} <= drive.ns.keys()
    assert drive.ended > 500
    assert sum(map(len, drive.running.values())) <= len(drive.outstanding)


def test_twice_the_same():
    one, other = _drive(1000), _drive(1000)
    assert {event: len(ns) for event, ns in one.ns.items()} == {event: len(ns) for event, ns in other.ns.items()}
    assert one.now == other.now and one.outstanding == other.outstanding


def test_the_reference_serves_the_same_programs():
    drive = bench.Drive(bench.Locks(2), bench.deployments(24, 16), seed=3)
    drive.begin()
    drive.events(2000)
    assert drive.ended > 500


def test_figures(capsys: pytest.CaptureFixture[str]):
    assert bench.main(["--json", "--deployments", "8", "16", "--gpus", "16", "--events", "200"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["deployments"] for row in rows] == [8, 16]
    for row in rows:
        assert {"mean_us", "p99_us", "cpu_us", "reference_cpu_us", "ratio", "place_us", "waiting_calls"} <= row.keys()
        assert row["events"] >= 200
        assert sum(each["share"] for each in row["by_event"].values()) == pytest.approx(1, abs=0.01)


def test_what_does_not_fit_is_said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bench, "STATE_BYTES", dict.fromkeys(Role, bench.GPU_BYTES + 1))
    assert bench.main(["--deployments", "8", "--gpus", "16", "--events", "200"]) == 3
    assert "bench.scheduler: " in capsys.readouterr().err


def test_the_table(capsys: pytest.CaptureFixture[str]):
    assert bench.main(["--deployments", "8", "--gpus", "16", "--events", "200"]) == 0
    assert "FIFO lock" in capsys.readouterr().out
