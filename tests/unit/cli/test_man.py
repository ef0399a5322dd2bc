"""Manual pages and shell completion are made out of the verbs that there are."""

import os
import shutil
import subprocess
import sys

import pytest

from plexrl.cli.main import GROUPS
from plexrl.cli.man import man, pages


@pytest.fixture(scope="module")
def written() -> dict[str, str]:
    return pages()


def test_every_verb_has_a_page_with_its_options(written):
    assert written.keys() == {"plexrl", *(f"plexrl-{name}" for name in GROUPS)}
    assert all(f"plexrl {name}" in written["plexrl"] for name in GROUPS)
    for name, options in {"top": ["\\-\\-once"], "pool": [".SS reload", "\\-\\-gpus\\-per\\-node", "NAME"]}.items():
        page = written[f"plexrl-{name}"]
        assert all(option in page for option in options), page
    assert "head" not in [line.removeprefix(".SS ") for line in written["plexrl-pool"].splitlines()]  # a hidden one


@pytest.mark.skipif(shutil.which("man") is None, reason="no man on this machine")
def test_man_takes_them(written, tmp_path):
    for name in ("plexrl", "plexrl-pool"):
        page = tmp_path / f"{name}.1"
        page.write_text(written[name])
        env = os.environ | {"MANWIDTH": "100", "MAN_KEEP_FORMATTING": "", "LC_ALL": "C.UTF-8"}
        done = subprocess.run(["man", "--warnings", "-l", str(page)], capture_output=True, text=True, env=env)
        assert done.returncode == 0 and not done.stderr, done.stderr
        assert f"{name} - " in done.stdout.replace("\b", "") and "EXIT STATUS" in done.stdout


def test_they_are_written(tmp_path, capsys):
    man(tmp_path / "man1")
    told = capsys.readouterr().out.split()
    assert len(told) == len(GROUPS) + 1 and all((tmp_path / "man1" / path).is_file() for path in told)


@pytest.mark.parametrize(("typed", "offered"), [("plexrl sha", "shares"), ("plexrl pool rel", "reload")])
def test_the_shell_completes_verbs(typed, offered):
    words = typed.split()
    env = os.environ | {"_PLEXRL_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(len(words) - 1)}
    command = [sys.executable, "-c", "from plexrl.cli.main import main; main()"]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.stdout.split() == [offered], done.stderr
