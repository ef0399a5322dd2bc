"""Long tails: the rest of a rollout moves to fewer replicas when others wait for the GPUs."""

from random import Random

from plexrl.scheduler import Gather, Pause, Run, Turn
from plexrl.types import CallKind, Role
from tests.unit.scheduler.executor import MS, Executor, S
from tests.unit.scheduler.test_adversarial import pool

FB, SAMPLE = CallKind.FORWARD_BACKWARD, CallKind.SAMPLE


def rollout(calls: int = 20, **policy) -> Executor:
    """Two replicas at work on GPUs 0 and 1, and a trainer on GPU 0 that has something to do."""
    ex = pool(2, order="fifo", quantum_us=1000 * S, **policy)
    ex.put("s", Role.SAMPLE, "s", [["n1:0"], ["n1:1"]], 512, 0, resident=True)
    ex.put("t", Role.TRAIN, "t", ["n1:0"], 512, 512, resident=True)
    for seq in range(1, calls + 1):
        ex.submit("s", "s", SAMPLE, seq, units=10)
    ex.wait(1 * S)
    ex.submit("t", "t", FB, 1)
    return ex


def finish(ex: Executor, gang: str, leave: int) -> None:
    """End calls of a replica until so many are left."""
    running = ex.engines[gang].running
    while len(running) > leave:
        ex.finish(running[0])


def test_the_tail_moves_when_80_percent_are_done_and_every_call_ends_once():
    ex = rollout()
    finish(ex, "s/0", 2)
    finish(ex, "s/1", 3)
    assert ex.count(Pause) == 0  # 15 of 20
    finish(ex, "s/1", 2)
    assert ex.last(Pause) == Pause("s/0")
    tail = tuple(ex.engines["s/0"].running)
    ex.pause(ex.engines["s/0"])
    assert ex.last(Gather) == Gather("s/0", "s/1", tail)
    assert set(ex.engines["s/1"].running) >= set(tail) and len(ex.engines["s/1"].running) == 4
    assert [t.reason for _, t in ex.all(Turn) if t.gang == "s/0" and t.ended] == ["gathered"]
    assert ex.engines["t/0"].running == ["t:1"]
    finish(ex, "s/1", 0)
    ex.finish("t:1")
    assert set(ex.ended.values()) == {"done"} and len(ex.ended) == 21


def test_nothing_moves_when_nobody_waits():
    ex = pool(2, order="fifo")
    ex.put("s", Role.SAMPLE, "s", [["n1:0"], ["n1:1"]], 512, 0, resident=True)
    for seq in range(1, 21):
        ex.submit("s", "s", SAMPLE, seq, units=10)
    for gang in ("s/0", "s/1"):
        finish(ex, gang, 1)
    ex.wait(100 * S)
    assert ex.count(Pause) == ex.count(Gather) == 0


def test_a_share_of_one_never_gathers():
    ex = rollout(gather_share=1)
    finish(ex, "s/0", 1)
    finish(ex, "s/1", 1)
    ex.wait(100 * S)
    assert ex.count(Pause) == ex.count(Gather) == 0


def test_somebody_who_comes_during_the_tail_is_let_in():
    ex = pool(2, order="fifo", quantum_us=1000 * S)
    ex.put("s", Role.SAMPLE, "s", [["n1:0"], ["n1:1"]], 512, 0, resident=True)
    ex.put("t", Role.TRAIN, "t", ["n1:0"], 512, 512, resident=True)
    for seq in range(1, 21):
        ex.submit("s", "s", SAMPLE, seq, units=10)
    for gang in ("s/0", "s/1"):
        finish(ex, gang, 1)
    ex.submit("t", "t", FB, 1)
    assert ex.last(Pause) == Pause("s/0")


def test_what_ended_before_the_pause_is_not_moved():
    ex = rollout()
    finish(ex, "s/1", 1)
    finish(ex, "s/0", 3)
    first, second, third = ex.engines["s/0"].running
    ex.do(ex.scheduler.cancel(ex.now, third))
    ex.finish(first)
    ex.pause(ex.engines["s/0"])
    assert ex.last(Gather) == Gather("s/0", "s/1", (second,))
    assert ex.ended[third] == "dropped"


