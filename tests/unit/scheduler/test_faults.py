"""Losses, and answers that come late or twice."""

import pytest

from plexrl.scheduler import Build, Dropped, Policy, Run, Scheduler, Switch
from plexrl.types import BadInput, CallKind, Residency, Role
from tests.unit.scheduler.executor import MS, Executor, S
from tests.unit.scheduler.test_turns import FB, SAMPLE, pool, serve, two_trainers


class Always:
    """A random source with a fixed mind."""

    def __init__(self, value: float) -> None:
        self.random = lambda: value


def test_a_lost_gang_drops_its_calls_and_is_built_again_on_request():
    ex = two_trainers()
    ex.submit("a", "a", FB, 1)
    ex.submit("a", "a", FB, 2)
    serve(ex)
    ex.submit("b", "b", FB, 1)
    ex.lose(ex.engines["a/0"], Always(1))
    assert ex.ended == {"a:1": "dropped", "a:2": "dropped"}
    assert ex.last(Switch) == Switch("b/0")
    ex.submit("a", "a", FB, 1)
    assert "not built again" in ex.scheduler.explain("a:1")
    serve(ex)
    ex.finish("b:1")
    ex.do(ex.scheduler.rebuild(ex.now, "a/0"))
    ex.wait(2 * S)
    assert ex.last(Build) == Build("a/0", ("b/0",))
    serve(ex)
    assert ex.last(Run) == Run("a/0", ("a:1",))


@pytest.mark.parametrize("came_far", [0.0, 1.0])
def test_a_victim_of_a_broken_switch_is_neither_used_nor_overwritten(came_far):
    ex = two_trainers()
    ex.place("c", Role.TRAIN, "c", 1024)
    ex.trace.clear()
    ex.submit("a", "a", FB, 1)  # c is resident, and goes
    ex.lose(ex.engines["a/0"], Always(came_far))
    assert ex.scheduler.gangs["c/0"].residency is Residency.OFFLOADING
    ex.submit("c", "c", FB, 1)
    assert ex.last(Switch) == Switch("c/0")  # not run without being told to come in
    ex.lose(ex.engines["c/0"], Always(came_far))
    ex.do(ex.scheduler.rebuild(ex.now, "a/0"))
    serve(ex)
    ex.submit("b", "b", FB, 1)
    ex.lose(ex.engines["b/0"], Always(came_far))
    ex.do(ex.scheduler.rebuild(ex.now, "c/0"))
    assert ex.last(Build) == Build("c/0", ("a/0",))  # and its bytes are not taken for free


def test_a_failed_switch_fails_that_gang_only():
    ex = two_trainers()
    ex.submit("a", "a", FB, 1)
    ex.submit("b", "b", FB, 1)
    ex.answer(ex.engines["a/0"], ok=False)
    assert ex.last(Dropped) == Dropped(("a:1",))
    assert ex.scheduler.gangs["a/0"].residency is Residency.LOST
    assert ex.last(Switch) == Switch("b/0")
    serve(ex)
    ex.finish("b:1")


def test_a_failed_build_drops_the_calls_that_waited_for_it():
    ex = pool()
    ex.place("a", Role.TRAIN, "a", 512, build=False)
    ex.submit("a", "a", FB, 1)
    ex.answer(ex.engines["a/0"], ok=False)
    assert ex.ended == {"a:1": "dropped"}
    ex.do(ex.scheduler.rebuild(ex.now, "a/0"))
    assert ex.last(Build) == Build("a/0")


def test_late_and_repeated_answers_change_nothing():
    ex = two_trainers()
    ex.submit("a", "a", FB, 1)
    serve(ex)
    ex.finish("a:1")
    ex.wait(S)
    before = {name: state.residency for name, state in ex.scheduler.gangs.items()}
    scheduler, now = ex.scheduler, ex.now
    for actions in [
        scheduler.finished(now, "a:1", 3),
        scheduler.finished(now, "never:1", 3),
        scheduler.paused(now, "a/0", ("a:1",)),
        scheduler.paused(now, "nobody/0", ()),
        scheduler.switched(now, "a/0", True, {}, ("b/0",)),
        scheduler.switched(now, "b/0", False, {}, ()),
        scheduler.switched(now, "nobody/0", True, {}, ("a/0", "x/0")),
        scheduler.built(now, "a/0"),
        scheduler.build_failed(now, "a/0"),
        scheduler.lost(now, "nobody/0"),
        scheduler.rebuild(now, "a/0"),
        scheduler.rebuild(now, "nobody/0"),
        scheduler.cancel(now, "a:1"),
        scheduler.remove(now, "nobody"),
    ]:
        assert actions == []
    assert before == {name: state.residency for name, state in scheduler.gangs.items()}


