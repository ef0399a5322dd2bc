"""Gangs that wait for a part of their GPUs: what is kept for them, and who may go ahead (EASY)."""

import pytest

from plexrl.scheduler import Build, Pause, Prefetch, Switch, Turn
from plexrl.scheduler.order import ORDERS
from plexrl.types import CallKind, Role, SpanClass
from tests.unit.scheduler.executor import MS, S
from tests.unit.scheduler.player import Job, Player
from tests.unit.scheduler.test_adversarial import pool, single, stream

FB, SAMPLE = CallKind.FORWARD_BACKWARD, CallKind.SAMPLE


def began(player: Player, gang: str) -> list[int]:
    return [at for at, turn in player.turns(gang) if not turn.ended]


@pytest.mark.parametrize("order", sorted(ORDERS))
def test_a_reservation_stays_when_the_order_changes(order):
    """`both` waits for GPU 0; then ten short calls come for it, whose response ratios soon overtake that of `both`."""
    ex = pool(2, order=order, quantum_us=30 * S, backfill=False, prefetch=False)
    player = Player(ex, switch_us=100 * MS)
    ex.put("left", Role.TRAIN, "left", ["n1:0"], 64, 0, resident=True)
    ex.put("both", Role.TRAIN, "both", ["n1:0", "n1:1"], 64, 64, resident=True)
    player.start(single(player, "left", 30 * S, cost_us=30 * S))
    player.start(single(player, "both", 100 * S, cost_us=100 * S), 1 * S)
    for i in range(10):
        ex.put(f"s{i}", Role.TRAIN, f"s{i}", [f"n1:{i % 2}"], 64, 128 + 64 * i, resident=True)
        player.start(single(player, f"s{i}", 1 * S, cost_us=1 * S), 2 * S)
    player.run(29 * S)
    assert ex.scheduler.explain("both:1")
    assert not [call for call in player.done if call.startswith("s")], "somebody went ahead without backfill"
    player.run(40 * S)
    assert began(player, "both/0") == [30 * S]


@pytest.mark.parametrize("kind", [FB, SAMPLE])
def test_what_goes_ahead_never_delays_a_reservation(kind):
    """The same load with and without backfill: `both` begins at the same time, and GPU 1 works until then.

    Samples and training calls of unknown length go ahead; they stop in time, and at the latest when `both` could begin.
    """
    starts, busy = {}, {}
    for backfill in (False, True):
        ex = pool(2, order="fifo", quantum_us=20 * S, backfill=backfill, prefetch=False)
        player = Player(ex, switch_us=1 * S)
        ex.put("left", Role.TRAIN, "left", ["n1:0"], 1024, resident=True)
        ex.put("both", Role.TRAIN, "both", ["n1:0", "n1:1"], 512)
        ex.put("young", Role.TRAIN if kind is FB else Role.SAMPLE, "young", ["n1:1"], 512, 512, resident=True)

        def young(player: Player = player) -> Job:
            while True:
                yield [player.submit("young", "young", kind, 500 * S, units=9)]

        player.start(single(player, "left", 500 * S))
        player.start(single(player, "both", 500 * S), 1 * S)
        player.start(young(), 2 * S)
        player.run(60 * S)
        starts[backfill] = began(player, "both/0")[0]
        busy[backfill] = player.share(SpanClass.BUSY)
        went = [turn.gang for _, turn in ex.all(Turn) if turn.reason == "backfill"]
        assert went == (["young/0"] if backfill else [])
    assert starts[True] == starts[False] == 20 * S
    assert busy[True] > busy[False] + 0.1


def test_an_early_end_ends_what_went_ahead():
    """`left` is expected to work for its quantum, and ends after 5 s: `both` does not wait for `young`."""
    ex = pool(2, order="fifo", quantum_us=20 * S, anticipation_us=0, gradient_anticipation_us=0, prefetch=False)
    for i, (name, gpus) in enumerate([("left", [0]), ("both", [0, 1]), ("young", [1])]):
        ex.put(name, Role.TRAIN, name, [f"n1:{gpu}" for gpu in gpus], 256, 256 * i, resident=True)
    ex.submit("left", "left", FB, 1)
    ex.now = 1 * S
    ex.submit("both", "both", FB, 1)
    ex.submit("young", "young", FB, 1)
    assert ex.started == ["left:1", "young:1"]
    ex.wait(4 * S)
    ex.finish("left:1")
    ex.wait(0)
    assert ex.last(Pause) == Pause("young/0")
    ex.pause(ex.engines["young/0"])
    assert ex.started[-1] == "both:1"


@pytest.mark.parametrize("virtual", [False, True])
def test_going_ahead_does_not_cost_the_holder_its_memory(virtual):
    """`young` would have to send `both` away from GPU 1, where it is resident and waits: it stays out."""
    from plexrl.scheduler import Policy
    from tests.unit.scheduler.executor import Executor
    from tests.unit.scheduler.test_adversarial import UNBOUNDED

    policy = Policy(order="fifo", quantum_us=50 * S, max_stretch=UNBOUNDED, paranoid=True)
    ex = Executor({"n1:0": 1024, "n1:1": 1024}, policy, virtual=virtual)
    player = Player(ex, switch_us=100 * MS)
    ex.put("both", Role.TRAIN, "both", ["n1:0", "n1:1"], 576, 0, resident=True)
    ex.put("left", Role.TRAIN, "left", ["n1:0"], 448, 576, resident=True)
    ex.put("young", Role.TRAIN, "young", ["n1:1"], 512, 512 - 64)
    ex.put("small", Role.TRAIN, "small", ["n1:1"], 448, 576)
    player.start(single(player, "left", 40 * S))
    player.start(single(player, "both", 5 * S), 1 * S)
    player.start(stream(player, "young", 1 * S, 0), 2 * S)
    player.start(stream(player, "small", 1 * S, 0), 2 * S)
    player.run(39 * S)
    moves = [a for _, a in ex.trace if isinstance(a, Switch | Build | Prefetch)]
    assert not [a for a in moves if "both/0" in a.evict]
    assert began(player, "small/0") and not began(player, "young/0")
    player.run(60 * S)
    first = next(turn for _, turn in player.turns("both/0") if not turn.ended)
    assert first.reason == "resident"


