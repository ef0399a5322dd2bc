"""Union turns: one call that needs the gangs of two groups, for direct transfer of weights."""

from random import Random

import pytest

from plexrl.scheduler import Dropped, Policy, Run, Switch, Turn
from plexrl.types import BadInput, CallKind, Role, SpanClass
from tests.unit.scheduler.executor import MS, Executor, S
from tests.unit.scheduler.player import Player
from tests.unit.scheduler.test_adversarial import UNBOUNDED, stream

FB, PUBLISH, SAMPLE = CallKind.FORWARD_BACKWARD, CallKind.PUBLISH, CallKind.SAMPLE


def pair(trainer: list[int], sampler: list[int], resident: bool = True, **policy) -> Executor:
    """A trainer `t` and a sampler `s` on these GPUs of four; virtual addresses, a third of a GPU each."""
    policy = {"order": "fifo", "anticipation_us": 0, "gradient_anticipation_us": 0} | policy
    ex = Executor(
        {f"n1:{i}": 1024 for i in range(4)}, Policy(paranoid=True, max_stretch=UNBOUNDED, **policy), virtual=True
    )
    ex.do(ex.scheduler.startup_done(0))
    ex.put("t", Role.TRAIN, "t", [f"n1:{i}" for i in trainer], 320, resident=resident)
    ex.put("s", Role.SAMPLE, "s", [f"n1:{i}" for i in sampler], 320, resident=resident)
    return ex


@pytest.mark.parametrize("sampler", [[2, 3], [0, 1], [1, 2]])
def test_a_union_turn_has_the_gpus_of_both_and_they_are_busy(sampler):
    ex = pair([0, 1], sampler)
    ex.submit("t", "t", PUBLISH, 1, peer="s")
    assert ex.last(Run) == Run("t/0", ("t:1",))
    assert set(ex.turns) == {f"n1:{i}" for i in {0, 1, *sampler}}
    ex.wait(3 * S)
    ex.finish("t:1")
    ex.wait(1 * S)
    ex.close()
    busy = {span.gpu for span in ex.spans if span.kind is SpanClass.BUSY and span.end_us - span.start_us == 3 * S}
    assert busy == {f"n1:{i}" for i in {0, 1, *sampler}}


def test_both_are_brought_in_before_it_runs():
    ex = pair([0, 1], [2, 3], resident=False)
    ex.put("x", Role.TRAIN, "x", ["n1:3"], 1024, resident=True)
    ex.submit("t", "t", PUBLISH, 1, peer="s")
    while not ex.started:
        ex.wait(1 * S)
        (loading,) = [engine for engine in ex.engines.values() if engine.order]
        ex.answer(loading)
    assert {a.gang for _, a in ex.all(Switch)} == {"t/0", "s/0"}
    assert not ex.engines["x/0"].on_device
    ex.finish("t:1")


def test_it_is_granted_whole_or_not_at_all():
    ex = pair([0, 1], [2, 3])
    ex.submit("s", "s", SAMPLE, 1)
    ex.submit("t", "t", PUBLISH, 1, peer="s")
    assert ex.started == ["s:1"]  # nor does the trainer hold its own GPUs for a turn of their own
    assert "t/0" not in ex.turns.values()
    ex.finish("s:1")
    ex.wait(1 * S)
    assert ex.started == ["s:1", "t:1"]


def test_while_it_runs_the_peer_neither_samples_nor_leaves():
    ex = pair([0, 1], [2, 3], quantum_us=10 * S)
    ex.put("x", Role.TRAIN, "x", ["n1:3"], 1024)
    ex.submit("t", "t", PUBLISH, 1, peer="s")
    ex.submit("s", "s", SAMPLE, 1)
    ex.submit("x", "x", FB, 1)
    ex.wait(5 * S)
    assert ex.started == ["t:1"] and ex.count(Switch) == 0
    ex.finish("t:1")
    ex.wait(1 * S)
    assert ex.started == ["t:1", "s:1"]


