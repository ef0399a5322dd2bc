"""A scheduler that runs follows other knobs from the moment on that it is given them; invariants hold throughout."""

from random import Random

import pytest
from msgspec import structs

from plexrl.scheduler.fairshare import Shares
from plexrl.scheduler.retune import retune
from plexrl.types import BadInput, CallKind, Role
from tests.unit.scheduler.executor import Executor, S
from tests.unit.scheduler.test_adversarial import pool

FB = CallKind.FORWARD_BACKWARD


def waiting(order: str) -> Executor:
    """One GPU with a call that runs, and calls of a, then b, then c behind it; a has used the most, c the least."""
    ex = pool(order=order, prefetch=False, anticipation_us=0, gradient_anticipation_us=0)
    for number, name in enumerate("xabc"):
        ex.put(name, Role.TRAIN, name, ["n1:0"], 64, 64 * number, resident=True)
    for name, used in zip("abc", (3, 2, 1), strict=True):
        ex.scheduler.shares.charge(ex.now, "", name, used * S)
    ex.submit("x", "x", FB, 1)
    for name in "abc":
        ex.submit(name, name, FB, 1)
        ex.now += S
    return ex


def follow(ex: Executor, **knobs: object) -> None:
    ex.do(retune(ex.scheduler, ex.now, structs.replace(ex.scheduler.policy, paranoid=True, **knobs)))


def served(ex: Executor) -> str:
    order = ""
    ex.finish(*ex.engines["x/0"].running)
    while len(order) < 3:
        (running,) = [engine for engine in ex.engines.values() if engine.running]
        order += running.gang.group
        ex.wait(S)
        ex.finish(running.running[0])
    return order


def test_another_order_counts_for_those_who_wait_already():
    assert served(waiting("fifo")) == "abc"
    ex = waiting("fifo")
    follow(ex, order="fair")
    assert served(ex) == "cba"


def test_an_open_turn_has_the_new_quantum():
    ex = waiting("fifo")
    before = ex.scheduler.wake_at()
    follow(ex, quantum_us=60 * S)
    assert ex.scheduler.wake_at() == before + 40 * S
    follow(ex, quantum_us=1 * S, min_turn_factor=0.0)  # it has had more by now
    assert ex.engines["x/0"].pauses


@pytest.mark.parametrize("seed", range(3))
def test_whatever_happens_in_between(seed):
    """Random events with faults, and other knobs now and then; paranoid, so that each event checks the invariants."""
    random = Random(seed)
    ex = waiting("hrrs")
    number = 1
    for _ in range(150):
        if random.random() < 0.15:
            follow(
                ex,
                order=random.choice(["fifo", "round_robin", "hrrs", "fair"]),
                quantum_us=random.randrange(1, 30) * S,
                anticipation_us=random.choice([0, S]),
                starvation_us=random.choice([S, 300 * S]),
                half_life_us=random.randrange(1, 100) * 3600 * S,
                backfill=random.random() < 0.5,
                interactive_switches_per_hour=random.randrange(3),
            )
        if random.random() < 0.3:
            number += 1
            name = random.choice("abc")
            ex.submit(name, name, FB, number)
        ex.step(random)
    ex.scheduler.invariants()


def test_usage_goes_on_from_what_it_had_decayed_to():
    shares = Shares(100)
    shares.charge(0, "a", "u", 800)
    shares.set_half_life(200, 1000)
    assert shares.usage(200, "a", "u") == 200
    shares.charge(200, "a", "u", 56)
    assert shares.usage(1200, "a", "u") == pytest.approx(128)
    with pytest.raises(BadInput, match="half-life"):
        shares.set_half_life(1200, 0)