def test_all_ended_before_the_pause_is_answered():
    ex = rollout()
    finish(ex, "s/1", 1)
    finish(ex, "s/0", 0)
    for engine in ex.engines.values():
        if engine.pausing:
            ex.pause(engine)
    ex.wait(1 * S)
    assert ex.count(Gather) == 0 and ex.engines["t/0"].running == ["t:1"]


def test_the_target_dies_before_the_pause_is_answered():
    """What was drawn stays where it is, and goes on there later."""
    ex = rollout()
    finish(ex, "s/0", 2)
    finish(ex, "s/1", 2)
    left = list(ex.engines["s/0"].running)
    ex.lose(ex.engines["s/1"], Random(1))
    ex.pause(ex.engines["s/0"])
    assert ex.count(Gather) == 0
    ex.finish("t:1")
    ex.wait(10 * S)
    assert ex.engines["s/0"].running == left


def test_the_source_dies_before_it_has_paused():
    ex = rollout()
    finish(ex, "s/0", 2)
    finish(ex, "s/1", 2)
    left = list(ex.engines["s/0"].running)
    ex.lose(ex.engines["s/0"], Random(1))
    assert all(ex.ended[call] == "dropped" for call in left)
    assert ex.engines["t/0"].running == ["t:1"] and len(ex.engines["s/1"].running) == 2


def test_newcomers_after_the_pause_have_nothing_to_be_gathered():
    """A sample that never ran has no partial work: a Gather does not name it, wherever it runs then."""
    ex = rollout()
    finish(ex, "s/0", 1)
    finish(ex, "s/1", 3)
    (drawn,) = ex.engines["s/0"].running
    ex.submit("s", "s", SAMPLE, 100, units=1)
    ex.submit("s", "s", SAMPLE, 101, units=1)
    ex.pause(ex.engines["s/0"])
    assert ex.last(Gather) == Gather("s/0", "s/1", (drawn,))
    ex.finish("t:1")
    ex.wait(5 * S)
    assert {"s:100", "s:101"} <= {call for engine in ex.engines.values() for call in engine.running}


def test_what_waits_at_a_replica_without_a_turn_goes_to_one_that_has_nothing_left():
    ex = pool(2, order="fifo", quantum_us=1000 * S)
    ex.put("s", Role.SAMPLE, "s", [["n1:0"], ["n1:1"]], 512, 0, resident=True)
    ex.put("t", Role.TRAIN, "t", ["n1:0"], 512, 512, resident=True)
    ex.submit("t", "t", FB, 1)
    for seq in range(1, 9):
        ex.submit("s", "s", SAMPLE, seq, units=10)
    ex.wait(10 * MS)
    for _ in range(8):
        finish(ex, "s/1", 0)
    assert len(ex.ended) == 8 and ex.count(Gather) == 0
    assert {run.gang for _, run in ex.all(Run)} == {"t/0", "s/1"}


def test_a_paused_sample_does_not_go_elsewhere_without_being_gathered():
    """Its drawn tokens are in the engine of its replica, which lost its turn to a quantum."""
    ex = pool(2, order="fifo", sample_quantum_us=10 * S, gather_share=1)
    ex.put("s", Role.SAMPLE, "s", [["n1:0"], ["n1:1"]], 512, 0, resident=True)
    ex.put("t", Role.TRAIN, "t", ["n1:0"], 512, 512, resident=True)
    for seq in range(1, 5):
        ex.submit("s", "s", SAMPLE, seq, units=10)
    ex.submit("t", "t", FB, 1)
    ex.wait(10 * S)
    left = list(ex.engines["s/0"].running)
    ex.pause(ex.engines["s/0"])
    finish(ex, "s/1", 0)
    ex.wait(1 * S)
    assert not ex.engines["s/1"].running
    ex.finish("t:1")
    ex.wait(5 * S)
    assert ex.engines["s/0"].running == left