def test_a_training_call_before_it_runs_in_a_turn_of_the_trainer_alone():
    ex = pair([0, 1], [2, 3])
    ex.submit("s", "s", SAMPLE, 1)
    for seq, peer in [(1, ""), (2, "s"), (3, "")]:
        ex.submit("t", "t", CallKind.OPTIM_STEP if not peer else PUBLISH, seq, peer=peer)
    assert ex.started == ["s:1", "t:1"]
    ex.finish("t:1")
    ex.wait(1 * S)
    assert ex.started == ["s:1", "t:1"]
    ex.finish("s:1")
    if ex.engines["s/0"].pausing:  # asked to make way meanwhile
        ex.pause(ex.engines["s/0"])
    ex.wait(1 * S)
    assert ex.started == ["s:1", "t:1", "t:2"]
    ex.submit("s", "s", SAMPLE, 2)
    ex.finish("t:2")
    ex.wait(1 * S)
    assert set(ex.started[-2:]) == {"t:3", "s:2"}


def test_small_gangs_do_not_starve_it():
    ex = pair([0, 1], [2, 3], starvation_us=60 * S)
    player = Player(ex, switch_us=500 * MS)
    for i in range(4):
        ex.put(f"g{i}", Role.TRAIN, f"g{i}", [f"n1:{i}"], 320, resident=True)
        player.start(stream(player, f"g{i}", 3 * S, 0))

    def publishes():
        while True:
            yield [player.submit("t", "t", PUBLISH, 1 * S, peer="s")]
            yield 10 * S

    player.start(publishes(), 1 * S)
    player.run(1800 * S)
    waits = [wait for call, wait in player.waits().items() if call.startswith("t:")]
    assert len(waits) >= 20
    assert max(waits) <= 60 * S + 5 * 21 * S


def test_a_peer_that_is_not_built_yet_is_built_first():
    """The trainer must not keep the GPUs free on which its peer has to be built."""
    ex = pair([0, 1], [2, 3])
    ex.lose(ex.engines["s/0"], Random(1))
    ex.submit("t", "t", PUBLISH, 1, peer="s")
    assert not ex.started
    ex.put("x", Role.TRAIN, "x", ["n1:2"], 320, resident=True)
    ex.submit("x", "x", FB, 1)
    assert ex.started == ["x:1"]  # nobody keeps n1:2 for a union that nothing can begin
    ex.do(ex.scheduler.rebuild(ex.now, "s/0"))
    ex.finish("x:1")
    ex.wait(1 * S)
    ex.answer(ex.engines["s/0"])
    ex.wait(1 * S)
    assert ex.started == ["x:1", "t:1"]


@pytest.mark.parametrize("who", ["t/0", "s/0"])
@pytest.mark.parametrize("when", ["coming in", "running"])
def test_either_of_them_dies(who, when):
    ex = pair([0, 1], [2, 3], resident=when == "running")
    ex.submit("t", "t", PUBLISH, 1, peer="s")
    if when == "running":
        assert ex.started == ["t:1"]
    ex.lose(ex.engines[who], Random(1))
    ex.do(ex.scheduler.rebuild(ex.now, who))
    if ex.ended.get("t:1") == "dropped":
        ex.submit("t", "t", PUBLISH, 1, peer="s")
    for _ in range(8):
        ex.wait(1 * S)
        for engine in ex.engines.values():
            if engine.order:
                ex.answer(engine)
    assert ex.engines["t/0"].running == ["t:1"]
    ex.finish("t:1")


def test_a_peer_that_is_removed_takes_the_call_with_it():
    ex = pair([0, 1], [2, 3])
    ex.submit("t", "t", FB, 1)
    ex.submit("t", "t", PUBLISH, 2, peer="s")
    ex.submit("t", "t", FB, 3)
    ex.remove("s")
    assert ex.last(Dropped) == Dropped(("t:2",))
    ex.finish("t:1")
    assert ex.started == ["t:1", "t:3"]


