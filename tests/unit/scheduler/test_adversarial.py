"""Cases that break naive co-schedulers, played over minutes and hours."""

from math import inf

import pytest

from plexrl.scheduler import Gather, Policy, Prefetch, Switch, Turn
from plexrl.scheduler.order import ORDERS
from plexrl.types import CallKind, JobClass, Role, SpanClass
from tests.unit.scheduler.executor import MS, Executor, S
from tests.unit.scheduler.player import Job, Player

FB, OPTIM, SAMPLE = CallKind.FORWARD_BACKWARD, CallKind.OPTIM_STEP, CallKind.SAMPLE
HOUR = 3600 * S
ANY = sorted(ORDERS)
UNBOUNDED = dict.fromkeys(JobClass, inf)


def pool(gpus: int = 1, size: int = 1024, **policy) -> Executor:
    ex = Executor({f"n1:{i}": size for i in range(gpus)}, Policy(paranoid=True, max_stretch=UNBOUNDED, **policy))
    ex.do(ex.scheduler.startup_done(0))
    return ex


def loop(player: Player, group: str, fb: int, optim: int, gap: int, steps: dict[str, int]) -> Job:
    """A training loop for ever, with a gap before each call; counts its steps."""
    steps[group] = 0
    while True:
        yield [player.submit(group, group, FB, fb)]
        yield gap
        yield [player.submit(group, group, OPTIM, optim)]
        steps[group] += 1
        yield gap


def single(player: Player, group: str, us: int, **call) -> Job:
    """One forward_backward."""
    yield [player.submit(group, group, FB, us, **call)]


def stream(player: Player, group: str, us: int, gap: int, **call) -> Job:
    """Calls for ever, each after the last one and a gap."""
    while True:
        yield [player.submit(group, group, FB, us, **call)]
        yield gap


@pytest.mark.parametrize("order", ANY)
def test_two_loops_with_gaps_of_5_ms_neither_thrash_nor_starve(order):
    """Trap B14: naively 585 switches per hour and 19 % busy; with a window and no quantum, one starves."""
    ex = pool(order=order)
    player, steps = Player(ex, switch_us=5 * S), {}
    for name in "ab":
        ex.place(name, Role.TRAIN, name, 1024)
        player.start(loop(player, name, 2 * S, 300 * MS, 5 * MS, steps))
    player.run(HOUR)
    # A turn takes its quantum of 20 s, more or less one step: the best is 17.7 s of work, 5 s of switch.
    assert ex.count(Switch) <= HOUR / (20 * S - 2.31 * S + 5 * S) + 1
    assert player.share(SpanClass.BUSY) > 0.75
    alone = HOUR / (2.31 * S)
    assert min(steps.values()) > 0.35 * alone


@pytest.mark.parametrize("order", ANY)
@pytest.mark.parametrize("pause_us", [0, None])
def test_twenty_calls_of_a_minute_wait_no_longer_than_rule_9_allows(order, pause_us):
    """Trap B14: with B = 300 s the last waits 1,235 s whatever the order; the bound has to count who is ahead."""
    ex = pool(order=order)
    player = Player(ex, switch_us=5 * S, pause_us=pause_us)
    names = [f"d{i}" for i in range(20)]
    for name in names:
        ex.place(name, Role.TRAIN, name, 1024)
    start = ex.now
    for name in names:
        player.start(single(player, name, 60 * S, cost_us=60 * S), start)
    player.run(start + 2 * HOUR)
    assert set(ex.ended) == {f"{name}:1" for name in names}
    waits = player.waits()
    quantum, switch, piece = ex.policy.quantum_us, 5 * S, 60 * S if pause_us is None else 0
    assert max(waits.values()) > 300 * S  # the bound was needed
    assert max(waits.values()) <= 300 * S + 19 * (quantum + switch + piece) + switch
    assert ex.watch.starved > 0 and ex.watch.nearest <= 1


