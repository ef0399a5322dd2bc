"""The root of the command line: quick, listing every group, one message per error."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from plexrl.cli.main import GROUPS

ROOT = Path(__file__).parents[3]


def plexrl(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "plexrl.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)


def test_help_lists_every_group():
    shown = plexrl("--help")
    assert shown.returncode == 0
    assert [name for name in GROUPS if f" {name} " not in shown.stdout] == []


@pytest.mark.parametrize("group", GROUPS)
def test_every_group_has_help(group):
    shown = plexrl(group, "--help")
    assert shown.returncode == 0, shown.stderr
    assert f"plexrl {group}" in shown.stdout


def test_help_imports_no_room():
    code = (
        "import sys; from plexrl.cli.main import app\n"
        "try: app(['--help'], prog_name='plexrl')\n"
        "except SystemExit: print(*sorted(m for m in sys.modules if m.startswith('plexrl.') or m == 'torch'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT, check=True
    )
    loaded = done.stdout.splitlines()[-1].split()
    assert [name for name in loaded if not name.startswith(("plexrl.types", "plexrl.cli"))] == []
    assert "plexrl.cli.pool" not in loaded


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("plexrl jo", "jobs"),
        ("plexrl checkpoint de", "delete"),
        ("plexrl jobs --js", "--json"),
        ("plexrl config s", "show"),
    ],
)
def test_the_shell_completes_verbs_and_options(typed: str, offered: str):
    words = {"_PLEXRL_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1)}
    command = [sys.executable, "-m", "plexrl.cli.main"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, env={**os.environ, **words})
    assert shown.stdout.split() == [offered]


def test_unknown_group_is_a_usage_error():
    shown = plexrl("pol")
    assert shown.returncode == 2
    assert "pool" in shown.stderr


def test_error_is_one_message_and_its_exit_code(tmp_path):
    shown = plexrl("config", "check", str(tmp_path / "absent.yaml"))
    assert shown.returncode == 2
    assert shown.stdout == ""
    assert shown.stderr.startswith("plexrl: ") and len(shown.stderr.splitlines()) == 1
