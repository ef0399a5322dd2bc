"""The same numbers added up another way, as CSV, as a message, and from an exported file."""

import csv
import io
import json
from datetime import datetime

import pytest
from typer.testing import CliRunner

from plexrl.accounting import recorded
from plexrl.accounting.figures import figures
from plexrl.accounting.groups import KEYS, as_csv, parsed, rows
from plexrl.accounting.mail import message
from plexrl.accounting.published import compute, for_reader
from plexrl.accounting.window import ALL, Window, moment, months, window
from plexrl.cli.main import app
from plexrl.types import BadInput, CallKind, Role
from tests.unit.accounting.scene import T0, S, Scene


def of(scene, end=96.0):
    return compute(scene.records, scene.intervals(end), scene.us(end + 4), 1000)


@pytest.mark.parametrize("keys", [(key,) for key in KEYS] + [("account", "month"), ("user", "qos", "model")])
def test_every_way_of_adding_up_gives_the_same_sum(scene, keys):
    published = of(scene)
    found = rows([(published, published.jobs)], ALL, keys)
    whole = figures(published)
    assert sum(row["charged"] for row in found) == pytest.approx(whole["charged_gpu_seconds"])
    assert sum(row["dedicated"] for row in found) == pytest.approx(whole["dedicated_gpu_seconds"])
    for row in found:
        assert row["charged"] == pytest.approx(row["busy"] + row["switch"] + row["kept"])
        assert row["saved"] == pytest.approx(row["dedicated"] - row["charged"])
        assert row["dedicated"] == pytest.approx(row["dedicated_replayed"] + row["dedicated_estimated"])
    if set(keys) <= {"pool", "month"}:
        assert sum(row["pool_saved"] for row in found) == pytest.approx(whole["saved_gpu_seconds"])
    else:
        assert "pool_held" not in found[0]


def test_months_part_a_job_where_they_meet():
    new_year = datetime(2024, 1, 1).timestamp()
    begin = new_year - T0 / S - 100
    scene = Scene(allocated=begin, start=begin + 2)
    scene.attach(begin + 10, "11.0")
    scene.place(begin + 10, "a", Role.TRAIN, gang_size=2)
    scene.call(begin + 10, "11.0", "a:0", "a", CallKind.FORWARD_BACKWARD)
    for gpu in scene.gpus:
        scene.span(gpu, begin + 10, begin + 130, "busy", "a/0", j11_0=1)
    scene.end(begin + 130, "11.0", "a:0", cpu=120, gang="a/0")
    scene.job_ended(begin + 130, "11.0")
    scene.stop(begin + 130)
    published = compute(scene.records, scene.intervals(begin + 130, begin), scene.us(begin + 140))
    old, new = rows([(published, published.jobs)], ALL, ("month",))
    assert (old["month"], new["month"]) == ("2023-12", "2024-01")
    assert (old["busy"], new["busy"]) == (180, 60)
    assert old["pool_held"] + new["pool_held"] == 260
    one = figures(published, window(month="2024-01"))
    assert one["charged_gpu_seconds"] == 60 and one["pool_gpu_seconds"] == 60
    assert [each.name for each in months(published.from_us, published.until_us)] == ["2023-12", "2024-01"]


def test_a_job_of_two_models_counts_under_both_names_together(scene):
    published = of(scene)
    published.jobs[0].models = ("big", "small")
    found = rows([(published, published.jobs)], ALL, ("model",))
    assert [row["model"] for row in found] == ["big+small", "m"]


def test_confidences_are_told_apart(scene):
    scene.attach(20, "13.0", 1003, "cem", "bio", declared_gpus=8)
    scene.place(20, "c", Role.TRAIN, gang_size=2, owner="13.0")
    for number, length in enumerate((1, 9)):  # one token count, two lengths: no model tells both
        scene.call(20, "13.0", f"c:{number}", "c", CallKind.FORWARD_BACKWARD)
        scene.end(70, "13.0", f"c:{number}", cpu=length, gang="c/0")
    scene.records.sort(key=lambda record: record.now_us)
    found = figures(of(scene))
    sure = {job["user"]: job["confidence"] for job in found["jobs"]}
    assert sure == {"ada": "replayed", "bob": "replayed", "cem": "estimated"}
    parts = found["by_confidence"]
    assert found["confidence"] == "estimated"  # a sum is as sure as its least sure part
    assert parts["replayed"]["jobs"] == 2 and parts["estimated"]["jobs"] == 1
    held = [part["dedicated_gpu_seconds"] for name, part in parts.items() if name != "declared"]
    assert sum(held) == pytest.approx(found["dedicated_gpu_seconds"])
    cem = next(job for job in found["jobs"] if job["user"] == "cem")
    assert cem["dedicated_gpus"] == 2  # what it used, whatever was declared
    assert parts["declared"]["beyond_use_gpu_seconds"] == pytest.approx(6 * cem["replayed_seconds"])


