"""`plexrl config`: check, show, diff."""

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from plexrl.cli.config import app
from plexrl.config import load
from plexrl.types import BadInput


def test_good(tmp_path):
    (tmp_path / "plexrl.yaml").write_text(
        f"state_dir: {tmp_path}/state\nmodels:\n  none: {{path: {tmp_path}, engine: noop, accounts: [ml]}}\n"
    )
    shown = CliRunner().invoke(app, ["check", str(tmp_path / "plexrl.yaml")])
    assert shown.exit_code == 0
    assert "none" in shown.output and "ml" in shown.output and "good" in shown.output


def test_bad(tmp_path):
    (tmp_path / "plexrl.yaml").write_text("state_dir: here\n")
    assert isinstance(CliRunner().invoke(app, ["check", str(tmp_path / "plexrl.yaml")]).exception, BadInput)


@pytest.fixture
def rich_file(tmp_path: Path) -> Path:
    """A file that gives something of everything."""
    data = {
        "state_dir": f"{tmp_path}/state",
        "models": {
            "org/none-1.5": {"path": str(tmp_path), "engine": "noop", "accounts": "*", "sample": {"replicas": 2}}
        },
        "device": {"kind": "cpu", "bytes": "1.5GiB", "cores": {"n1": [0, 1]}},
        "scheduler": {"quantum": "1500ms", "anticipation": "20us", "starvation": "90m"},
        "limits": {"session_timeout": 7, "body_bytes": 1000},
        "shares": {"ml": {"shares": 2, "users": {"alice": 1}}},
        "tenants": {"ml": {"class": "interactive", "deadline": "30s"}},
    }
    path = tmp_path / "plexrl.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


def test_what_is_shown_is_the_same_configuration(rich_file: Path, tmp_path: Path):
    shown = CliRunner().invoke(app, ["show", str(rich_file)])
    assert shown.exit_code == 0, shown.exception
    again = tmp_path / "again.yaml"
    again.write_text(shown.output)
    assert load(again) == load(rich_file)
    assert "quantum: 1500ms" in shown.output and "bytes: 1536MiB" in shown.output
    assert CliRunner().invoke(app, ["show", str(again)]).output == shown.output


def test_as_json(rich_file: Path):
    shown = json.loads(CliRunner().invoke(app, ["show", "--json", str(rich_file)]).output)
    assert shown["limits"]["session_timeout"] == "7s" and shown["tenants"]["ml"]["class"] == "interactive"


def test_a_difference_is_one_of_meaning(rich_file: Path, tmp_path: Path):
    other = tmp_path / "other.yaml"
    other.write_text(rich_file.read_text().replace("1.5GiB", "1536MiB"))
    same = CliRunner().invoke(app, ["diff", str(rich_file), str(other)])
    assert (same.exit_code, same.output) == (0, "they mean the same\n")
    other.write_text(rich_file.read_text().replace("1500ms", "2s").replace("alice: 1", "bob: 3"))
    found = CliRunner().invoke(app, ["diff", "--json", str(rich_file), str(other)])
    assert found.exit_code == 1
    assert json.loads(found.output) == [
        {"key": "scheduler.quantum", "old": "1500ms", "new": "2s", "by": "reload"},
        {"key": "shares.ml.users.alice", "old": "1.0", "new": "-", "by": "reload"},
        {"key": "shares.ml.users.bob", "old": "-", "new": "3.0", "by": "reload"},
    ]
    other.write_text(rich_file.read_text().replace("1.5GiB", "2GiB"))
    (found,) = json.loads(CliRunner().invoke(app, ["diff", "--json", str(rich_file), str(other)]).output)
    assert (found["key"], found["by"]) == ("device.bytes", "a new start")
    assert "device.bytes" in CliRunner().invoke(app, ["diff", str(rich_file), str(other)]).output
