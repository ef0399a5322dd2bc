"""Who has which GPUs, for how long, and what moves."""

from random import Random

import pytest

from plexrl.scheduler import Build, Dropped, Pause, Policy, Run, Switch, Turn
from plexrl.types import BadInput, CallKind, Role
from tests.unit.scheduler.executor import MS, Executor, S

FB, OPTIM, SAMPLE = CallKind.FORWARD_BACKWARD, CallKind.OPTIM_STEP, CallKind.SAMPLE


def pool(gpus: int = 1, **policy) -> Executor:
    ex = Executor({f"n1:{i}": 1024 for i in range(gpus)}, Policy(paranoid=True, **policy))
    ex.do(ex.scheduler.startup_done(0))
    return ex


def two_trainers(gpus: int = 1, size: int = 1024, **policy) -> Executor:
    ex = pool(gpus, **policy)
    ex.place("a", Role.TRAIN, "a", size, gpus)
    ex.place("b", Role.TRAIN, "b", size, gpus)
    ex.trace.clear()
    return ex


def serve(ex: Executor) -> None:
    """Answer all switches and pauses at once; leave the calls."""
    for engine in ex.engines.values():
        if engine.pausing:
            ex.pause(engine)
        if engine.order:
            ex.answer(engine)


class Loop:
    """A training loop: forward_backward, optim_step, and so on, with a gap before each call."""

    service = {FB: 2 * S, OPTIM: 300 * MS}

    def __init__(self, ex: Executor, group: str, gap: int) -> None:
        self.ex, self.group, self.gap = ex, group, gap
        self.seq = self.steps = 0
        self.next_us: int | None = 0
        self.left: dict[str, int] = {}

    def submit(self) -> None:
        self.seq += 1
        kind = FB if self.seq % 2 else OPTIM
        self.call = self.ex.submit(self.group, self.group, kind, self.seq)
        self.left[self.call] = self.service[kind]
        self.next_us = None

    def after(self, us: int) -> None:
        """The time passed; the call under way gets nearer to its end."""
        if self.next_us is None and any(self.call in e.running for e in self.ex.engines.values()):
            self.left[self.call] -= us
            if self.left[self.call] <= 0:
                self.ex.finish(self.call)
                self.steps += self.seq % 2 == 0
                self.next_us = self.ex.now + self.gap


def run_loops(ex: Executor, loops: list[Loop], seconds: int, switch_us: int) -> None:
    """Play the loops; a switch takes `switch_us`, a pause is answered at the next millisecond."""
    due: dict[str, int] = {}
    while ex.now < seconds * S:
        ex.wait(MS)
        for engine in ex.engines.values():
            if engine.order and ex.now >= due.setdefault(engine.gang.id, ex.now + switch_us):
                del due[engine.gang.id]
                ex.answer(engine)
            if engine.pausing:
                ex.pause(engine)
        for loop in loops:
            loop.after(MS)
            if loop.next_us is not None and ex.now >= loop.next_us:
                loop.submit()


def test_two_training_loops_with_small_gaps_do_not_thrash_and_both_progress():
    ex = two_trainers()
    loops = [Loop(ex, "a", 5 * MS), Loop(ex, "b", 5 * MS)]
    run_loops(ex, loops, 120, 1 * S)
    ex.close()
    assert ex.count(Switch) <= 120 / 20 + 2
    assert min(loop.steps for loop in loops) >= 18
    busy = sum(span.end_us - span.start_us for span in ex.spans if span.kind == "busy")
    assert busy > 0.9 * 120 * S


def test_a_long_pause_of_one_job_is_filled_with_the_other():
    ex = two_trainers()
    loops = [Loop(ex, "a", 5 * MS), Loop(ex, "b", 4 * S)]
    run_loops(ex, loops, 100, 500 * MS)
    ex.close()
    busy = sum(span.end_us - span.start_us for span in ex.spans if span.kind == "busy")
    assert busy > 0.85 * 100 * S
    assert min(loop.steps for loop in loops) >= 2


def test_the_natural_end_of_a_training_turn_is_after_optim_step():
    ex = two_trainers()
    first = ex.submit("a", "a", FB, 1)
    ex.submit("b", "b", FB, 1)
    serve(ex)
    ex.now += 100 * MS
    ex.finish(first)
    assert ex.scheduler.wake_at() == ex.now + 1 * S  # gradients are live
    ex.wait(999 * MS)
    second = ex.submit("a", "a", OPTIM, 2)
    assert ex.last(Run).calls == (second,)
    ex.finish(second)
    assert ex.scheduler.wake_at() == ex.now + 50 * MS  # they are not any more
    ex.wait(50 * MS)
    assert ex.last(Switch) == Switch("b/0", ("a/0",))