@pytest.mark.parametrize("order", ANY)
def test_nobody_starves_beside_a_stream_of_short_calls(order):
    """One long call of a job whose response ratio grows slowly, and nine streams of short ones."""
    ex = pool(order=order, starvation_us=120 * S)
    player = Player(ex, switch_us=1 * S)
    for i in range(9):
        ex.place(f"s{i}", Role.TRAIN, f"s{i}", 1024)
        player.start(stream(player, f"s{i}", 1 * S, 100 * MS))
    ex.place("long", Role.TRAIN, "long", 1024)
    player.start(single(player, "long", 100 * S, cost_us=100 * S), ex.now)
    player.run(HOUR)
    assert "long:1" in player.done
    assert player.waits()["long:1"] <= 120 * S + 10 * (20 * S + 1 * S)


def test_a_user_with_ten_times_its_share_waits_longer_and_not_for_ever():
    """Trap B15: without a clamp a call waits 66,495 s to tie with a fresh one when usage is ten times the share."""
    ex = pool(order="hrrs", starvation_us=10 * HOUR)  # so that the order decides alone
    player = Player(ex, switch_us=1 * S)
    users = {"heavy": "heavy", **{f"light{i}": f"light{i}" for i in range(9)}}
    for job, user in users.items():
        ex.enroll(job, account="all", user=user)
        ex.place(job, Role.TRAIN, job, 1024)
    player.start(stream(player, "heavy", 10 * S, 0))
    player.run(ex.now + HOUR)  # all that was used so far is heavy's: ten times its share
    start = ex.now
    for job in list(users)[1:]:
        player.start(stream(player, job, 10 * S, 0), start)
    player.run(start + HOUR)
    gaps = gaps_between_turns(player, "heavy/0", start)
    others = [max(gaps_between_turns(player, f"{job}/0", start)) for job in list(users)[1:]]
    assert len(gaps) >= 3, f"heavy had {len(gaps)} turns"
    assert max(gaps) > max(others)
    # A score F * (w + s) / s with F >= 1/8 ties with a fresh one's 1 after 7 s; every other's is at most that of a
    # rotation by then.
    assert max(gaps) <= 8 * max(others) + 9 * 21 * S


def gaps_between_turns(player: Player, gang: str, start: int) -> list[int]:
    gaps, since = [], start
    for at, turn in player.turns(gang):
        if at >= start:
            if not turn.ended:
                gaps.append(at - since)
            since = at
    return gaps


@pytest.mark.parametrize("order", ANY)
@pytest.mark.parametrize("backfill", [False, True])
def test_overlapping_gangs_are_not_starved_by_small_ones(order, backfill):
    """GPUs 0-3 against 2-5, and small gangs on every GPU that always have something to do."""
    ex = pool(6, order=order, backfill=backfill, starvation_us=60 * S)
    player, steps = Player(ex, switch_us=1 * S), {}
    ex.put("low", Role.TRAIN, "low", [f"n1:{i}" for i in range(4)], 1024)
    ex.put("high", Role.TRAIN, "high", [f"n1:{i}" for i in range(2, 6)], 1024)
    for i in range(6):
        for k in range(2):
            ex.put(f"s{i}{k}", Role.TRAIN, f"s{i}{k}", [f"n1:{i}"], 1024)
            player.start(stream(player, f"s{i}{k}", 5 * S, 100 * MS))
    for name in ("low", "high"):
        player.start(loop(player, name, 2 * S, 300 * MS, 5 * MS, steps))
    player.run(1500 * S)
    for name in ("low", "high"):
        gaps = gaps_between_turns(player, f"{name}/0", 0)
        # Ahead of it are at most: the turns open on six GPUs, the other big one, and twelve small ones that starve too.
        assert max(gaps) <= 60 * S + (6 + 1 + 12) * (20 * S + 1 * S)
        assert steps[name] >= 10, f"{name} made {steps[name]} steps"
    for i in range(6):
        assert sum(call.startswith(f"s{i}") for call in player.done) >= 20


