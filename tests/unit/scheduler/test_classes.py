"""Classes, priorities and deadlines."""

from plexrl.scheduler import Dropped, Pause, Run, Turn
from plexrl.types import CallKind, JobClass, Role
from tests.unit.scheduler.executor import MS, S
from tests.unit.scheduler.test_adversarial import pool
from tests.unit.scheduler.test_orders import FB, resident, served

SAMPLE = CallKind.SAMPLE


def test_a_higher_priority_goes_first_within_its_class():
    ex = resident("fifo", "abc")
    ex.enroll("b", priority=1)
    ex.enroll("c", priority=-1)
    for name in "cab":
        ex.submit(name, name, FB, 1)
    assert served(ex, "abc") == "bac"


def test_classes_come_before_priorities():
    ex = resident("fifo", "abc", interactive_switches_per_hour=0)
    ex.enroll("a", JobClass.SCAVENGER, priority=9)
    ex.enroll("b", JobClass.NORMAL, priority=5)
    ex.enroll("c", JobClass.INTERACTIVE)
    for name in "abc":
        ex.submit(name, name, FB, 1)
    assert served(ex, "abc") == "cba"


def test_a_deadline_counts_when_it_is_near():
    ex = resident("fifo", "abc", quantum_us=10 * S)
    ex.enroll("b", deadline_us=1000 * S)
    ex.enroll("c", deadline_us=15 * S)
    for name in "abc":
        ex.submit(name, name, FB, 1)
    ex.wait(6 * S)
    assert served(ex, "abc") == "cab"


def test_a_job_that_nobody_enrolled_is_a_normal_user_of_its_own():
    ex = resident("fifo", "abc")
    ex.enroll("b", JobClass.SCAVENGER)
    ex.dismiss("b")
    for name in "bca":
        ex.submit(name, name, FB, 1)
    assert served(ex, "abc") == "bca"


def test_the_starved_go_before_classes_and_scavengers_do_not_starve():
    ex = resident("fifo", "abc", starvation_us=100 * S, quantum_us=1000 * S, interactive_switches_per_hour=0)
    ex.enroll("a", JobClass.SCAVENGER)
    ex.enroll("c", JobClass.INTERACTIVE)
    ex.submit("a", "a", FB, 1)
    ex.submit("b", "b", FB, 1)
    ex.wait(150 * S)
    ex.submit("c", "c", FB, 1)
    assert served(ex, "abc") == "bca"


def test_an_interactive_call_does_not_wait_for_the_turn_to_be_worth_its_switch():
    ex = pool(quantum_us=100 * S)
    ex.enroll("chat", JobClass.INTERACTIVE)
    for name in ("batch", "chat"):
        ex.place(name, Role.TRAIN, name, 1024)
    ex.submit("batch", "batch", FB, 1)
    ex.wait(5 * S)
    ex.answer(ex.engines["batch/0"])
    ex.wait(1 * S)
    ex.submit("chat", "chat", FB, 1)
    assert ex.last(Pause) == Pause("batch/0")
    ex.pause(ex.engines["batch/0"])
    ended = [turn for _, turn in ex.all(Turn) if turn.ended][-1]
    assert (ended.gang, ended.reason) == ("batch/0", "preempted")


def test_interactive_jobs_do_not_break_each_other_off():
    ex = pool(quantum_us=100 * S)
    for name in "ab":
        ex.enroll(name, JobClass.INTERACTIVE)
        ex.put(name, Role.TRAIN, name, ["n1:0"], 512, 512 * (name == "b"), resident=True)
    ex.submit("a", "a", FB, 1)
    ex.submit("b", "b", FB, 1)
    ex.wait(99 * S)
    assert ex.count(Pause) == 0
    ex.wait(1 * S)
    assert ex.count(Pause) == 1


def test_the_budget_is_of_every_hour():
    """With a budget of 60 and a call every 20 s, no hour has more than 60 turns broken off."""
    ex = pool(quantum_us=3600 * S, interactive_switches_per_hour=60, starvation_us=10 * 3600 * S)
    ex.enroll("chat", JobClass.INTERACTIVE)
    for i, name in enumerate(("chat", "batch")):
        ex.put(name, Role.TRAIN, name, ["n1:0"], 512, 512 * i, resident=True)
    ex.submit("batch", "batch", FB, 1)
    for seq in range(1, 361):
        ex.submit("chat", "chat", FB, seq)
        for engine in ex.engines.values():
            if engine.pausing:
                ex.pause(engine)
        ex.wait(10 * S)
        if ex.engines["chat/0"].running:
            ex.finish(f"chat:{seq}")
        else:
            ex.do(ex.scheduler.cancel(ex.now, f"chat:{seq}"))
        ex.wait(10 * S)
    broken = [at for at, turn in ex.all(Turn) if turn.reason == "preempted"]
    assert len(broken) > 60
    assert max(sum(first <= at < first + 3600 * S for at in broken) for first in broken) <= 60


def test_a_scavenger_leaves_at_once_and_comes_back_when_the_valley_does():
    ex = pool()
    ex.enroll("fill", JobClass.SCAVENGER)
    ex.put("fill", Role.SAMPLE, "fill", ["n1:0"], 512, 0, resident=True)
    ex.put("job", Role.TRAIN, "job", ["n1:0"], 512, 512, resident=True)
    ex.submit("fill", "fill", SAMPLE, 1)
    assert ex.last(Run) == Run("fill/0", ("fill:1",))
    ex.wait(1 * MS)
    ex.submit("job", "job", FB, 1)
    assert ex.last(Pause) == Pause("fill/0")
    ex.pause(ex.engines["fill/0"])
    assert ex.last(Run) == Run("job/0", ("job:1",))
    ex.wait(1000 * S)
    assert ex.count(Pause) == 1  # it waits for the end, not for a quantum
    ex.finish("job:1")
    ex.wait(10 * S)
    assert ex.last(Run) == Run("fill/0", ("fill:1",))
    ex.finish("fill:1")
    assert ex.count(Dropped) == 0


def test_a_scavenger_reserves_nothing():
    ex = pool(2, backfill=False)
    ex.enroll("fill", JobClass.SCAVENGER)
    ex.put("fill", Role.SAMPLE, "fill", ["n1:0", "n1:1"], 256, 0, resident=True)
    ex.put("left", Role.TRAIN, "left", ["n1:0"], 256, 256, resident=True)
    ex.put("right", Role.TRAIN, "right", ["n1:1"], 256, 256, resident=True)
    ex.submit("left", "left", FB, 1)
    ex.submit("fill", "fill", SAMPLE, 1)
    ex.submit("right", "right", FB, 1)
    assert ex.started[-1] == "right:1"
