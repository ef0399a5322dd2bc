"""Engines that sleep are ended where the GPUs have no room for what they keep, and built again when they are wanted."""

from math import inf
from random import Random

import pytest

from plexrl.scheduler import Build, Policy, Switch, Turn
from plexrl.types import CallKind, DoesNotFit, JobClass, Residency, Role, SpanClass
from tests.unit.scheduler.executor import MS, Executor, S

UNBOUNDED = dict.fromkeys(JobClass, inf)


@pytest.fixture(params=[True, False], ids=["virtual", "fixed"])
def pool(request):
    """One GPU of 1,000 bytes, and any number of gangs that have 500 of it and keep 200."""

    def make(names: str, gpus: int = 1, **policy) -> Executor:
        ex = Executor(
            {f"n:{i}": 1000 for i in range(gpus)},
            Policy(paranoid=True, max_stretch=UNBOUNDED, anticipation_us=0, backfill=False, prefetch=False, **policy),
            virtual=request.param,
        )
        ex.do(ex.scheduler.startup_done(0))
        for name in names:
            ex.place(name, Role.TRAIN, name, 500, residual_bytes=200)
            ex.wait(1 * S)
        return ex

    return make


def at(ex: Executor, name: str) -> Residency:
    return ex.scheduler.gangs[f"{name}/0"].residency


def step(ex: Executor, name: str, seq: int) -> None:
    """One call, from its coming to its end."""
    call = ex.submit(name, name, CallKind.OPTIM_STEP, seq)
    while call not in ex.ended:
        what, engine, which = ex.choices()[0]
        ex.now += 100 * MS
        {"order": ex.answer, "pause": ex.pause}[what](engine) if what != "finish" else ex.finish(which)


def ended(ex: Executor) -> list[tuple[str, tuple[str, ...]]]:
    return [(a.gang, a.end) for _, a in ex.trace if isinstance(a, Build | Switch) and a.end]


def test_the_coldest_is_ended_and_built_again_when_it_is_wanted(pool):
    """Three sleep beside one that is there: 500 and 3 x 200 are too many by one of them."""
    ex = pool("abcd")
    assert ended(ex) == [("d/0", ("a/0",))], "the last one came, and a was unused for the longest time"
    assert ex.scheduler.gangs["a/0"].unbuilt and ex.scheduler.line.get("a/0") is None
    builds = ex.count(Build)
    for seq, name in enumerate("bcdbcd"):
        step(ex, name, seq)
        ex.wait(1 * S)
    assert ex.count(Build) == builds and len(ended(ex)) == 1, "the others go on without it"
    step(ex, "a", 1)
    assert ex.count(Build) == builds + 1
    assert ended(ex)[1:] == [("a/0", ("d/0",))], "d has had its turn just now, and thinks for three seconds as a rule"
    assert [at(ex, name) for name in "bcd"].count(Residency.COLD) == 1
    reasons = [a.reason for _, a in ex.trace if isinstance(a, Turn) and a.gang == "a/0"]
    assert reasons[-2:] == ["built", "build"], "the turn of its second build goes on with the call that wants it"
    ex.close()
    paid = [s for s in ex.spans if s.kind is SpanClass.SWITCH and s.gang == "a/0"]
    assert paid and all(dict(s.shares).keys() == {"a"} for s in paid)


def test_who_has_begun_something_is_not_ended(pool):
    ex = pool("abc", quantum_us=300 * MS, min_turn_factor=0)
    ex.submit("a", "a", CallKind.FORWARD_BACKWARD, 1)
    ex.answer(ex.engines["a/0"])
    ex.submit("b", "b", CallKind.OPTIM_STEP, 1)
    ex.wait(1 * S)
    ex.pause(ex.engines["a/0"])
    ex.answer(ex.engines["b/0"])
    assert ex.scheduler.gangs["a/0"].begun
    ex.place("d", Role.TRAIN, "d", 500, residual_bytes=200, build=False)
    for _ in range(20):
        if not ex.choices():
            ex.wait(1 * S)
            continue
        what, engine, which = ex.choices()[0]
        {"order": ex.answer, "pause": ex.pause}[what](engine) if what != "finish" else ex.finish(which)
        ex.now += 10 * MS
    assert ex.engines["d/0"].built and ex.ended["a:1"] == "done"
    order = [a.gang for _, a in ex.trace if isinstance(a, Turn) and a.reason == "build"]
    assert order[-1] == "d/0" and not any("a/0" in end for _, end in ended(ex)), ended(ex)


def test_a_call_that_comes_while_the_engine_ends_waits_for_the_next_one(pool):
    ex = pool("abc")
    ex.place("d", Role.TRAIN, "d", 500, residual_bytes=200, build=False)
    assert ended(ex) == [("d/0", ("a/0",))]
    call = ex.submit("a", "a", CallKind.OPTIM_STEP, 1)
    assert at(ex, "a") is Residency.HOST, "its engine still ends"
    ex.answer(ex.engines["d/0"])
    assert isinstance(ex.engines["a/0"].order, Build)
    ex.answer(ex.engines["a/0"])
    ex.finish(call)