def test_an_interactive_call_breaks_turns_off_within_its_budget_and_no_more():
    ex = pool(order="hrrs", interactive_switches_per_hour=10, quantum_us=300 * S, starvation_us=HOUR)
    player, steps = Player(ex, switch_us=2 * S), {}
    ex.enroll("chat", JobClass.INTERACTIVE)
    for name in ("chat", "batch"):
        ex.place(name, Role.TRAIN, name, 1024)
    player.start(loop(player, "batch", 100 * S, 10 * S, 5 * MS, steps))

    def chats() -> Job:
        while True:
            yield 60 * S
            yield [player.submit("chat", "chat", FB, 1 * S)]

    player.start(chats())
    player.run(4 * HOUR)
    broken = [at for at, turn in player.turns("batch/0") if turn.ended and turn.reason == "preempted"]
    assert broken
    for first in broken:
        assert sum(first <= at < first + HOUR for at in broken) <= 10
    waits = [wait for call, wait in player.waits().items() if call.startswith("chat")]
    assert min(waits) <= 2 * S  # a switch and nothing else
    assert max(waits) <= 300 * S + 2 * S + 1 * S  # the quantum, when the budget is spent


def test_no_budget_no_preemption():
    ex = pool(interactive_switches_per_hour=0, quantum_us=30 * S)
    player = Player(ex, switch_us=1 * S)
    ex.enroll("chat", JobClass.INTERACTIVE)
    for name in ("chat", "batch"):
        ex.place(name, Role.TRAIN, name, 1024)
    player.start(stream(player, "batch", 100 * S, 0))
    player.run(ex.now + 40 * S)
    asked = ex.now
    player.start(single(player, "chat", 1 * S), asked)
    player.run(asked + 60 * S)
    assert not [turn for _, turn in player.turns("batch/0") if turn.reason == "preempted"]


def test_a_scavenger_has_the_valleys_and_leaves_at_once():
    ex = pool(order="hrrs")
    player = Player(ex, switch_us=1 * S, pause_us=10 * MS)
    ex.enroll("fill", JobClass.SCAVENGER)
    ex.place("fill", Role.SAMPLE, "fill", 1024)
    ex.place("job", Role.TRAIN, "job", 1024)

    def fills() -> Job:
        while True:
            yield [player.submit("fill", "fill", SAMPLE, 30 * S, units=100) for _ in range(4)]

    def bursts() -> Job:
        for _ in range(20):
            for _ in range(5):
                yield [player.submit("job", "job", FB, 1 * S)]
                yield [player.submit("job", "job", OPTIM, 1 * S)]
                yield 20 * MS  # within the anticipation window: not a valley
            yield 100 * S

    player.start(fills())
    player.start(bursts(), ex.now)
    player.run(HOUR)
    waits = [wait for call, wait in player.waits().items() if call.startswith("job")]
    assert len(waits) == 200
    assert max(waits) <= 1 * S + 10 * MS + 1 * S  # pause and switch; or the scavenger's own switch, and then its own
    assert player.share(SpanClass.BUSY) > 0.6
    ended = {turn.reason for _, turn in player.turns("job/0") if turn.ended}
    assert ended <= {"built", "drained"}, "a scavenger broke a turn off"


def test_a_scavenger_does_not_run_while_others_wait():
    ex = pool(order="hrrs", starvation_us=10 * S)
    player, steps = Player(ex, switch_us=1 * S), {}
    ex.enroll("fill", JobClass.SCAVENGER)
    for name in ("fill", "a", "b"):
        ex.place(name, Role.TRAIN, name, 1024)
    start = ex.now
    player.start(single(player, "fill", 1 * S), start + 2 * S)
    for name in "ab":
        player.start(loop(player, name, 2 * S, 300 * MS, 5 * MS, steps), start)
    player.run(start + HOUR)
    assert "fill:1" not in player.waits()