def test_what_can_never_be_granted_is_refused():
    ex = pair([0, 1], [0, 1])
    ex.put("huge", Role.SAMPLE, "h", ["n1:0", "n1:1"], 1024)
    for group, kind, peer in [
        ("t", PUBLISH, "nowhere"),
        ("t", PUBLISH, "t"),
        ("t", PUBLISH, "huge"),
        ("s", SAMPLE, "t"),
    ]:
        with pytest.raises(BadInput):
            ex.submit(group, f"{group}x", kind, 1, peer=peer)
    assert ex.scheduler.accepted == 0
    fixed = Executor({"n1:0": 1024}, Policy(paranoid=True, max_stretch=UNBOUNDED))
    fixed.put("t", Role.TRAIN, "t", ["n1:0"], 512, 0)
    fixed.put("s", Role.SAMPLE, "s", ["n1:0"], 512, 256)
    with pytest.raises(BadInput):
        fixed.submit("t", "t", PUBLISH, 1, peer="s")


def test_a_union_turn_is_paused_at_its_quantum_and_goes_on_later():
    ex = pair([0, 1], [2, 3], quantum_us=10 * S)
    ex.submit("t", "t", PUBLISH, 1, peer="s")
    ex.submit("s", "s", SAMPLE, 1)
    ex.wait(10 * S)
    ex.pause(ex.engines["t/0"])
    assert ex.started == ["t:1", "s:1"]
    assert not [t for _, t in ex.all(Turn) if t.gang == "s/0" and t.ended]
    ex.finish("s:1")
    ex.wait(1 * S)
    assert ex.started == ["t:1", "s:1", "t:1"]


def test_a_gang_is_built_whatever_its_first_call_waits_for():
    ex = pair([0, 1], [2, 3])
    ex.submit("t", "t", FB, 1)
    for name in ("s/0", "t/0"):
        ex.lose(ex.engines[name], Random(1))
    ex.do(ex.scheduler.rebuild(ex.now, "t/0"))
    ex.submit("t", "t", PUBLISH, 2, peer="s")
    ex.answer(ex.engines["t/0"])
    ex.wait(1 * S)
    assert ex.engines["t/0"].built
    ex.submit("t", "t", FB, 3)
    assert "t:3" not in ex.started  # behind the publication, which waits for the peer's engine


def test_room_that_was_made_for_a_peer_is_not_given_to_a_prefetch():
    """t takes 600 bytes of a GPU first, s then the other 400; x, which waits on the next GPU too, would fit between."""
    policy = Policy(paranoid=True, max_stretch=UNBOUNDED, order="fifo", anticipation_us=0)
    ex = Executor({"n:0": 1000, "n:1": 1000}, policy, virtual=True)
    ex.do(ex.scheduler.startup_done(0))
    ex.put("t", Role.TRAIN, "t", ["n:0"], 600)
    ex.put("s", Role.SAMPLE, "s", ["n:0"], 400)
    ex.put("x", Role.TRAIN, "x", ["n:0", "n:1"], 100)
    ex.put("y", Role.TRAIN, "y", ["n:1"], 100, resident=True)
    ex.submit("y", "y", FB, 1)
    ex.submit("t", "t", PUBLISH, 1, peer="s")
    ex.submit("x", "x", FB, 1)
    assert [engine.gang.id for engine in ex.engines.values() if engine.order] == ["t/0"]
    ex.answer(ex.engines["t/0"])
    ex.answer(ex.engines["s/0"])
    assert ex.started == ["y:1", "t:1"]


def test_other_replicas_than_the_peer_need_no_engine_for_it():
    """Two replicas of which only one had room for its engine ended each other's for ever, and the call never ran."""
    ex = pair([0], [1])
    ex.put("r", Role.SAMPLE, "r", [["n1:2"], ["n1:3"]], 320)
    ex.submit("t", "t", PUBLISH, 1, peer="r")
    for name in ("r/0", "r/1"):
        if not ex.engines[name].order:
            ex.engines[name].die()
            ex.do(ex.scheduler.unbuilt(ex.now, name))
    assert ex.engines["r/1"].order is None and ex.scheduler.gangs["r/1"].unbuilt