def test_csv_is_read_back_by_others(scene):
    published = of(scene)
    text = as_csv(rows([(published, published.jobs)], ALL, ("account",)))
    found = list(csv.DictReader(io.StringIO(text)))
    assert [(row["account"], float(row["charged"])) for row in found] == [("bio", 80), ("ml", 80)]
    assert as_csv([]) == ""


def test_a_message_is_plain_and_says_what_a_pi_asks(scene):
    published = for_reader(of(scene), 1001)
    lines = rows([(published, published.jobs)], ALL, ("account", "user"))
    text = message(figures(published), lines, "2023-11", "Your own jobs; the sums are the whole pool's.")
    assert text.startswith("Subject: Pool lab, 2023-11: 160.0 GPU-s charged\n\n")
    assert text.isascii() and max(map(len, text.splitlines())) <= 80
    for word in ("ada", "saved", "replayed", "overhead", "whole pool's"):
        assert word in text
    assert "bob" not in text


def test_times_and_keys_are_checked():
    assert parsed("Account, month,account") == ("account", "month")
    with pytest.raises(BadInput, match="user, account, qos"):
        parsed("colour")
    with pytest.raises(BadInput, match="no month"):
        window(month="2026-13")
    with pytest.raises(BadInput, match="one or the other"):
        window(since="1d", month="2026-12")
    with pytest.raises(BadInput, match="not after"):
        window(since="2026-12-02", until="2026-12-01")
    december = window(month="2026-12")
    assert december.begin_us == moment("2026-12-01") and december.end_us == moment("2027-01-01")
    assert Window(60 * S, 120 * S).holds(60 * S) and not Window(60 * S, 120 * S).holds(120 * S)


def run(*arguments):
    return CliRunner().invoke(app, list(arguments))


def test_an_exported_ledger_gives_the_same_report_anywhere(registry, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PLEXRL_REGISTRY", str(registry))
    out = tmp_path / "lab.jsonl"
    assert run("ledger", "export", "--out", str(out)).exit_code == 0
    assert b"secret" not in out.read_bytes()
    told = json.loads(run("report", "--json").stdout)
    monkeypatch.delenv("PLEXRL_REGISTRY")
    assert json.loads(run("report", "--from", str(out), "--json").stdout) == told
    kept = recorded.read(out)
    assert kept.rows is None and len(kept.intervals) == 2
    by_account = json.loads(run("report", "--from", str(out), "--group-by", "account", "--json").stdout)
    assert [row["account"] for row in by_account["rows"]] == ["bio", "ml"]
    assert run("report", "--from", str(out), "--csv").stdout.startswith("slurm_id,job,user,account")
    assert run("report", "--from", str(out), "--mail", "--month", "2023-11").stdout.startswith("Subject: ")
    assert "bio" in run("report", "--from", str(out), "--group-by", "account,user").stdout
    torn = tmp_path / "torn.jsonl"
    torn.write_bytes(out.read_bytes()[:-20])
    done = run("report", "--from", str(torn))
    assert "torn.jsonl, line " in str(done.exception)
    torn.write_text("{}\n")
    assert "no export of a ledger" in str(run("report", "--from", str(torn)).exception)


def test_the_arithmetic_of_a_job_adds_up_on_paper(registry, monkeypatch):
    monkeypatch.setenv("PLEXRL_REGISTRY", str(registry))
    done = run("report", "--explain", "11")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    closed = [line.split() for line in lines if line.strip().startswith("2023-")]
    charged = next(line.split() for line in lines if line.strip().startswith("charged"))
    assert sum(float(row[-1]) for row in closed) == float(charged[-1]) == 80
    wall = [float(line.split()[-1]) for line in lines if line.strip().startswith("wall time")]
    start = lines.index(next(line for line in lines if "colocated: the chain" in line))
    parts = []
    for line in lines[start + 1 :]:
        if line.strip().startswith("wall time"):
            break
        parts.append(float(line.split()[-1]))
    assert sum(parts) == pytest.approx(wall[0], abs=0.002)
    chain = lines[lines.index(next(line for line in lines if line.startswith("The chain"))) + 2 :]
    assert float(chain[-1].split()[0]) == pytest.approx(wall[0], abs=0.001)
    assert f"x 2 GPUs (the largest of them) = {2 * wall[0]:.3f} GPU-s" in done.stdout
    assert "no job 99" in str(run("report", "--explain", "99").exception)
    assert json.loads(run("report", "--explain", "11", "--json").stdout)["job"]["slurm_id"] == 11
