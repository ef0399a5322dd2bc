"""Who waits to be placed, and who may go first."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct

from plexrl.scheduler.admission import MISSES, Admission
from plexrl.scheduler.placement import PLACEMENTS, Floor
from plexrl.types import BadInput, DoesNotFit, GpuRole, GroupSpec, JobClass, Role, Tenant

MINUTE = 60_000_000


class Rules(Struct):
    """The part of a policy that placement and admission read."""

    placement: str
    admission_patience_us: int = 5 * MINUTE

    @property
    def max_stretch(self) -> dict[JobClass, float]:
        return {JobClass.INTERACTIVE: 2.0, JobClass.NORMAL: 2.0, JobClass.SCAVENGER: inf}


class Counting(Floor):
    """Counts how often a place was looked for."""

    tries = 0

    def choose_all(self, *args, **kwargs):
        self.tries += 1
        return super().choose_all(*args, **kwargs)


class Desk:
    """An admission with its floor and policy; names of groups are `<job>.<number>`."""

    def __init__(self, placement: str, gpus: int = 4, roles=None) -> None:
        self.roles = roles or {}
        self.floor = Counting({f"n0:{i}": 1024 for i in range(gpus)}, roles=self.roles, virtual=True)
        self.rules = Rules(placement)
        self.admission = Admission(self.floor)
        self.numbers = 0

    def ask(self, job: str, *gangs: int, now=0, kind=JobClass.NORMAL, priority=0, duty=1.0, role=Role.TRAIN) -> None:
        specs = []
        for size in gangs:
            self.numbers += 1
            name = f"{job}.{self.numbers}"
            specs.append(
                GroupSpec(group=name, role=role, owner=job, gang_size=size, replicas=1, device_bytes=64, duty=duty)
            )
        self.admission.ask(now, Tenant(job=job, kind=kind, priority=priority), specs, self.rules)

    def ready(self, now=0) -> list[str]:
        """The jobs that go."""
        granted = self.admission.ready(now, self.rules)
        for tenant, specs, placements in granted:
            assert [p.group for p in placements] == [s.group for s in specs]
            assert all(self.floor.where(p.group) == p for p in placements) and self.floor.has(tenant.job)
        return [tenant.job for tenant, _, _ in granted]

    def end(self, job: str) -> None:
        groups = dict.fromkeys(p.group for gpu in self.floor.gpus for p in self.floor.on(gpu) if p.owner == job)
        for group in groups:
            self.floor.vacate(group)

    @property
    def queue(self) -> list[str]:
        return [waiting.job for waiting in self.admission.waiting]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_queue_is_by_class_then_priority_then_arrival(placement):
    desk = Desk(placement, 1)
    desk.ask("scavenger", 1, kind=JobClass.SCAVENGER, priority=9)
    desk.ask("late", 1, now=2)
    desk.ask("later", 1, now=3)
    desk.ask("urgent", 1, now=4, priority=1)
    desk.ask("interactive", 1, now=5, kind=JobClass.INTERACTIVE)
    order = ["interactive", "urgent", "late", "later", "scavenger"]
    assert desk.queue == order
    assert [w.since_us for w in desk.admission.waiting] == [5, 4, 2, 3, 0]
    gone = []
    for _ in order:
        gone += desk.ready(9)
        desk.end(gone[-1])
    assert gone == order


@pytest.mark.parametrize(
    ("placement", "goes"),
    [("isolated", []), ("pack", []), ("spread", []), ("spread_backfill", ["small"]), ("fit", ["small"])],
)
def test_only_backfill_lets_others_pass_the_first(placement, goes):
    desk = Desk(placement)
    desk.ask("one", 3)
    desk.ask("two", 3)  # two of them fill three GPUs to the bound of 2
    assert desk.ready() == (["one"] if placement == "isolated" else ["one", "two"])
    desk.ask("large", 4)
    assert desk.ready() == []
    desk.ask("small", 1)
    assert desk.ready() == goes
    desk.end("one"), desk.end("two"), desk.end("small")
    assert desk.ready()[:1] == ["two" if placement == "isolated" else "large"]


def test_nobody_passes_the_first_once_it_starves_and_it_goes_when_its_gpus_are_empty():
    desk = Desk("spread_backfill")
    desk.ask("one", 4)
    desk.ask("two", 2)
    desk.ready()
    desk.ask("large", 4, now=MINUTE)
    for minute in range(1, 8):  # one leaves and one comes, every minute
        desk.ask(f"small{minute}", 1, now=minute * MINUTE)
        desk.end(f"small{minute - 1}")
        assert desk.ready(minute * MINUTE) == ([f"small{minute}"] if minute < 6 else [])
    assert desk.queue == ["large", "small6", "small7"]
    words = [waiting.why for waiting in desk.admission.waiting]
    assert words[0].startswith("no room for its 1 worker groups (4 GPUs)")
    assert words[1] == words[2] == "job large has waited for so long that the GPUs are kept for it"
    desk.floor.tries = 0
    desk.floor.set_duty("two.2", 0.99)
    assert desk.ready(7 * MINUTE) == [] and desk.floor.tries == 1
    desk.end("two")
    assert desk.ready(8 * MINUTE) == ["large"]
    desk.end("one")
    assert desk.ready(9 * MINUTE) == ["small6", "small7"]


def test_a_starving_job_keeps_only_gpus_that_it_could_use():
    desk = Desk("spread_backfill", roles={"n0:0": GpuRole.TRAIN, "n0:1": GpuRole.TRAIN, "n0:2": GpuRole.SAMPLE})
    desk.ask("one", 3)
    desk.ask("two", 3, duty=0.6)
    assert desk.ready() == ["one", "two"]
    desk.ask("large", 3)
    desk.ask("sampler", 2, role=Role.SAMPLE, duty=0.3)  # there is room, but one GPU is kept
    desk.ask("small sampler", 1, role=Role.SAMPLE)
    assert desk.ready(10 * MINUTE) == ["small sampler"]
    assert [p.owner for p in desk.floor.on("n0:2")] == ["small sampler"]
    words = {waiting.job: waiting.why for waiting in desk.admission.waiting}
    assert words["sampler"] == "job large has waited for so long that the GPUs are kept for it"
    desk.floor.tries = 0
    desk.ask("another", 2, role=Role.SAMPLE, duty=0.3)
    assert desk.ready(10 * MINUTE) == [] and desk.floor.tries == 0
    desk.admission.withdraw("large")
    assert desk.ready(10 * MINUTE) == ["sampler"]


def test_those_behind_go_when_the_first_withdraws():
    desk = Desk("pack")
    desk.ask("one", 3)
    desk.ask("two", 3)
    assert desk.ready() == ["one", "two"]
    desk.ask("large", 4)
    desk.ask("small", 1)
    assert desk.ready() == []
    assert [w.why for w in desk.admission.waiting][1] == "behind job large, the first in the queue"
    desk.admission.withdraw("large")
    desk.admission.withdraw("large")
    assert desk.ready() == ["small"] and desk.queue == []


def test_all_groups_of_a_job_go_together():
    desk = Desk("isolated")
    desk.ask("one", 2)
    assert desk.ready() == ["one"]
    desk.ask("pair", 1, 3)
    assert desk.ready() == [] and not desk.floor.has("pair")
    desk.end("one")
    assert desk.ready() == ["pair"]


def test_what_can_never_fit_does_not_wait():
    desk = Desk("pack")
    with pytest.raises(DoesNotFit, match="needs 5 GPUs"):
        desk.ask("huge", 5)
    with pytest.raises(BadInput, match="asks for no worker group"):
        desk.ask("empty")
    assert desk.queue == [] and desk.ready() == []


def test_a_group_waits_once():
    desk = Desk("pack")
    desk.ask("one", 1)
    desk.numbers = 0
    for _ in range(2):
        with pytest.raises(BadInput, match=r"one\.1 of job one waits or is placed"):
            desk.ask("one", 1)
        desk.numbers = 0
        desk.ready()
    assert desk.queue == []


def test_several_requests_of_one_job_wait_side_by_side():
    desk = Desk("isolated", 2)
    desk.ask("other", 1)
    assert desk.ready() == ["other"]
    desk.ask("one", 1)
    desk.ask("stuck", 1)
    desk.ask("one", 1)
    # `stuck` asks for the same as `one` and finds no GPU; the second request of `one` finds the job's own.
    desk.rules = Rules("isolated")
    assert desk.ready() == ["one"] and desk.queue == ["stuck", "one"]
    desk.admission.withdraw("stuck")
    assert desk.ready() == ["one"]


@pytest.mark.parametrize("priorities", [(0, 0), (0, 1), (1, 0)])
def test_two_requests_of_one_job_may_go_at_one_look(priorities):
    desk = Desk("spread_backfill", 1)
    for priority in priorities:
        desk.ask("one", 1, priority=priority, duty=1 - 0.1 * priority)
    assert desk.ready() == ["one", "one"] and desk.queue == []


def test_a_jobs_own_gpus_are_found_though_others_that_ask_for_the_same_find_none():
    desk = Desk("spread_backfill", 1)
    desk.ask("other", 1)
    desk.ask("one", 1)
    assert desk.ready() == ["other", "one"]  # the GPU is full now
    desk.ask("stuck", 1)
    desk.ask("one", 1)
    assert desk.ready() == ["one"] and desk.queue == ["stuck"]


def test_nothing_is_tried_again_before_something_has_left():
    desk = Desk("spread_backfill")
    for i in range(2):
        desk.ask(f"full{i}", 4)
    assert len(desk.ready()) == 2
    for i in range(50):
        desk.ask(f"a{i}", 1)
        desk.ask(f"b{i}", 2)
    desk.floor.tries = 0
    assert desk.ready() == [] and desk.floor.tries == 2  # one for each kind of request
    desk.ask("a50", 1)
    assert desk.ready() == [] and desk.floor.tries == 2
    desk.end("full0")
    assert desk.ready() == ["a0", "b0", "a1"]
    assert desk.ready() == []


def test_one_look_ends_after_enough_misses_and_the_next_goes_on_where_it_ended():
    desk = Desk("spread_backfill")
    desk.ask("one", 4)
    desk.ask("two", 3, kind=JobClass.SCAVENGER)
    assert desk.ready() == ["one", "two"]
    for i in range(MISSES + 10):
        desk.ask(f"large{i}", 4, duty=0.01 * (100 - i))
    desk.ask("small", 1)
    assert desk.ready() == [] and len(desk.queue) == MISSES + 11
    desk.ask("next", 4, duty=0.2)
    assert desk.ready() == ["small"]


# --- whatever happens -------------------------------------------------------------------------------------------------

ASKS = st.tuples(
    st.just("ask"),
    st.integers(1, 4),
    st.sampled_from([0.3, 0.6, 1.0]),
    st.sampled_from(JobClass),
    st.integers(0, 1),
    st.sampled_from(Role),
)
STEPS = st.lists(
    st.one_of(
        ASKS, ASKS, st.tuples(st.just("end"), st.integers(0, 99)), st.tuples(st.just("withdraw"), st.integers(0, 99))
    ),
    max_size=40,
)


def plain(floor: Floor, queue: list, now: int, rules: Rules) -> list[str]:
    """The rules of the queue said again, trying everybody in turn."""
    granted, avoid, first = [], set(), None
    for entry in sorted(queue, key=lambda e: e[0]):
        _, since, spec, tenant = entry
        if floor.choose_all([spec], rules, tenant, avoid=avoid):
            granted.append(tenant.job)
            queue.remove(entry)
        elif rules.placement not in ("spread_backfill", "fit"):
            break
        elif first is None:
            first = entry
            if now - since >= rules.admission_patience_us:
                avoid = set(floor.usable(spec))
    return granted


@given(st.sampled_from(PLACEMENTS), st.dictionaries(st.integers(0, 3), st.sampled_from(GpuRole)), STEPS)
def test_the_queue_does_what_its_rules_say_and_everybody_goes_in_the_end(placement, roles, steps):
    desk = Desk(placement, roles={f"n0:{i}": role for i, role in roles.items()})
    floor, queue, placed = Floor(desk.floor.gpus, roles=desk.roles, virtual=True), [], []
    for now, (verb, *args) in enumerate(steps):
        now *= MINUTE
        if verb == "ask":
            size, duty, kind, priority, role = args
            tenant = Tenant(job=f"j{now}", kind=kind, priority=priority)
            try:
                desk.ask(tenant.job, size, now=now, kind=kind, priority=priority, duty=duty, role=role)
            except DoesNotFit:
                continue
            name = f"{tenant.job}.{desk.numbers}"
            spec = GroupSpec(
                group=name, role=role, owner=tenant.job, gang_size=size, replicas=1, device_bytes=64, duty=duty
            )
            queue.append(((list(JobClass).index(kind), -priority, now), now, spec, tenant))
        elif verb == "end" and placed:
            job = placed.pop(args[0] % len(placed))
            for group in {p.group: 0 for gpu in floor.gpus for p in floor.on(gpu) if p.owner == job}:
                floor.vacate(group)
            desk.end(job)
        elif verb == "withdraw" and queue:
            *_, tenant = queue.pop(args[0] % len(queue))
            desk.admission.withdraw(tenant.job)
        granted = desk.ready(now)
        assert granted == plain(floor, queue, now, desk.rules)
        assert [(gpu, desk.floor.on(gpu)) for gpu in floor.gpus] == [(gpu, floor.on(gpu)) for gpu in floor.gpus]
        assert desk.queue == [tenant.job for _, _, _, tenant in sorted(queue, key=lambda e: e[0])]
        placed += granted
    for job in placed:  # grows
        desk.end(job)
        placed += desk.ready(len(steps) * MINUTE)
    assert desk.queue == []
