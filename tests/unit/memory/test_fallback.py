"""Other people's mechanisms behind the verbs of a resident state; their programs are stood in for by scripts."""

import os
import sys

import pytest

from bench import asleep
from plexrl.memory import fallback
from plexrl.memory.fallback import Fallback
from plexrl.memory.resident import IllegalTransition
from plexrl.types import PlexrlError, Residency, Unavailable


def test_the_verbs_are_those_of_a_resident_state():
    done = []
    state = Fallback(100, lambda: done.append("sleep"), lambda: done.append("wake"))
    left = state.offload()
    assert (left.bytes_out, left.bytes_in, state.residency) == (100, 0, Residency.HOST) and left.seconds > 0
    with pytest.raises(IllegalTransition):
        state.offload()
    came = state.load()
    assert (came.bytes_out, came.bytes_in, state.residency) == (0, 100, Residency.DEVICE)
    assert done == ["sleep", "wake"]


def test_what_fails_in_the_middle_is_lost():
    def broken():
        raise ValueError("out of pinned memory")

    state = Fallback(100, broken, broken)
    with pytest.raises(ValueError, match="pinned"):
        state.offload()
    assert state.residency is Residency.LOST
    with pytest.raises(IllegalTransition):
        state.load()


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Puts a cuda-checkpoint on the path that notes its arguments and ends with a status."""

    def make(status: int):
        script = tmp_path / "cuda-checkpoint"
        script.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/said\necho no such process >&2\nexit {status}\n')
        script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        return tmp_path / "said"

    return make


def test_a_checkpoint_locks_first_and_unlocks_last(program):
    said = program(0)
    state = fallback.cuda_checkpoint(77, 5)
    state.offload()
    state.load()
    actions = [line.split() for line in said.read_text().splitlines()]
    assert [action[1] for action in actions] == ["lock", "checkpoint", "restore", "unlock"]
    assert all(action[2:4] == ["--pid", "77"] for action in actions) and "--timeout" in actions[0]


def test_a_checkpoint_that_fails_says_what_the_program_said(program):
    program(3)
    state = fallback.cuda_checkpoint(77, 5)
    with pytest.raises(PlexrlError, match="--action lock of process 77 ended with 3: no such process"):
        state.offload()
    assert state.residency is Residency.LOST


def test_what_is_not_installed_is_said_so(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(Unavailable, match="cuda-checkpoint is not installed"):
        fallback.cuda_checkpoint(77, 5).offload()
    monkeypatch.setitem(sys.modules, "torch_memory_saver", None)
    with pytest.raises(Unavailable, match="torch_memory_saver is not installed"):
        fallback.torch_memory_saver(5)


def test_the_bench_finds_other_bytes_than_had_gone(monkeypatch, capsys):
    state = Fallback(10**9, lambda: None, lambda: None)
    figures = asleep.timed(state, lambda: 5)
    assert figures["bytes"] == 10**9 and figures["sleep_gbs"] > 0 and figures["wake_gbs"] > 0
    changing = iter(range(10))
    with pytest.raises(PlexrlError, match="other bytes"):
        asleep.timed(state, lambda: next(changing))
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    monkeypatch.setitem(sys.modules, "vllm", None)
    for name in ("deepspeed", "vllm"):
        assert asleep.main([name, "1000"]) == Unavailable.exit_code
        assert "not installed" in capsys.readouterr().err