def test_a_quantum_that_ends_between_forward_backward_and_optim_step_lets_the_step_end():
    ex = two_trainers(quantum_us=1 * S)
    calls = [ex.submit("a", "a", kind, seq) for seq, kind in enumerate([FB, OPTIM, FB], 1)]
    ex.submit("b", "b", FB, 1)
    serve(ex)
    ex.wait(900 * MS)
    ex.finish(calls[0])
    ex.wait(600 * MS)
    assert ex.count(Pause) == 0
    ex.finish(calls[1])
    assert ex.count(Pause) == 0
    assert ex.last(Switch) == Switch("b/0", ("a/0",))


def test_a_turn_lasts_as_long_as_nobody_waits_and_is_paused_at_its_quantum_when_someone_does():
    ex = two_trainers()
    ex.submit("a", "a", FB, 1)
    serve(ex)
    ex.wait(60 * S)
    assert ex.count(Pause) == 0 and ex.scheduler.wake_at() is None
    ex.submit("b", "b", FB, 1)
    assert ex.last(Pause) == Pause("a/0")
    ex.pause(ex.engines["a/0"])
    assert ex.last(Switch) == Switch("b/0", ("a/0",))
    serve(ex)
    ex.wait(20 * S)
    assert ex.last(Pause) == Pause("b/0")
    serve(ex)
    serve(ex)
    assert ex.last(Run) == Run("a/0", ("a:1",))  # the half-done call resumes, at the front


def test_a_turn_is_not_preempted_before_it_was_worth_its_switch():
    ex = two_trainers(quantum_us=1 * S)
    ex.submit("a", "a", FB, 1)
    ex.submit("b", "b", FB, 1)
    ex.wait(2 * S)
    serve(ex)
    ex.wait(6 * S - 1)
    assert ex.count(Pause) == 0
    ex.wait(1)
    assert ex.count(Pause) == 1


def test_a_preempted_gang_goes_to_the_back_although_its_calls_are_older():
    ex = pool()
    for name in "abc":
        ex.place(name, Role.TRAIN, name, 1024)
    for name in "abc":
        ex.submit(name, name, FB, 1)
    order = []
    for _ in range(6):
        serve(ex)
        order.append(ex.last(Run).gang)
        ex.wait(20 * S)
        serve(ex)
    assert order == ["a/0", "b/0", "c/0"] * 2


def test_first_come_first_served_by_the_oldest_eligible_call():
    ex = pool()
    for name in "abcd":
        ex.place(name, Role.TRAIN, name, 1024)
    for name in "dcba":
        ex.submit(name, name, FB, 1)
    ex.submit("a", "a", FB, 2)
    ex.submit("c", "c", FB, 2)
    ex.do(ex.scheduler.cancel(ex.now, "c:1"))  # its place in line goes with it
    order = []
    for _ in range(4):
        serve(ex)
        order.append(ex.started[-1])
        ex.finish(order[-1])
        ex.wait(2 * S)
    assert order == ["d:1", "b:1", "a:1", "a:2"]
    serve(ex)
    assert ex.started[-1] == "c:2"


def test_a_waiting_older_gang_reserves_its_gpus_against_younger_ones():
    ex = pool(2, order="fifo", backfill=False)
    for name, gpus in [("both", 2), ("left", 1), ("right", 1), ("young", 1)]:
        ex.place(name, Role.TRAIN, name, 256, gpus)
    assert [ex.engines[f"{name}/0"].gang.gpus for name in ("left", "right", "young")] == [
        ("n1:0",),
        ("n1:1",),
        ("n1:0",),
    ]
    for name in ["left", "right", "both", "young"]:
        ex.submit(name, name, FB, 1)
    ex.finish("left:1")
    ex.wait(1 * S)
    assert "young:1" not in ex.started  # its GPU is free, and reserved
    assert "kept free for gang both/0" in ex.scheduler.explain("young:1")
    ex.finish("right:1")
    ex.wait(1 * S)
    assert ex.started[-1] == "both:1"
    ex.finish("both:1")
    ex.wait(1 * S)
    assert ex.started[-1] == "young:1"


