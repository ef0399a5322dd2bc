"""`plexrl doctor`: what it says, and what it ends with."""

import json

import pytest
from typer.testing import CliRunner

from plexrl.cli.doctor import app
from plexrl.engines.parity import Row
from plexrl.types import BadInput


def test_every_engine_is_told_with_its_reason():
    told = CliRunner().invoke(app, ["--json"])
    assert told.exit_code == 0
    found = json.loads(told.output)
    rows = {(row["device"], row["engine"]): row for row in found["engines"]}
    assert set(rows) == {(kind, name) for kind in ("cpu", "cuda") for name in ("torch", "vllm", "deepspeed")}
    assert not rows["cpu", "torch"]["why_not"]
    assert found["versions"]["torch"] and found["slurm"]["slurm"]


def test_site_without_an_operator_is_a_failure(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")  # no Slurm
    told = CliRunner().invoke(app, ["--json", "--site", "plexrl"])
    assert told.exit_code == 1 and not json.loads(told.output)["slurm"]["operator"]


@pytest.mark.parametrize(("engines", "said"), [("tensorflow", "is unknown"), ("torch,vlm", "'vlm' is unknown")])
def test_unknown_engines_are_refused(tiny_model, engines, said):
    refused = CliRunner().invoke(app, ["--model", str(tiny_model), "--engines", engines])
    assert isinstance(refused.exception, BadInput) and said in str(refused.exception)


def test_torch_agrees_with_itself_on_what_it_trained(tiny_model):
    told = CliRunner().invoke(app, ["--json", "--model", str(tiny_model), "--engines", "torch"])
    assert told.exit_code == 0, told.exception
    rows = json.loads(told.stdout)["parity"]
    assert {row["of"] for row in rows} == {"drawn, then forced", "prompt, then forced"}
    assert all(row["holds"] and row["tokens"] > 30 and row["worst"] < row["bound"] for row in rows)


def test_what_is_beyond_the_bound_or_no_number_does_not_hold():
    row = {"of": "drawn", "one": "torch", "other": "vllm", "tokens": 3, "mean": 0.0, "bound": 1e-3}
    assert Row(worst=1e-3, **row).holds
    assert not Row(worst=1.1e-3, **row).holds and not Row(worst=float("nan"), **row).holds