def test_a_prefetch_hides_a_switch_behind_work():
    busy = {}
    for prefetch in (False, True):
        ex = Executor({"n1:0": 1024}, Policy(paranoid=True, prefetch=prefetch), virtual=True)
        ex.do(ex.scheduler.startup_done(0))
        player, steps = Player(ex, switch_us=5 * S), {}
        for name in "abc":  # two of the three fit at once
            ex.place(name, Role.TRAIN, name, 512)
            player.start(loop(player, name, 2 * S, 300 * MS, 5 * MS, steps))
        player.run(HOUR)
        busy[prefetch] = player.share(SpanClass.BUSY)
        assert (ex.count(Prefetch) > 0) is prefetch
        if prefetch:
            assert player.share(SpanClass.SWITCH) < 0.05
            assert ex.count(Switch) < 0.1 * ex.count(Prefetch)
    assert busy[True] > busy[False] + 0.1


def test_a_long_tail_is_gathered_and_every_call_ends_once():
    """Four replicas, one long request on each: three replicas are free for the next job while the tail goes on."""
    ends = {}
    for share in (0.8, 1.0):
        ex = pool(4, gather_share=share, quantum_us=600 * S, order="fifo", anticipation_us=0)
        player = Player(ex, switch_us=1 * S)
        ex.place("roll", Role.SAMPLE, "roll", 1024, replicas=4)
        ex.place("next", Role.TRAIN, "next", 1024, 3)
        start = ex.now

        def rollout(player: Player = player) -> Job:
            yield [player.submit("roll", "roll", SAMPLE, 100 * S if i < 4 else 10 * S, units=10) for i in range(40)]

        player.start(rollout(), start)
        player.start(single(player, "next", 30 * S), start + 5 * S)
        player.run(start + HOUR)
        assert set(ex.ended.values()) == {"done"} and len(ex.ended) == 41
        ends[share] = player.done["next:1"] - start
        assert (ex.count(Gather) > 0) is (share < 1)
        if share < 1:
            gathered = {call for _, gather in ex.all(Gather) for call in gather.calls}
            assert gathered and all(f"roll:{i}" in player.done for i in range(1, 41))
    assert ends[0.8] < 60 * S < 100 * S < ends[1.0]


def test_a_sampler_shrinks_and_grows_replica_by_replica():
    """A trainer wants one of the sampler's GPUs: the other replica samples on, also what was queued for the first."""
    ex = pool(2, order="fifo")
    player, steps = Player(ex, switch_us=1 * S), {}
    ex.put("s", Role.SAMPLE, "s", [["n1:0"], ["n1:1"]], 1024)
    ex.put("t", Role.TRAIN, "t", ["n1:0"], 1024)

    def samples() -> Job:
        while True:
            yield [player.submit("s", "s", SAMPLE, 2 * S, units=10) for _ in range(8)]
            yield 10 * MS

    player.start(samples())
    player.start(loop(player, "t", 2 * S, 300 * MS, 5 * MS, steps), 10 * S)
    player.run(HOUR)
    other = [
        turn for _, turn in player.turns("s/1") if turn.ended and turn.reason in ("quantum", "preempted", "reserved")
    ]
    assert not other, "nobody wants that replica's GPU"
    assert len(player.turns("s/0")) >= 10 and steps["t"] > 100
    waits = [wait for call, wait in player.waits().items() if call.startswith("s:")]
    assert max(waits) <= 8 * S, "a sample waited for a replica without a turn while another had one"


def test_turns_say_why_they_began_and_ended():
    ex = pool(2, order="hrrs")
    player, steps = Player(ex, switch_us=1 * S), {}
    for name in "abc":
        ex.place(name, Role.TRAIN, name, 1024, 2)
        player.start(loop(player, name, 2 * S, 300 * MS, 5 * MS, steps))
    player.run(300 * S)
    turns = [turn for _, turn in ex.all(Turn)]
    assert {t.reason for t in turns if not t.ended} <= {"build", "switch", "prefetched", "resident", "backfill"}
    assert all(t.reason for t in turns)
    began = [turn for turn in turns if not turn.ended and turn.reason != "build"]
    assert any(turn.waited_us > 10 * S for turn in began) and any(turn.score > 1 for turn in began)