def test_both_switches_of_a_backfill_are_counted():
    """8 s are left, a switch takes 3 s: in, back, and a turn of k = 1 times 3 s do not fit; with 10 s they do."""
    for left, fits in [(8, False), (10, True)]:
        ex = pool(
            2, order="fifo", quantum_us=20 * S, min_turn_factor=1, switch_bytes_per_us=1, size=4_000_000, prefetch=False
        )
        player = Player(ex, switch_us=3 * S)
        ex.put("left", Role.TRAIN, "left", ["n1:0"], 64, 0, resident=True)
        ex.put("both", Role.TRAIN, "both", ["n1:0", "n1:1"], 64, 64, resident=True)
        ex.put("young", Role.TRAIN, "young", ["n1:1"], 3_000_000, 128)
        player.start(single(player, "left", 100 * S))
        player.start(single(player, "both", 1 * S), 1 * S)
        player.start(single(player, "young", 100 * S), (20 - left) * S)
        player.run(20 * S - 1)
        assert bool(began(player, "young/0")) is fits
        player.run(21 * S)
        assert began(player, "both/0") == [20 * S]


def test_a_starving_gang_takes_a_reservation_over():
    """`both` has the higher priority and waits for GPU 0; `old` starves on GPU 1, which is kept for `both`."""
    ex = pool(2, order="fifo", quantum_us=500 * S, starvation_us=100 * S, backfill=False, prefetch=False)
    ex.enroll("both", priority=5)
    ex.put("left", Role.TRAIN, "left", ["n1:0"], 256, 0, resident=True)
    ex.put("right", Role.TRAIN, "right", ["n1:1"], 256, 0, resident=True)
    ex.put("both", Role.TRAIN, "both", ["n1:0", "n1:1"], 256, 256, resident=True)
    ex.put("old", Role.TRAIN, "old", ["n1:1"], 256, 512, resident=True)
    for name in ("left", "right", "old"):
        ex.submit(name, name, FB, 1)
    ex.wait(50 * S)
    ex.submit("both", "both", FB, 1)
    ex.finish("right:1")
    ex.wait(10 * S)
    assert "old:1" not in ex.started
    ex.wait(50 * S)
    ex.finish("left:1")  # now `both` could begin, and `old` has starved
    ex.wait(10 * S)
    assert ex.started[-1] == "old:1"
    ex.finish("old:1")
    ex.wait(10 * S)
    assert ex.started[-1] == "both:1"


@pytest.mark.parametrize("quantum", [20 * S, 400 * S])
@pytest.mark.parametrize("replicas", [1, 3])
def test_samples_make_way_for_a_gang_that_keeps_gpus_free(replicas, quantum):
    """`both` has GPU 1 and waits for GPU 0, where a rollout of minutes goes on: a 24th of a sampler's quantum is
    enough, however long a trainer's is."""
    ex = pool(2, order="fifo", quantum_us=quantum, sample_quantum_us=120 * S, prefetch=False)
    player = Player(ex, switch_us=0)
    for i in range(replicas):
        ex.put(f"s{i}", Role.SAMPLE, f"s{i}", ["n1:0"], 64, 64 * i, resident=True)
    ex.put("both", Role.TRAIN, "both", ["n1:0", "n1:1"], 64, 512, resident=True)
    for i in range(replicas):
        player.start(rollout(player, f"s{i}"))
    player.start(single(player, "both", 1 * S), 1 * S)
    player.run(30 * S)
    at, end = [(at, turn) for at, turn in player.turns("s0/0") if turn.ended][0]
    assert (at, end.reason) == (5 * S, "gang")
    assert began(player, "both/0")[0] < 6 * S


def rollout(player: Player, group: str) -> Job:
    yield [player.submit(group, group, SAMPLE, 200 * S, units=9)]


def test_overlapping_samplers_do_not_hand_each_other_the_gpus_at_every_token():
    """Two replicas over GPUs 0-1 and 1-2, and two over 0 and 2: each keeps a GPU free for another all the time."""
    ex = pool(3, order="hrrs", quantum_us=20 * S, prefetch=False)
    player = Player(ex, switch_us=0)
    for i, gpus in enumerate([[0, 1], [1, 2], [0], [2]]):
        ex.put(f"s{i}", Role.SAMPLE, f"s{i}", [f"n1:{gpu}" for gpu in gpus], 64, 64 * i, resident=True)
        player.start(rollout(player, f"s{i}"))
    player.run(600 * S)
    assert ex.count(Pause) <= 4 * 600 / 5
    assert {f"s{i}:1" for i in range(4)} <= set(player.done)