def test_overlapping_gangs_neither_deadlock_nor_starve():
    """A ring of gangs of two around four GPUs, and one of all four, all always busy."""
    ex = pool(4, quantum_us=2 * S)
    ex.place("all", Role.TRAIN, "all", 256, 4)
    for i in range(6):
        ex.place(f"g{i}", Role.TRAIN, f"g{i}", 512, 2)
    names = ["all", *(f"g{i}" for i in range(6))]
    for name in names:
        for seq in range(1, 100):
            ex.submit(name, name, FB, seq)
    random = Random(7)
    for _ in range(400):
        ex.wait(random.choice([100 * MS, 700 * MS]))
        ex.step(random, faults=0)
    for name in names:
        waits, since = [], 0
        for at, action in ex.trace:
            if isinstance(action, Turn) and action.gang == f"{name}/0":
                waits.append(at - since) if not action.ended else None
                since = at
        assert len(waits) >= 3, f"{name} had {len(waits)} turns"


def test_a_crossing_of_trainer_and_sampler_gangs_ends():
    ex = pool(2)
    for name in "ab":
        ex.place(f"{name}t", Role.TRAIN, name, 1024, 2)
        ex.place(f"{name}s", Role.SAMPLE, name, 1024, 1, replicas=2)
    for seq in range(1, 9):
        for name in "ab":
            ex.submit(f"{name}t", f"{name}t", FB, seq)
            ex.submit(f"{name}s", f"{name}s", SAMPLE, seq)
    random = Random(3)
    for _ in range(400):
        ex.wait(60 * MS)
        ex.step(random)
        for name in [n for n, s in ex.scheduler.gangs.items() if s.residency == "lost"]:
            ex.do(ex.scheduler.rebuild(ex.now, name))
    assert set(ex.ended) == set(ex.calls)


def test_only_what_must_go_is_evicted_and_the_least_recently_used_first():
    ex = pool()
    ex.place("low", Role.TRAIN, "j", 256)  # 0..256
    ex.place("mid", Role.TRAIN, "j", 256)  # 256..512
    ex.place("top", Role.TRAIN, "j", 512)  # 512..1024
    ex.place("big", Role.TRAIN, "k", 512)  # overlaps low and mid, or top
    gang = ex.engines["big/0"].gang
    rivals = [name for name in ("low/0", "mid/0", "top/0") if ex.scheduler.gangs["big/0"].rivals.get(name)]
    assert gang.extents[0].offset == 0 and rivals == ["low/0", "mid/0"]
    assert ex.last(Build) == Build("big/0", ("low/0", "mid/0"))
    assert ex.engines["top/0"].on_device
    for name in ["mid", "low"]:
        ex.submit(name, name, FB, 1)
        serve(ex)
        ex.finish(f"{name}:1")
        ex.wait(2 * S)
    ex.submit("big", "big", FB, 1)
    assert ex.last(Switch) == Switch("big/0", ("mid/0", "low/0"))


def test_state_stays_on_the_device_until_its_bytes_are_needed():
    ex = two_trainers(size=512)
    for seq in range(1, 11):
        for name in "ab":
            ex.finish(ex.submit(name, name, OPTIM, seq))
            ex.wait(100 * MS)
    assert ex.count(Switch) == 0 and ex.count(Turn) >= 20


def test_newcomers_join_a_sampling_turn():
    ex = pool()
    ex.place("s", Role.SAMPLE, "j", 512)
    ex.submit("s", "m", SAMPLE, 1)
    ex.submit("s", "m", SAMPLE, 2)
    assert ex.engines["s/0"].running == ["m:1", "m:2"]
    assert [turn.gang for _, turn in ex.all(Turn) if turn.reason == "resident"] == ["s/0"]


def test_samples_go_to_the_replica_with_the_fewest_outstanding_units():
    ex = pool(2)
    ex.place("s", Role.SAMPLE, "j", 512, replicas=2)
    ex.submit("s", "m", SAMPLE, 1, units=100)
    for seq in range(2, 7):
        ex.submit("s", "m", SAMPLE, seq, units=30)
    assert ex.engines["s/0"].running == ["m:1", "m:6"]
    assert ex.engines["s/1"].running == ["m:2", "m:3", "m:4", "m:5"]


def test_a_grant_that_is_not_used_yet_is_not_idleness():
    ex = two_trainers()
    ex.submit("a", "a", FB, 1)
    ex.submit("b", "b", FB, 1)
    ex.wait(19 * S)  # the switch takes long, then the engine is slow to begin
    serve(ex)
    ex.wait(19 * S)
    assert not any(isinstance(action, Turn) and action.ended for _, action in ex.trace)


def test_calls_of_a_deployment_run_in_order_each_exactly_once():
    ex = two_trainers(quantum_us=100 * MS)
    for seq in range(1, 30):
        ex.submit("a", "a", FB, seq)
        ex.submit("b", "b", FB, seq)
    random = Random(5)
    while len(ex.ended) < 58:
        ex.wait(30 * MS)
        for engine in ex.engines.values():
            if engine.order:
                ex.answer(engine)
            elif engine.pausing:
                ex.pause(engine)
            elif engine.running and random.random() < 0.3:
                ex.finish(engine.running[0])
    for name in "ab":
        runs = [call for call in ex.started if call.startswith(name)]
        assert list(dict.fromkeys(runs)) == [f"{name}:{seq}" for seq in range(1, 30)]
        assert runs == sorted(runs, key=lambda call: int(call[2:]))
    assert set(ex.ended.values()) == {"done"}


