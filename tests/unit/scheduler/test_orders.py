"""Who is next, by order; expectations computed by hand from the formulas in the docs."""

import pytest

from plexrl.scheduler import Turn
from plexrl.types import CallKind, Role, SpanClass
from tests.unit.scheduler.executor import Executor, S
from tests.unit.scheduler.player import Job, Player
from tests.unit.scheduler.test_adversarial import HOUR, pool

FB = CallKind.FORWARD_BACKWARD


def resident(order: str, names: str, **policy) -> Executor:
    """One GPU on which all of these are resident, and a `blocker` that runs, of which nobody has used anything yet."""
    ex = pool(order=order, prefetch=False, anticipation_us=0, gradient_anticipation_us=0, **policy)
    for i, name in enumerate(["blocker", *names]):
        ex.put(name, Role.TRAIN, name, ["n1:0"], 64, 64 * i, resident=True)
    ex.submit("blocker", "blocker", FB, 1)
    return ex


def served(ex: Executor, names: str) -> str:
    """End the running call again and again; who runs, in order."""
    order = ""
    ex.finish(*ex.engines["blocker/0"].running)
    while len(order) < len(names):
        (running,) = [engine for engine in ex.engines.values() if engine.running]
        order += running.gang.group
        ex.wait(1 * S)
        ex.finish(running.running[0])
    return order


def test_fifo_goes_by_the_oldest_call():
    ex = resident("fifo", "abc")
    for name in "cab":
        ex.submit(name, name, FB, 1)
        ex.now += 1 * S
    assert served(ex, "abc") == "cab"


def test_round_robin_goes_by_the_oldest_turn():
    ex = resident("round_robin", "abc")
    for name in "bca":
        ex.submit(name, name, FB, 1)
    first = served(ex, "abc")
    ex.submit("blocker", "blocker", FB, 2)
    for name in "abc":
        ex.submit(name, name, FB, 2)
    assert served(ex, "abc") == first


def test_hrrs_is_wait_and_service_over_service():
    """After 20 s: the call of 10 s scores 3, that of 40 s scores 1.5; one of 5 s that has waited 8 s scores 2.6."""
    ex = resident("hrrs", "abc")
    ex.submit("a", "a", FB, 1, cost_us=40 * S)
    ex.submit("b", "b", FB, 1, cost_us=10 * S)
    ex.now += 12 * S
    ex.submit("c", "c", FB, 1, cost_us=5 * S)
    ex.now += 8 * S
    ex.finish("blocker:1")
    began = [turn for _, turn in ex.all(Turn) if not turn.ended][-1]
    assert began.gang == "b/0"
    assert began.waited_us == 20 * S and began.score == pytest.approx(3.0)


def test_hrrs_counts_the_switch_and_does_not_take_service_below_it():
    """It is expected to move 1,000,000 bytes at one per microsecond; the call takes 1 ms: (wait + 1 s + 1 s) / 2 s."""
    ex = pool(order="hrrs", size=2_000_000, prefetch=False, switch_bytes_per_us=1)
    ex.put("blocker", Role.TRAIN, "x", ["n1:0"], 64, 0, resident=True)
    ex.put("away", Role.TRAIN, "z", ["n1:0"], 1_000_000, 64)
    ex.submit("blocker", "blocker", CallKind.OPTIM_STEP, 1)
    ex.submit("away", "away", FB, 1, cost_us=1000)
    ex.wait(6 * S)
    ex.remove("blocker")
    (began,) = [turn for _, turn in ex.all(Turn) if turn.gang == "away/0"]
    assert began.waited_us == 6 * S and began.score == pytest.approx(4.0)


def loop(player: Player, name: str) -> Job:
    while True:
        yield [player.submit(name, name, FB, 5 * S)]


def test_fair_gives_accounts_their_shares_whoever_asks_more_often():
    """Account `three` has three shares, `one` has one, which it asks for with three jobs at once."""
    ex = pool(order="fair", starvation_us=100 * HOUR)
    player = Player(ex, switch_us=100_000)
    ex.scheduler.set_share(0, "three", 3, {})
    ex.scheduler.set_share(0, "one", 1, {})
    for job, account in [("a", "three"), ("b", "one"), ("c", "one"), ("d", "one")]:
        ex.enroll(job, account=account, user=job)
        ex.put(job, Role.TRAIN, job, ["n1:0"], 1024)
        player.start(loop(player, job))
    player.run(4 * HOUR)
    player.share(SpanClass.BUSY)
    busy = dict.fromkeys("abcd", 0)
    for span in ex.spans:
        if span.kind is SpanClass.BUSY:
            busy[span.gang[0]] += span.end_us - span.start_us
    assert busy["a"] / (busy["b"] + busy["c"] + busy["d"]) == pytest.approx(3, rel=0.1)
    assert max(busy[name] for name in "bcd") <= 1.1 * min(busy[name] for name in "bcd")


def test_past_use_is_forgotten_by_half_lives():
    ex = pool(order="fair", half_life_us=600 * S, starvation_us=100 * HOUR)
    player = Player(ex, switch_us=100_000)
    for job in "ab":
        ex.enroll(job, account=job, user=job)
        ex.put(job, Role.TRAIN, job, ["n1:0"], 1024)
    player.start(loop(player, "a"))
    player.run(HOUR)  # six half-lives of a alone
    player.start(loop(player, "b"), ex.now)
    since = ex.now
    player.run(since + HOUR)
    player.share(SpanClass.BUSY)
    busy = dict.fromkeys("ab", 0)
    for span in ex.spans:
        if span.kind is SpanClass.BUSY and span.start_us >= since + HOUR // 2:
            busy[span.gang[0]] += span.end_us - span.start_us
    assert busy["a"] == pytest.approx(busy["b"], rel=0.15)  # not a word of it after three more
