"""What the pyslurm backend says of a pyslurm that cannot be used; a usable one is tried in tests/slurm (slurm2511)."""

import sys
from pathlib import Path

import pytest

from plexrl.slurm.pyslurm_backend import SlurmPy
from plexrl.types import BadInput, Unavailable


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def backend(tmp_path: Path, python: str | Path, version: str = "25.11.7", **options: float) -> SlurmPy:
    """A backend whose site's scontrol says this version."""
    script(tmp_path / "scontrol", f"echo slurm {version}")
    return SlurmPy({"PATH": f"{tmp_path}:/usr/bin:/bin"}, python=str(python), **options)


def test_a_pyslurm_that_is_not_there_is_named(tmp_path):
    with pytest.raises(BadInput, match=r"cannot be imported: No module named 'pyslurm'.*slurm_backend: commands"):
        backend(tmp_path, sys.executable).jobs([1])


def test_libslurm_that_ends_its_process_ends_nobody_elses(tmp_path):
    died = script(tmp_path / "python", "echo 'fatal: Could not establish a configuration source' >&2; exit 1")
    with pytest.raises(BadInput, match="ended with 1: fatal: Could not establish a configuration source"):
        backend(tmp_path, died).active()


def test_another_release_is_named(tmp_path):
    other = script(tmp_path / "python", """echo '{"ok": "25.11.2"}'; exec cat >/dev/null""")
    slurm = backend(tmp_path, other, "22.05.8")
    with pytest.raises(BadInput, match=r"pyslurm 25.11.2 is for Slurm 25.11, and this site has slurm 22.05.8"):
        slurm.check()
    assert slurm._child is None
    slurm = backend(tmp_path, other, "25.11.5")
    assert slurm.check() == "25.11.2"  # micro releases agree
    slurm.close()


def test_silence_and_refusals_are_told_apart(tmp_path):
    silent = script(tmp_path / "python", """echo '{"ok": "25.11.2"}'; exec sleep 60""")
    with pytest.raises(Unavailable, match="no answer in 0 s"):
        backend(tmp_path, silent, timeout=0.2).active()
    says = """echo '{"ok": "25.11.2"}'; read line; echo '{"refused": "%s", "errno": 0}'; exec cat >/dev/null"""
    for words, error in (("Unable to contact slurm controller", Unavailable), ("Access denied", BadInput)):
        slurm = backend(tmp_path, script(tmp_path / "python", says % words))
        with pytest.raises(error, match=words):
            slurm.cancel(7)
        slurm.close()


def test_a_child_that_died_is_started_again(tmp_path):
    once = script(
        tmp_path / "python", """echo '{"ok": "25.11.2"}'; read line; echo '{"ok": [1, 2]}'; read line; exit 3"""
    )
    slurm = backend(tmp_path, once)
    assert slurm.active() == [1, 2]
    with pytest.raises(Unavailable, match="its process ended with 3"):
        slurm.active()
    assert slurm.active() == [1, 2]
    slurm.close()