def test_what_is_broken_off_ends_nobody(pool):
    ex = pool("abc")
    ex.place("d", Role.TRAIN, "d", 500, residual_bytes=200, build=False)
    ex.undo(ex.engines["d/0"], ())
    assert ex.engines["a/0"].built and at(ex, "a") is Residency.HOST
    assert ex.scheduler.gangs["a/0"].ending is not None, "and is tried again"
    ex.answer(ex.engines["d/0"], ok=False)
    assert at(ex, "d") is Residency.LOST and at(ex, "a") is Residency.HOST
    step(ex, "a", 1)


def test_who_was_short_of_host_memory_and_is_lost_sends_nobody_away_when_it_is_built_again(pool):
    ex = pool("a")
    ex.place("d", Role.TRAIN, "d", 300, residual_bytes=0, build=False)
    ex.undo(ex.engines["d/0"], (), crowded=True)
    ex.lose(ex.engines["d/0"], Random(1))
    step(ex, "a", 1)
    ex.do(ex.scheduler.rebuild(ex.now, "d/0"))
    assert isinstance(ex.engines["d/0"].order, Build) and ex.last(Build).evict == ()


def test_what_keeps_more_than_was_promised_is_ended_in_its_leaving(pool):
    """The head says so before it answers the switch: the victim is whole on the host, and has no engine."""
    ex = pool("abc")
    ex.submit("a", "a", CallKind.OPTIM_STEP, 1)
    (victim,) = ex.engines["a/0"].leaving
    ex.engines["a/0"].leaving.remove(victim)
    ex.engines[victim].die()
    ex.do(ex.scheduler.unbuilt(ex.now, victim))
    assert ex.scheduler.gangs[victim].unbuilt
    ex.answer(ex.engines["a/0"])
    step(ex, victim.partition("/")[0], 1)


def test_somebody_else_than_a_call_may_want_it(pool):
    ex = pool("abcd")
    ex.do(ex.scheduler.rebuild(ex.now, "a/0"))
    assert isinstance(ex.engines["a/0"].order, Build)
    ex.answer(ex.engines["a/0"])
    assert at(ex, "a") is Residency.DEVICE and not ex.scheduler.turns


def test_a_union_turn_has_its_peer_built_again():
    ex = Executor(
        {"n:0": 1000, "n:1": 1000},
        Policy(paranoid=True, max_stretch=UNBOUNDED, anticipation_us=0),
        virtual=True,
    )
    ex.do(ex.scheduler.startup_done(0))
    ex.put("t", Role.TRAIN, "t", ["n:0"], 500, residual_bytes=0)
    ex.put("s", Role.SAMPLE, "t", ["n:1"], 500, resident=False)
    ex.engines["s/0"].die()
    ex.do(ex.scheduler.unbuilt(ex.now, "s/0"))
    assert ex.scheduler.gangs["s/0"].unbuilt and ex.engines["s/0"].order is None
    call = ex.submit("t", "t", CallKind.PUBLISH, 1, peer="s")
    assert isinstance(ex.engines["s/0"].order, Build)
    while call not in ex.ended:
        what, engine, which = ex.choices()[0]
        {"order": ex.answer, "pause": ex.pause}[what](engine) if what != "finish" else ex.finish(which)


def test_a_new_head_takes_them_up_without_building_them():
    ex = Executor({"n:0": 1000}, Policy(paranoid=True, max_stretch=UNBOUNDED), virtual=True)
    ex.do(ex.scheduler.startup_done(0))
    for name in "abcd":
        ex.place(name, Role.TRAIN, name, 500, residual_bytes=200)
        ex.wait(1 * S)
    old = ex.scheduler
    new = Executor({"n:0": 1000}, old.policy, ex.now, virtual=True)
    for group, (state,) in old.groups.items():
        new.engines[state.id] = ex.engines[state.id]
        placement = old.floor.where(group)
        new.do(new.scheduler.restore(new.now, placement, state.spec, state.residency is Residency.DEVICE, (), {"a/0"}))
    new.tick()
    assert not new.choices() and new.scheduler.gangs["a/0"].unbuilt
    step(new, "a", 1)


def test_without_leave_to_end_them_nobody_is_placed_who_would_need_it():
    ex = Executor({"n:0": 1000}, Policy(end_sleepers=False, max_stretch=UNBOUNDED), virtual=True)
    for name in "abc":
        ex.place(name, Role.TRAIN, name, 500, residual_bytes=200)
    with pytest.raises(DoesNotFit, match="of 1 GPUs 1 are full"):
        ex.place("d", Role.TRAIN, "d", 500, residual_bytes=200)
