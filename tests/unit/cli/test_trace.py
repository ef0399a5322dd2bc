"""`plexrl trace`: who may export, what a ledger becomes, and the table of a calibration."""

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from plexrl.accounting.export import export
from plexrl.accounting.store import Ledger
from plexrl.cli.main import app
from plexrl.pool.layout import Layout
from plexrl.sim import trace as t
from plexrl.types import BadInput, CallKind, PlexrlError, Role
from plexrl.wire.registry import Declared, Registry
from tests.unit.accounting.scene import S, Scene

DEMO = Path(__file__).parents[1] / "sim" / "data" / "demo.jsonl.gz"
CONFIG = """\
state_dir: {state}
models: {{m: {{path: /nowhere}}}}
device: {{bytes: 1GiB}}
host: {{bytes: 2GiB}}
scheduler: {{placement: isolated, quantum: 5s}}
"""


@pytest.fixture
def scene():
    """Ada makes a model (10 to 12 s), samples twice at once, trains; bob samples meanwhile and is refused once."""
    scene = Scene(start=4)
    scene.attach(9, "11.0", 1001, "ada", "ml")
    scene.attach(9, "12.0", 1002, "bob", "bio")
    scene.place(10, "a", Role.TRAIN, gang_size=2, owner="11.0")
    scene.place(10, "s", Role.SAMPLE, replicas=2, owner="11.0")
    for gpu in scene.gpus:
        scene.span(gpu, 10, 12, "switch", "a/0", j11_0=1)
        scene.switched(12, "a/0", gpu, bytes_in=70, seconds=0.5)
    scene.model(10, "11.0", "m1", "a")
    scene.end(12, "11.0", "m1:0", cpu=0, gang="")
    for number in (1, 2):
        scene.call(13, "11.0", f"s:{number}", "s", after="m1:0")
    scene.call(13, "12.0", "s:9", "s", uid=1002)
    scene.span("n1:0", 13, 17, "busy", "s/0", j11_0=1)
    scene.span("n2:0", 13, 15, "busy", "s/1", j12_0=1)
    scene.end(15, "12.0", "s:9", cpu=2, gang="s/1")
    scene.end(17, "11.0", "s:1", cpu=4, gang="s/0")
    scene.end(17, "11.0", "s:2", cpu=4, gang="s/0", delivered=18)
    scene.call(19, "11.0", "m1:1", "a", CallKind.FORWARD_BACKWARD, after="s:2")
    for gpu in scene.gpus:  # a switch, then a turn that another broke off for a second
        scene.span(gpu, 19, 20, "switch", "a/0", j11_0=1)
        scene.span(gpu, 20, 22, "busy", "a/0", j11_0=1)
        scene.span(gpu, 22, 23, "idle")
        scene.span(gpu, 23, 25, "busy", "a/0", j11_0=1)
    scene.end(25, "11.0", "m1:1", cpu=5, gang="a/0")
    scene.call(26, "12.0", "s:10", "s", uid=1002)
    scene.end(26, "12.0", "s:10", cpu=0, gang="")
    scene.stop(30)
    return scene


def test_calls_with_their_times_and_edges(scene):
    found = export(scene.records)
    zero = 10 * S  # the first request: ada's model
    assert found.header.from_us == scene.us(10)
    assert found.header.until_us == 30 * S - zero
    assert found.header.gpus == ("n1:0", "n2:0")
    assert found.header.classes == {"busy": 14 * S, "idle": 2 * S, "switch": 6 * S}
    assert not found.header.virtual
    calls = {call.id: call for call in found.calls}
    assert list(calls) == ["s:1", "s:2", "s:9", "m1:1"]  # no creation, and not what never ran
    first, train = calls["s:1"], calls["m1:1"]
    assert (first.accepted_us, first.started_us, first.ended_us) == (3 * S, 3 * S, 7 * S)
    assert (first.seen, first.think_us, first.after, first.gang) == (0, 1 * S, "", "s/0")
    assert (first.served_us, first.units, first.delivered_us) == (4 * S, 10, 7 * S)
    assert (train.seen, train.think_us, train.after) == (2, 1 * S, "s:2")
    assert (train.accepted_us, train.started_us, train.served_us) == (9 * S, 10 * S, 4 * S)
    assert calls["s:9"].seen == 0


def test_jobs_groups_and_switches(scene):
    found = export(scene.records)
    ada, bob = found.jobs
    assert (ada.job, ada.user, ada.account, ada.arrival_us, ada.ended_us) == ("11.0", "ada", "ml", 0, 15 * S)
    assert (ada.busy_us, ada.switch_us) == (12 * S, 6 * S)
    assert (bob.arrival_us, bob.busy_us) == (3 * S, 2 * S)
    trainer, sampler = found.groups
    assert (trainer.role, trainer.base, trainer.shared, trainer.host_bytes) == (Role.TRAIN, "m", True, 70)
    assert trainer.seats == (t.Seat(gang="a/0", gpus=("n1:0", "n2:0"), build_us=2 * S, switches=1, switch_us=1 * S),)
    assert [seat.gang for seat in sampler.seats] == ["s/0", "s/1"]
    assert [(move.gpu, move.bytes_in, move.took_us, move.at_us) for move in found.moves] == [
        ("n1:0", 70, 500_000, 2 * S),
        ("n2:0", 70, 500_000, 2 * S),
    ]


