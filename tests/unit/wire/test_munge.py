"""MUNGE without MUNGE: what is said when it is not there. With a real munged: tests/slurm/test_munge.py."""

import pytest

from plexrl.types import BadInput, Unavailable
from plexrl.wire import munge


def test_without_the_commands_the_package_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unavailable, match="apt-get install munge"):
        munge.encode(b"x", 0)
    with pytest.raises(Unavailable, match="apt-get install munge"):
        munge.decode("MUNGE:x:")


def test_what_is_not_even_text_is_refused_without_asking():
    with pytest.raises(BadInput, match="no MUNGE credential"):
        munge.decode("é")