def test_one_job_alone_hands_its_gpus_over_without_waiting():
    ex = pool()
    ex.place("t", Role.TRAIN, "j", 1024)
    ex.place("s", Role.SAMPLE, "j", 1024)
    ex.submit("s", "s", SAMPLE, 1, job="j")
    ex.finish("s:1")
    ex.submit("t", "t", FB, 1, job="j")
    assert ex.last(Switch) == Switch("t/0", ("s/0",))


def test_a_call_waits_behind_those_who_came_while_its_turn_had_lapsed():
    """An open turn whose window is over is another's, even if no tick came in time."""
    ex = two_trainers()
    ex.submit("a", "a", OPTIM, 1)
    serve(ex)
    ex.finish("a:1")
    ex.now += 10 * MS
    ex.submit("b", "b", OPTIM, 1)
    ex.now += 5 * S  # no tick
    ex.submit("a", "a", OPTIM, 2)
    assert ex.last(Switch) == Switch("b/0", ("a/0",))


def test_draining_grants_nothing_and_ends_what_runs_dry():
    ex = two_trainers()
    ex.submit("a", "a", FB, 1)
    ex.submit("b", "b", FB, 1)
    serve(ex)
    ex.do(ex.scheduler.drain(ex.now))
    ex.wait(100 * S)
    assert ex.count(Pause) == 0
    ex.finish("a:1")
    assert ex.last(Turn) == Turn("a/0", True, "drained")
    ex.wait(S)
    assert ex.count(Switch) == 1 and not ex.turns
    assert "drains" in ex.scheduler.explain("b:1")
    ex.close()
    assert [span.kind for span in ex.spans][-1] == "drain"


def test_a_cancelled_call_is_dropped_where_it_waits_and_finished_where_it_runs():
    ex = two_trainers()
    ex.submit("a", "a", FB, 1)
    ex.submit("a", "a", FB, 2)
    serve(ex)
    ex.do(ex.scheduler.cancel(ex.now, "a:2"))
    assert ex.last(Dropped) == Dropped(("a:2",))
    ex.do(ex.scheduler.cancel(ex.now, "a:1"))
    assert ex.count(Dropped) == 1
    ex.submit("b", "b", FB, 1)
    ex.wait(60 * S)
    ex.pause(ex.engines["a/0"])
    assert ex.last(Dropped) == Dropped(("a:1",))
    ex.do(ex.scheduler.cancel(ex.now, "a:1"))
    assert set(ex.scheduler.calls) == {"b:1"}


def test_a_gang_whose_calls_were_cancelled_during_the_switch_is_not_kept_for_long():
    ex = two_trainers()
    ex.submit("a", "a", FB, 1)
    ex.submit("b", "b", FB, 1)
    ex.do(ex.scheduler.cancel(ex.now, "a:1"))
    serve(ex)
    ex.wait(50 * MS)
    assert ex.last(Switch) == Switch("b/0", ("a/0",))


def test_a_wrong_call_is_refused():
    ex = two_trainers()
    ex.submit("a", "a", FB, 5)
    for group, deployment, kind, seq, word in [
        ("nowhere", "x", FB, 1, "not placed"),
        ("a", "x", SAMPLE, 1, "other role"),
        ("a", "a", FB, 5, "outstanding"),
        ("a", "a", OPTIM, 4, "seq order"),
    ]:
        with pytest.raises(BadInput, match=word):
            ex.submit(group, deployment, kind, seq)
    assert ex.scheduler.accepted == 1


@pytest.mark.parametrize(
    "wrong",
    [{"placement": "best"}, {"order": "lifo"}, {"quantum_us": 0}, {"anticipation_us": -1}, {"min_turn_factor": -1}],
)
def test_a_wrong_policy_is_refused(wrong):
    with pytest.raises(BadInput):
        Policy(**wrong)


def test_explain_says_what_a_job_waits_for():
    ex = two_trainers()
    ex.submit("a", "a", FB, 1)
    ex.submit("b", "b", FB, 1)
    assert "gang a/0 is being switched in for job a on n1:0" in ex.scheduler.explain("b:1")
    assert "is being switched in" in ex.scheduler.explain("a")
    assert "no such call" in ex.scheduler.explain("zzz")
