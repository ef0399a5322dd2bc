"""bench.call: what it refuses, and that its figures are there. No timing is asserted."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench import call

ROOT = Path(__file__).parents[3]


def _bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench.call", "--json", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)


def test_memory_is_no_disk(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    monkeypatch.setattr(call, "filesystem", lambda folder: "tmpfs")
    monkeypatch.setattr(sys, "argv", ["bench.call", "--dir", str(tmp_path)])
    monkeypatch.setattr(call, "end_in_order", lambda: None)
    assert call.main() == 2
    said = capsys.readouterr().err
    assert "on tmpfs" in said and "Give --dir DIR on a real disk" in said


def test_figures(tmp_path: Path):
    if call.filesystem(tmp_path) in call.MEMORY:
        tmp_path = ROOT
    done = _bench(
        *("--dir", str(tmp_path), "--rounds", "1", "--calls", "20", "--flood", "200", "--sdk-calls", "20"),
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    figures = {"p50_ms", "p99_ms", "sdk_p50_ms", "sdk_own_ms", "calls_per_s", "head_cpu_ms_per_call", "fsyncs"}
    assert figures | {"reference_p50_ms", "journal_fs"} <= found.keys()
    # Every call is durable twice, when it is accepted and when it has ended; batches are shared, but never left out.
    assert found["fsyncs"] >= 2
    assert not list(tmp_path.glob("plexrl-bench-*"))
