"""`plexrl pool` without a pool that runs: what it prints, and what `reload` refuses before it asks anybody."""

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from plexrl.cli.pool import app
from plexrl.types import BadInput


@pytest.fixture
def lab(tmp_path: Path) -> tuple[Path, list[str]]:
    """A declared private pool: its file, and the options that name its registry."""
    registry, file = tmp_path / "pools", tmp_path / "lab.yaml"
    registry.mkdir(mode=0o755)
    file.write_text(f"state_dir: {tmp_path}/state\nmodels: {{m: {{path: {tmp_path}, engine: noop}}}}\n")
    options = ["--registry", str(registry)]
    done = CliRunner().invoke(app, ["declare", "lab", "--private", "--config", str(file), "--json", *options])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert (told["name"], told["kind"], told["owner_uid"]) == ("lab", "private", os.getuid())
    return file, options


def test_a_reload_reads_the_file_before_it_tells_the_head(lab):
    file, options = lab
    done = CliRunner().invoke(app, ["reload", "lab", *options])
    assert isinstance(done.exception, BadInput) and "is down" in str(done.exception)
    file.write_text(file.read_text() + "policies: {users: {ann: {jobs: none}}}\n")
    done = CliRunner().invoke(app, ["reload", "lab", *options])
    assert "lab.yaml:3: policies.users.ann.jobs: not a whole number" in str(done.exception)


def test_status_of_a_pool_that_is_down(lab):
    done = CliRunner().invoke(app, ["status", "lab", "--json", *lab[1]])
    assert done.exit_code == 1 and json.loads(done.stdout) == {"pool": "lab", "state": "down"}
