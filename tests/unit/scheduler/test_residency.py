"""Who is on the device, who leaves, and what that may cost."""

import pytest

from plexrl.scheduler import Build, Policy, Prefetch, Switch
from plexrl.types import CallKind, DoesNotFit, GroupSpec, Residency, Role
from tests.unit.scheduler.executor import MS, Executor, S
from tests.unit.scheduler.player import Job, Player
from tests.unit.scheduler.test_adversarial import HOUR, UNBOUNDED

FB, OPTIM, SAMPLE = CallKind.FORWARD_BACKWARD, CallKind.OPTIM_STEP, CallKind.SAMPLE


def virtual(size: int = 1024, gpus: int = 1, **policy) -> Executor:
    ex = Executor(
        {f"n1:{i}": size for i in range(gpus)}, Policy(paranoid=True, max_stretch=UNBOUNDED, **policy), virtual=True
    )
    ex.do(ex.scheduler.startup_done(0))
    return ex


def moves(ex: Executor) -> list[tuple[str, tuple[str, ...]]]:
    return [(a.gang, a.evict) for _, a in ex.trace if isinstance(a, Switch | Prefetch)]


def call(ex: Executor, name: str, seq: int, kind: CallKind = OPTIM) -> None:
    """A call that ends at once, its switch included."""
    ex.submit(name, name, kind, seq)
    for engine in ex.engines.values():
        if engine.order:
            ex.answer(engine)
    ex.finish(f"{name}:{seq}")


def test_whatever_fits_is_resident_together_and_nobody_moves():
    ex = virtual()
    for name in "abcd":
        ex.put(name, Role.TRAIN, name, ["n1:0"], 256)
    for seq in range(1, 6):
        for name in "abcd":
            call(ex, name, seq)
            ex.wait(100 * MS)
    assert moves(ex) == [(f"{name}/0", ()) for name in "abcd"]


def test_the_victim_is_the_one_whose_next_use_is_furthest_not_the_least_recent():
    """`often` comes every 10 s, `rare` every 100 s and was here last: `new` takes the place of `rare`."""
    ex = virtual(prefetch=False)
    for name in ("often", "rare", "new"):
        ex.put(name, Role.TRAIN, name, ["n1:0"], 512)
    often = rare = 0
    for second in range(5, 311, 5):
        if second % 10 == 5:
            often += 1
            call(ex, "often", often)
        if second % 100 == 10:
            rare += 1
            call(ex, "rare", rare)
        ex.wait(5 * S)
    call(ex, "rare", rare + 1)
    ex.wait(1 * S)
    call(ex, "new", 1)
    assert moves(ex)[-1] == ("new/0", ("rare/0",))


def test_no_more_leave_than_have_to():
    ex = virtual(prefetch=False)
    for name, size in [("a", 256), ("b", 256), ("c", 512), ("d", 512)]:
        ex.put(name, Role.TRAIN, name, ["n1:0"], size)
    for name in "cab":
        call(ex, name, 1)
        ex.wait(1 * S)
    call(ex, "d", 1)
    assert moves(ex)[-1] == ("d/0", ("c/0",))


def test_an_eager_pool_moves_more_than_a_lazy_one():
    counts = {}
    for lazy in (True, False):
        ex = virtual(lazy=lazy)
        for name in "ab":
            ex.put(name, Role.TRAIN, name, ["n1:0"], 512)
        for seq in range(1, 11):
            for name in "ab":
                call(ex, name, seq)
                ex.wait(1 * S)
        counts[lazy] = len(moves(ex))
    assert counts == {True: 2, False: 20}


def test_sleepers_are_capped_by_what_they_keep():
    """Each keeps 100 of 1,024 bytes while it sleeps and has 500 awake: five fit, four asleep beside one awake."""
    ex = virtual(end_sleepers=False)
    for i in range(6):
        size = {"residual_bytes": 100}
        ex.place(f"g{i}", Role.TRAIN, f"g{i}", 500, **size)
    with pytest.raises(DoesNotFit):
        ex.place("g6", Role.TRAIN, "g6", 500, residual_bytes=100)
    for seq in (1, 2):
        for i in range(6):
            call(ex, f"g{i}", seq)
            ex.wait(2 * S)


def test_host_memory_is_a_budget():
    ex = Executor(
        {"n1:0": 1024, "n2:0": 1024}, Policy(paranoid=True, max_stretch=UNBOUNDED), hosts={"n1": 1000, "n2": 500}
    )
    for i in range(3):
        ex.place(f"g{i}", Role.TRAIN, f"g{i}", 512, host_bytes=500)
    with pytest.raises(DoesNotFit, match="host"):
        ex.place("g3", Role.TRAIN, "g3", 512, host_bytes=500)
    ex.remove("g0")
    ex.place("g3", Role.TRAIN, "g3", 512, host_bytes=500)


