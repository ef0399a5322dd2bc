"""The next gang comes in beside the turn under way."""

from random import Random

import pytest

from plexrl.scheduler import Build, Pause, Prefetch, Run, Switch, Turn
from plexrl.types import CallKind, Residency, Role, SpanClass
from tests.unit.scheduler.executor import MS, Executor, S
from tests.unit.scheduler.test_residency import virtual

FB, OPTIM = CallKind.FORWARD_BACKWARD, CallKind.OPTIM_STEP


def three(**policy) -> Executor:
    """Three trainers of half a GPU each: `a` runs, `b` is the next, `old` is in its way."""
    ex = virtual(quantum_us=10 * S, anticipation_us=0, gradient_anticipation_us=0, **policy)
    for name, resident in [("a", True), ("old", True), ("b", False)]:
        ex.put(name, Role.TRAIN, name, ["n1:0"], 512, resident=resident)
    ex.submit("a", "a", FB, 1)
    ex.wait(1 * S)
    ex.submit("b", "b", FB, 1)
    return ex


def test_the_next_comes_in_beside_the_turn_and_begins_at_once():
    ex = three()
    assert ex.last(Prefetch) == Prefetch("b/0", ("old/0",))
    ex.wait(2 * S)
    ex.answer(ex.engines["b/0"])
    ex.wait(8 * S)
    ex.pause(ex.engines["a/0"])
    assert ex.last(Run) == Run("b/0", ("b:1",)) and ex.count(Switch) == 0
    ex.close()
    assert {span.kind for span in ex.spans if span.end_us > 1 * S} == {SpanClass.BUSY}  # the copy was hidden


def test_a_turn_that_comes_before_the_copy_waits_for_it_and_is_a_switch_then():
    ex = three()
    ex.wait(10 * S)
    ex.pause(ex.engines["a/0"])
    begun = ex.last(Turn)
    assert (begun.gang, begun.ended, begun.reason) == ("b/0", False, "prefetched")
    assert ex.count(Switch) == 0 and ex.started == ["a:1"]
    since = ex.now
    ex.wait(1 * S)
    ex.answer(ex.engines["b/0"])
    assert ex.last(Run) == Run("b/0", ("b:1",))
    ex.close()
    assert [(s.kind, s.gang) for s in ex.spans if s.start_us == since] == [(SpanClass.SWITCH, "b/0")]


def test_nothing_is_fetched_where_it_would_take_the_place_of_the_one_at_work():
    for size in (512, 1024):
        ex = virtual(quantum_us=10 * S)
        ex.put("a", Role.TRAIN, "a", ["n1:0"], 1024, resident=True)
        ex.put("b", Role.TRAIN, "b", ["n1:0"], size)
        ex.submit("a", "a", FB, 1)
        ex.submit("b", "b", FB, 1)
        ex.wait(5 * S)
        assert ex.count(Prefetch) == 0


def test_a_prefetch_that_fails_loses_that_gang_and_leaves_the_turn_alone():
    ex = three()
    ex.submit("old", "old", FB, 1)
    ex.answer(ex.engines["b/0"], ok=False)
    assert ex.ended == {"b:1": "dropped"} and ex.scheduler.gangs["b/0"].residency is Residency.LOST
    assert ex.engines["a/0"].running == ["a:1"]
    ex.finish("a:1")
    ex.wait(1 * S)
    if ex.engines["old/0"].order:
        ex.answer(ex.engines["old/0"])
    assert ex.last(Run) == Run("old/0", ("old:1",))


def test_a_gang_lost_while_it_comes_in_frees_its_way():
    ex = three()
    ex.lose(ex.engines["b/0"], Random(1))
    assert ex.ended == {"b:1": "dropped"}
    ex.do(ex.scheduler.rebuild(ex.now, "b/0"))
    ex.finish("a:1")
    ex.wait(1 * S)
    assert ex.last(Build).gang == "b/0"
    ex.answer(ex.engines["b/0"])
    ex.submit("b", "b", FB, 1)
    assert ex.last(Run) == Run("b/0", ("b:1",))


def test_a_victim_lost_on_its_way_out_is_not_called_back_by_the_answer():
    ex = three()
    ex.lose(ex.engines["old/0"], Random(1))
    ex.do(ex.scheduler.rebuild(ex.now, "old/0"))
    ex.answer(ex.engines["b/0"])
    assert ex.scheduler.gangs["old/0"].residency is Residency.COLD
    ex.finish("a:1")
    for _ in range(6):
        ex.wait(11 * S)
        for engine in ex.engines.values():
            if engine.pausing:
                ex.pause(engine)
            elif engine.order:
                ex.answer(engine)
    assert ex.engines["old/0"].built


def test_calls_that_were_cancelled_do_not_keep_a_prefetched_gang_waiting():
    ex = three()
    ex.do(ex.scheduler.cancel(ex.now, "b:1"))
    ex.answer(ex.engines["b/0"])
    ex.finish("a:1")
    ex.wait(1 * S)
    assert ex.scheduler.wake_at() is None
    ex.submit("b", "b", FB, 2)
    assert ex.last(Run) == Run("b/0", ("b:2",)) and ex.count(Switch) == 0


@pytest.mark.parametrize("ok", [True, False])
def test_late_answers_change_nothing(ok):
    ex = three()
    ex.answer(ex.engines["b/0"])
    before = {name: state.residency for name, state in ex.scheduler.gangs.items()}
    for gang in ("a/0", "b/0", "old/0", "nobody/0"):
        assert ex.scheduler.prefetched(ex.now, gang, ok, {}, ("a/0", "b/0", "x/0")) == []
    assert before == {name: state.residency for name, state in ex.scheduler.gangs.items()}


def test_a_prefetch_answered_as_a_switch_counts_alike():
    ex = three()
    ex.wait(10 * S)
    ex.pause(ex.engines["a/0"])
    engine = ex.engines["b/0"]
    assert isinstance(engine.order, Prefetch)
    ex.answer(engine)
    ex.wait(50 * MS)
    assert ex.last(Run) == Run("b/0", ("b:1",)) and ex.count(Pause) == 1