def test_a_call_that_ends_although_it_was_put_back_ends_once():
    ex = two_trainers()
    ex.submit("a", "a", FB, 1)
    serve(ex)
    ex.submit("b", "b", FB, 1)
    ex.wait(60 * S)
    ex.pause(ex.engines["a/0"])
    ex.do(ex.scheduler.finished(ex.now, "a:1", 1))
    assert set(ex.scheduler.calls) == {"b:1"}


def test_a_call_not_named_by_paused_is_waited_for_before_the_next_one():
    ex = two_trainers()
    ex.submit("a", "a", FB, 1)
    ex.submit("a", "a", FB, 2)
    serve(ex)
    ex.submit("b", "b", FB, 1)
    ex.wait(60 * S)
    ex.pause(ex.engines["a/0"], [])
    serve(ex)
    ex.finish("b:1")
    ex.wait(60 * S)
    assert "a:2" not in ex.started and "a/0" not in ex.turns.values()
    ex.finish("a:1")
    serve(ex)
    assert ex.started[-1] == "a:2"


def test_a_pause_that_nobody_asked_for_runs_the_calls_again():
    ex = pool()
    ex.place("s", Role.SAMPLE, "j", 512)
    ex.submit("s", "s", SAMPLE, 1)
    ex.submit("s", "s", SAMPLE, 2)
    ex.pause(ex.engines["s/0"])
    assert ex.last(Run) == Run("s/0", ("s:1", "s:2"))


def test_one_lost_replica_leaves_the_other_its_work():
    ex = pool(2)
    ex.place("s", Role.SAMPLE, "j", 512, replicas=2)
    for seq in range(1, 5):
        ex.submit("s", "s", SAMPLE, seq)
    ex.lose(ex.engines["s/0"], Always(1))
    assert set(ex.scheduler.calls) == {"s:2", "s:4"}
    ex.submit("s", "s", SAMPLE, 9)
    assert ex.engines["s/1"].running == ["s:2", "s:4", "s:9"]


def test_removing_a_group_frees_its_place_and_ends_its_calls():
    ex = two_trainers()
    ex.submit("a", "a", FB, 1)
    ex.submit("b", "b", FB, 1)
    ex.remove("a")
    assert ex.ended == {"a:1": "dropped"}
    serve(ex)
    ex.finish("b:1")
    ex.place("a", Role.TRAIN, "a", 1024)
    with pytest.raises(BadInput, match="placed already"):
        ex.place("a", Role.TRAIN, "a", 1024)


def test_a_new_head_takes_groups_up_where_they_are():
    old = two_trainers()
    old.place("s", Role.SAMPLE, "a", 512)
    new = Executor({"n1:0": 1024}, Policy(paranoid=True))
    new.engines = old.engines
    for engine in old.engines.values():
        state = old.scheduler.gangs[engine.gang.id]
        placement = type("P", (), {"group": state.gang.group, "gangs": (state.gang,)})
        new.do(new.scheduler.restore(0, placement, state.spec, engine.on_device))
    new.submit("s", "s", SAMPLE, 1)
    assert new.last(Run) == Run("s/0", ("s:1",)) and new.count(Switch) == 0
    new.submit("a", "a", FB, 7)
    new.finish("s:1")
    new.wait(S)
    assert new.last(Switch) == Switch("a/0", ("s/0",))


def test_what_cannot_be_taken_up_is_refused():
    old = two_trainers(2)
    a, b = (old.scheduler.gangs[name] for name in ("a/0", "b/0"))
    placements = [type("P", (), {"group": s.gang.group, "gangs": (s.gang,)}) for s in (a, b)]
    new = Scheduler({"n1:0": 1024, "n1:1": 1024}, Policy())
    new.restore(0, placements[0], a.spec, True)
    with pytest.raises(BadInput, match="cannot both be resident"):
        new.restore(0, placements[1], b.spec, True)
    smaller = Scheduler({"n1:0": 1024, "n1:1": 512}, Policy())
    with pytest.raises(BadInput, match="has 512"):
        smaller.restore(0, placements[0], a.spec, False)
    assert not smaller.groups and not smaller.floor.on("n1:0")


def test_a_clock_that_jumps_back_counts_as_the_latest():
    ex = two_trainers()
    ex.submit("a", "a", FB, 1)
    serve(ex)
    ex.wait(10 * S)
    ex.tick()
    ex.now -= 5 * S
    ex.submit("b", "b", CallKind.OPTIM_STEP, 1)
    ex.tick()
    assert ex.scheduler.now == 10 * S
    ex.now += 5 * S + 50 * MS
    ex.finish("a:1")
    ex.close()