def test_a_job_is_placed_whole_or_waits_and_is_told():
    ex = Executor({"n1:0": 1024, "n1:1": 1024}, Policy(paranoid=True, placement="isolated"))
    ex.place("a", Role.TRAIN, "a", 512)
    spec = {"owner": "b", "gang_size": 1, "replicas": 1, "device_bytes": 512}
    ex.request("b", [GroupSpec(group="bt", role=Role.TRAIN, **spec), GroupSpec(group="bs", role=Role.SAMPLE, **spec)])
    assert {engine.gang.gpus for engine in ex.engines.values() if engine.spec.owner == "b"} == {("n1:1",)}
    spec["owner"] = "c"
    ex.request("c", [GroupSpec(group="c", role=Role.TRAIN, **spec)])
    assert "c" in ex.requests and "c/0" not in ex.engines
    ex.remove("a")
    assert "c" not in ex.requests and ex.engines["c/0"].gang.gpus == ("n1:0",)
    assert ex.last(Build) == Build("c/0")
    spec["gang_size"] = 3
    with pytest.raises(DoesNotFit):
        ex.request("d", [GroupSpec(group="d", role=Role.TRAIN, **spec)])
    with pytest.raises(DoesNotFit):
        ex.place("e", Role.TRAIN, "e", 512)


def test_a_request_that_was_withdrawn_is_not_answered():
    ex = Executor({"n1:0": 1024}, Policy(paranoid=True, placement="isolated"))
    ex.place("a", Role.TRAIN, "a", 512)
    spec = {"role": Role.TRAIN, "gang_size": 1, "replicas": 1, "device_bytes": 512}
    for job in "bcd":
        ex.request(job, [GroupSpec(group=job, owner=job, **spec)])
    ex.withdraw("b")
    ex.dismiss("c")
    ex.remove("a")
    assert [engine.gang.id for engine in ex.engines.values()] == ["d/0"]


def test_who_leaves_the_queue_lets_those_behind_in():
    """`big` waits for two GPUs of its own and holds up `small`, which has room: withdrawn, `small` is told at once."""
    ex = Executor({"n1:0": 1024, "n1:1": 1024}, Policy(paranoid=True, placement="isolated"))
    ex.place("a", Role.TRAIN, "a", 512)
    spec = {"role": Role.TRAIN, "replicas": 1, "device_bytes": 512}
    for away in (ex.withdraw, ex.dismiss):
        ex.request("big", [GroupSpec(group="big", owner="big", gang_size=2, **spec)])
        ex.request("small", [GroupSpec(group="small", owner="small", gang_size=1, **spec)])
        away("big")
        assert "small/0" in ex.engines and not ex.requests
        ex.remove("small")


def test_live_gradients_are_not_moved_unless_the_quantum_asks_for_it():
    """Two loops with a second between forward_backward and optim_step: switches come after optim_step."""
    ex = virtual(quantum_us=30 * S, gradient_anticipation_us=3 * S)
    player = Player(ex, switch_us=2 * S)
    last: dict[str, CallKind] = {}

    def steps(name: str) -> Job:
        while True:
            for kind, us in ((FB, 2 * S), (OPTIM, 500 * MS)):
                yield [player.submit(name, name, kind, us)]
                last[name] = kind
                yield 1 * S

    torn = []
    for name in "ab":
        ex.put(name, Role.TRAIN, name, ["n1:0"], 1024)
        player.start(steps(name))
    seen = 0
    for second in range(1, HOUR // S):
        player.run(second * S)
        new = [a for _, a in ex.trace[seen:] if isinstance(a, Switch)]
        seen = len(ex.trace)
        torn += [victim for a in new for victim in a.evict if ex.watch.gradients(victim.partition("/")[0])]
    assert ex.count(Switch) > 50
    assert not torn


def test_a_quantum_forces_even_live_gradients_out():
    ex = virtual(quantum_us=5 * S, gradient_anticipation_us=1 * S, natural_ends=True)
    for name in "ab":
        ex.put(name, Role.TRAIN, name, ["n1:0"], 1024, resident=name == "a")
    call(ex, "a", 1, FB)
    ex.submit("a", "a", FB, 2)
    ex.submit("b", "b", FB, 1)
    ex.wait(7 * S)
    ex.pause(ex.engines["a/0"])
    assert ex.last(Switch) == Switch("b/0", ("a/0",))


def test_a_new_head_counts_what_it_takes_up():
    ex = virtual(2048)
    for name in "abc":
        ex.put(name, Role.TRAIN, name, ["n1:0"], 1024, resident=name != "c", residual_bytes=0)
    call(ex, "c", 1)
    assert moves(ex) == [("c/0", ("a/0",))] or moves(ex) == [("c/0", ("b/0",))]
    assert {g.residency for g in ex.scheduler.gangs.values()} == {Residency.DEVICE, Residency.HOST}