def test_nothing_that_users_sent(scene):
    assert b"secret" not in t.encode(export(scene.records))


def test_one_users_jobs(scene):
    for user in ("bob", "1002"):
        found = export(scene.records, user=user)
        assert [job.user for job in found.jobs] == ["bob"]
        assert {call.job for call in found.calls} == {"12.0"}
        assert [group.group for group in found.groups] == ["s"]
        assert found.moves == []
    with pytest.raises(BadInput, match="no call of user eve"):
        export(scene.records, user="eve")
    with pytest.raises(BadInput, match="no epoch"):
        export([])


@pytest.fixture
def registry(scene, tmp_path, monkeypatch):
    """The scene as pool `lab` of this account."""
    state = tmp_path / "state"
    Layout(state).make()
    ledger = Ledger(Layout(state).ledger)
    for record in scene.records:
        ledger.take(record)
    ledger.close()
    (tmp_path / "plexrl.yaml").write_text(CONFIG.format(state=state))
    directory = tmp_path / "registry"
    directory.mkdir(mode=0o755)
    declared = Declared(
        name="lab",
        kind="private",
        owner_uid=os.getuid(),
        config=str(tmp_path / "plexrl.yaml"),
        state_dir=str(state),
    )
    Registry(directory, frozenset({os.getuid()})).declare(declared)
    monkeypatch.setenv("PLEXRL_REGISTRY", str(directory))
    return directory


def run(*arguments):
    return CliRunner().invoke(app, ["trace", *map(str, arguments)])


def test_export_to_a_file_and_to_standard_output(registry, scene, tmp_path):
    done = run("export", "--pool", "lab", "--out", tmp_path / "t.jsonl")
    assert done.exit_code == 0, done.output
    assert "4 calls of 2 jobs" in done.stdout
    found = t.read(tmp_path / "t.jsonl")
    assert found.calls == export(scene.records).calls
    assert found.header.policy["placement"] == "isolated"
    assert found.header.policy["quantum_us"] == 5_000_000
    assert (found.header.gpu_bytes, found.header.host_bytes) == (1 << 30, 2 << 30)
    piped = run("export", "--pool", "lab")
    assert piped.stdout_bytes == (tmp_path / "t.jsonl").read_bytes()


def test_what_the_pool_has_learned_of_its_links_goes_along(registry, tmp_path):
    kept = {"groups": [], "links": {"n1": {"gbps_in": 8.5, "gbps_out": 4.0, "overhead_us": 900, "moves": 7}}}
    (tmp_path / "state" / "profiles.json").write_text(json.dumps(kept))
    found = t.parse(run("export", "--pool", "lab").stdout_bytes.splitlines(), "out")
    assert found.links == [t.Link(node="n1", gbps_in=8.5, gbps_out=4.0, overhead_us=900)]


def test_a_pool_that_outlived_its_configuration(registry, tmp_path):
    (tmp_path / "plexrl.yaml").unlink()
    done = run("export", "--pool", "lab")
    assert t.parse(done.stdout_bytes.splitlines(), "out").header.policy == {}


def test_a_configuration_that_went_bad(registry, tmp_path):
    (tmp_path / "plexrl.yaml").write_text("scheduler: {placement: heap}\n")
    error = run("export", "--pool", "lab").exception
    assert isinstance(error, BadInput)
    assert "plexrl config check" in str(error)


def test_only_root_and_the_pools_account_may(registry, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 4_000_000)
    error = run("export", "--pool", "lab").exception
    assert isinstance(error, PlexrlError)
    assert error.exit_code == 4
    assert "not for uid 4000000" in str(error)


def test_a_pool_that_never_ran(registry, tmp_path):
    for file in (tmp_path / "state" / "ledger").iterdir():
        file.unlink()
    (tmp_path / "state" / "ledger").rmdir()
    assert "no ledger" in str(run("export", "--pool", "lab").exception)


def test_the_error_of_a_calibration_is_printed():
    done = run("calibrate", DEMO)
    assert done.exit_code == 0, done.output
    for word in ("predicted", "busy", "5.0", "6.0", "mean error", "GB/s"):
        assert word in done.stdout
    assert "\u2026" not in done.stdout  # nothing is cut off at 80 columns
    found = json.loads(run("calibrate", DEMO, "--json").stdout)
    assert [row["job"] for row in found["rows"]] == ["5.0", "6.0"]
    assert found["error"] < 0.15


def test_what_is_no_trace(tmp_path):
    (tmp_path / "x").write_text("{}\n")
    assert "x:1: " in str(run("calibrate", tmp_path / "x").exception)
