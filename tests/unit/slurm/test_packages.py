"""What is said and done where Slurm's packages are missing. apt-get is a stand-in here."""

import subprocess
from pathlib import Path

import pytest

from plexrl.slurm.devcluster import packages
from plexrl.types import BadInput, Unavailable


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that lacks slurmd and slurmdbd."""
    have = packages.program
    monkeypatch.setattr(packages, "program", lambda name: None if name in ("slurmd", "slurmdbd") else have(name))
    monkeypatch.setattr(packages, "missing", lambda: ["slurmd", "slurmdbd"])


def test_without_root_it_says_exactly_what_to_install(bare: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(packages.os, "geteuid", lambda: 1000)
    words = "needs slurmd, slurmdbd.*apt-get install -y --no-install-recommends slurmd slurmdbd"
    with pytest.raises(BadInput, match=words):
        packages.ensure()


def test_no_service_is_started_and_a_failure_is_told(bare: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    policy = tmp_path / "policy-rc.d"
    monkeypatch.setattr(packages, "_POLICY", policy)
    monkeypatch.setattr(packages.os, "geteuid", lambda: 0)
    monkeypatch.setattr(packages, "program", lambda name: f"/usr/bin/{name}")
    calls, really = [], subprocess.run

    def apt(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        calls.append(command[1])
        assert really([policy]).returncode == 101
        return subprocess.CompletedProcess(command, 100, "", "E: Unable to locate package slurmd")

    monkeypatch.setattr(packages.subprocess, "run", apt)
    with pytest.raises(Unavailable, match="(?s)Unable to locate package slurmd.*by hand"):
        packages.ensure()
    assert calls == ["install", "update", "install"] and not policy.exists()


def test_nothing_is_done_where_nothing_is_missing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(packages, "missing", list)
    monkeypatch.setattr(packages.subprocess, "run", None)
    packages.ensure()
