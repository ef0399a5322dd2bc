"""What the head makes of engine hosts' answers to a switch: scheduler and book are real, the answers are not."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from plexrl.pool.book import Book
from plexrl.pool.links import OrderFailed
from plexrl.pool.switches import Switches
from plexrl.scheduler import Action, Build, Policy, Prefetch, Scheduler, Switch
from plexrl.types import Call, CallKind, GroupSpec, Moved, Residency, Role, Unavailable, records

UNDONE = OrderFailed("the copy failed at byte 64", "undone")
DEAD = Unavailable("gang:a/0 has gone")
GONE = OrderFailed("it could not be undone", "server")
FULL = OrderFailed("400 bytes do not fit", "user")
DAMAGED = OrderFailed("chunk 3 is not what was written", "damaged")


class Hosts:
    """Engine hosts of gangs; `say` makes the next answers to a verb errors. told: what they were told, in order."""

    def __init__(self, book: Book):
        self._book = book
        self._say: dict[tuple[str, str], list[Exception]] = {}
        self.told: list[tuple[str, str]] = []
        self.killed: list[str] = []
        self.lives = {"a/0", "b/0"}
        self.residual = 0
        self.kept: dict[str, int] = {}
        self.underway = 0
        self.most = 0

    @property
    def hosts(self) -> set[str]:
        return self.lives

    async def end(self, gang: str) -> None:
        self.told.append((gang, "end"))
        self.disown(gang)

    def say(self, gang: str, verb: str, *errors: Exception) -> None:
        self._say.setdefault((gang, verb), []).extend(errors)

    def find(self, gang: str):
        group = self._book.groups[gang.rpartition("/")[0]]
        return group, group.placed.placement.gangs[0]

    async def order(self, gang: str, verb: str, args: dict, timeout: float = 0.0) -> dict:
        self.told.append((gang, verb))
        if gang not in self.lives:
            raise Unavailable(f"gang:{gang} is not connected")
        self.underway += 1
        self.most = max(self.most, self.underway)
        await asyncio.sleep(0.001)
        self.underway -= 1
        if errors := self._say.get((gang, verb)):
            raise errors.pop(0)
        moved = Moved(bytes_in=1 << 20, seconds=0.5) if verb == "load" else Moved(residual_bytes=self.residual)
        return {"moved": [{name: getattr(moved, name) for name in moved.__struct_fields__}]}

    async def build(self, gang: str) -> None:
        self.lives.add(gang)

    async def kill(self, gang: str) -> None:
        self.disown(gang)
        self.killed.append(gang)

    def keeps(self, gang: str, size: int) -> None:
        self.kept[gang] = size

    def disown(self, gang: str) -> bool:
        there = gang in self.lives
        self.lives.discard(gang)
        return there


class Tiers:
    """What is spilled comes back, unless `errors` say otherwise. left: what was said to have left, at each try."""

    def __init__(self) -> None:
        self.errors: list[Exception] = []
        self.left: list[tuple[bool, list[str]]] = []
        self.ended: list[str] = []

    async def engine_ends(self, gang: str) -> None:
        self.ended.append(gang)

    async def bring_gang(self, gang: str, patient: bool, left: list[str] = ()) -> None:
        self.left.append((patient, list(left)))
        if self.errors:
            raise self.errors.pop(0)


class Pool:
    """Two trainers on one GPU that holds one; a is resident, and b's call waits."""

    def __init__(self, lazy: bool = True, residual: int = 0):
        self.book = Book()
        self.scheduler = Scheduler({"n:0": 128}, Policy(anticipation_us=0, paranoid=True, lazy=lazy))
        self.core = SimpleNamespace(
            book=self.book,
            scheduler=self.scheduler,
            now_us=self._now,
            commit=self._commit,
            fail=None,
            faults=SimpleNamespace(take=lambda name: False),
        )
        self.hosts, self.tiers = Hosts(self.book), Tiers()
        self.lost: dict[str, str] = {}
        self.moves: list[records.Switched] = []
        self.actions: list[Action] = []
        self.switches = Switches(self.core, self.hosts, self.tiers, self.actions.extend)
        self.switches.on_lost = self.lost.__setitem__
        self.closed: list[str] = []
        self.switches.sleepers.close, self.switches.sleepers.take_out = self._note("close"), self._note("take out")
        self.switches.sleepers.closed = self.closed.append
        self._clock = 0
        for group in ("a", "b"):
            spec = GroupSpec(
                group=group,
                role=Role.TRAIN,
                owner=group,
                gang_size=1,
                replicas=1,
                device_bytes=128,
                residual_bytes=residual,
            )
            placement = self.scheduler.place(0, spec)
            self.book.apply(
                records.GroupPlaced(now_us=1, spec=spec, placement=placement, base="m", kind="full", model=group)
            )
            for action in self.scheduler.tick(0):
                if isinstance(action, Build):
                    for gang in action.end:
                        self.scheduler.unbuilt(0, gang)
                        self.book.apply(records.Unbuilt(now_us=1, gang=gang))
                        self.hosts.lives.discard(gang)
                    self.scheduler.built(0, action.gang, action.evict)
        # b was built last, and made a leave.
        self.switch = None if residual else self.ask("a")

    def _now(self) -> int:
        self._clock += 1000
        return self._clock

    def _commit(self, record: records.Record, durable: bool = True):
        if isinstance(record, records.Switched):
            self.moves.append(record)
            return None
        self.hosts.told.append((record.gang, "written"))
        self.book.apply(record)
        return asyncio.sleep(0)

    def _note(self, what: str):
        async def told(gang: str) -> None:
            self.hosts.told.append((gang, what))

        return told

    def ask(self, group: str) -> Switch | Build:
        call = Call(id=f"{group}:1", kind=CallKind.OPTIM_STEP, group=group, deployment=group, job=group, seq=1)
        (action,) = [x for x in self.scheduler.submit(self._now(), call) if isinstance(x, Switch | Build)]
        return action

    def carry_out(self, action: Action) -> list[Action]:
        """The scheduler's next orders to engine hosts."""
        self.actions.clear()
        asyncio.run((self.switches.build if isinstance(action, Build) else self.switches.switch)(action))
        return [x for x in self.actions if isinstance(x, Switch | Prefetch | Build)]

    def at(self, gang: str) -> Residency:
        return self.scheduler.gangs[gang].residency


@pytest.fixture
def pool() -> Pool:
    return Pool()


def test_both_are_told_at_once(pool):
    assert pool.switch == Switch("a/0", ("b/0",))
    assert pool.carry_out(pool.switch) == []
    assert sorted(pool.hosts.told) == [("a/0", "load"), ("b/0", "offload")] and pool.hosts.most == 2
    assert (pool.at("a/0"), pool.at("b/0")) == (Residency.DEVICE, Residency.HOST)
    assert [move.incoming for move in pool.moves if move.gang == "a/0"] == [True]
    assert pool.scheduler.bandwidth.links["n"].gbps_in > 0


@pytest.mark.parametrize("stays", [True, False], ids=["the-victim-too", "the-newcomer-alone"])
def test_an_undone_switch_is_told_again_and_loses_nobody(pool, stays):
    pool.hosts.say("a/0", "load", UNDONE)
    if stays:
        pool.hosts.say("b/0", "offload", UNDONE)
    (again,) = pool.carry_out(pool.switch)
    assert again.gang == "a/0" and again.evict == (("b/0",) if stays else ())
    assert pool.at("b/0") is (Residency.OFFLOADING if stays else Residency.HOST)
    assert pool.carry_out(again) == [] and not pool.lost and not pool.hosts.killed
    assert (pool.at("a/0"), pool.at("b/0")) == (Residency.DEVICE, Residency.HOST)


def test_after_three_in_a_row_the_gang_is_lost_and_the_figures_are_told(pool):
    pool.hosts.say("a/0", "load", *[UNDONE] * 3)
    (again,) = pool.carry_out(pool.switch)
    (again,) = pool.carry_out(again)
    assert pool.carry_out(again) == []
    assert list(pool.lost) == ["a/0"] and pool.hosts.killed == ["a/0"]
    assert "3 moves in a row" in pool.lost["a/0"] and pool.lost["a/0"].count("byte 64") == 3
    assert (pool.at("a/0"), pool.at("b/0")) == (Residency.LOST, Residency.HOST)


def test_three_in_a_row_not_three_in_all(pool):
    other = pool.switch
    for name in ("b", "a", "b", "a"):
        pool.hosts.say(other.gang, "load", UNDONE)
        (again,) = pool.carry_out(other)
        assert pool.carry_out(again) == []
        pool.scheduler.finished(pool._now(), f"{other.gang[0]}:1", 1)
        other = pool.ask(name)
    assert not pool.lost


def test_who_does_not_leave_is_to_blame_and_not_who_waits_for_it(pool):
    pool.hosts.say("a/0", "load", *[UNDONE] * 3)
    pool.hosts.say("b/0", "offload", *[UNDONE] * 3)
    action = pool.switch
    for _ in range(2):
        (action,) = pool.carry_out(action)
    # The third time the victim is lost and the newcomer, undone with it, is told again.
    (action,) = pool.carry_out(action)
    assert list(pool.lost) == ["b/0"] and "3 moves in a row" in pool.lost["b/0"]
    assert pool.carry_out(action) == []
    assert (pool.at("a/0"), pool.at("b/0")) == (Residency.DEVICE, Residency.LOST)


@pytest.mark.parametrize("error", [DEAD, GONE], ids=["dead", "half-way"])
def test_a_victim_that_is_lost_loses_itself_only(pool, error):
    pool.hosts.say("b/0", "offload", error)
    assert pool.carry_out(pool.switch) == []
    assert list(pool.lost) == ["b/0"] and pool.hosts.killed == ["b/0"]
    assert (pool.at("a/0"), pool.at("b/0")) == (Residency.DEVICE, Residency.LOST)


@pytest.mark.parametrize("error", [DEAD, GONE], ids=["dead", "half-way"])
def test_a_newcomer_that_is_lost_loses_itself_only(pool, error):
    pool.hosts.say("a/0", "load", error)
    assert pool.carry_out(pool.switch) == []
    assert list(pool.lost) == ["a/0"] and pool.hosts.killed == ["a/0"]
    assert (pool.at("a/0"), pool.at("b/0")) == (Residency.LOST, Residency.HOST)


def test_whose_rank_died_is_given_up_once(pool):
    """Its end was told before its order failed: another one gives it up, and perhaps has built it again already."""
    pool.hosts.lives.discard("b/0")
    assert pool.carry_out(pool.switch) == []
    assert not pool.lost and pool.at("a/0") is Residency.DEVICE


def test_who_keeps_more_than_was_promised_is_ended_asleep_and_lost_the_third_time_with_the_figures(pool):
    pool.hosts.residual = 4096
    action = pool.switch
    for _ in range(2):
        # b leaves for a, and its engine ends: what it left is adopted when it is wanted.
        assert pool.carry_out(action) == [] and not pool.lost
        assert pool.hosts.kept["b/0"] == 4096, "the next one of its kind is promised what it needs"
        assert (pool.at("a/0"), pool.at("b/0")) == (Residency.DEVICE, Residency.COLD)
        assert pool.book.groups["b"].unbuilt == {"b/0"} and pool.closed.pop() == pool.tiers.ended.pop() == "b/0"
        pool.scheduler.finished(pool._now(), "a:1", 1)
        pool.hosts.residual = 0  # a keeps its promise
        build = pool.ask("b")
        assert build == Build("b/0", ("a/0",))
        assert pool.carry_out(build) == [] and not pool.book.groups["b"].unbuilt
        pool.scheduler.finished(pool._now(), "b:1", 1)
        pool.hosts.residual = 4096
        action = pool.ask("a")
    assert pool.carry_out(action) == []
    assert list(pool.lost) == ["b/0"] and "4096 bytes of n:0" in pool.lost["b/0"]
    assert (pool.at("a/0"), pool.at("b/0")) == (Residency.DEVICE, Residency.LOST)


def test_a_sleeper_is_ended_after_what_it_did_is_written_and_before_the_newcomer_is_there():
    """a and b keep 100 of 128 bytes each: only one of them has an engine at a time."""
    pool = Pool(residual=100)
    build = pool.ask("a")
    assert build == Build("a/0", ("b/0",), ("b/0",))
    pool.hosts.residual = 100
    assert pool.carry_out(build) == []
    assert pool.hosts.told == [
        ("b/0", "offload"),
        ("b/0", "close"),
        ("b/0", "take out"),
        ("b/0", "written"),
        ("b/0", "end"),
        ("a/0", "written"),
    ]
    assert pool.tiers.left == [(False, []), (True, [])], "its state is in memory before, and adopted after"
    assert (pool.at("a/0"), pool.at("b/0")) == (Residency.DEVICE, Residency.COLD) and not pool.lost
    assert (pool.switches.sleepers.ended, pool.switches.sleepers.built) == (1, 1)


def test_an_engine_that_is_not_built_again_is_tried_three_times():
    pool = Pool(residual=100)
    failed: list[str] = []
    pool.switches.on_build_failed = lambda gang, why: failed.append(f"{gang}: {why}")

    async def build(gang: str) -> None:
        raise Unavailable("no room for its context")

    pool.hosts.build = build
    action = pool.ask("a")
    for _ in range(2):
        (action,) = pool.carry_out(action)
        assert action.gang == "a/0" and not failed and pool.scheduler.gangs["a/0"].unbuilt
    assert pool.carry_out(action) == []
    assert failed == ["a/0: no room for its context"] and pool.at("a/0") is Residency.LOST


def test_short_of_host_memory_the_victims_leave_first_and_may_be_spilled(pool):
    pool.tiers.errors = [FULL]
    assert pool.carry_out(pool.switch) == []
    assert pool.hosts.told == [("b/0", "offload"), ("a/0", "load")]
    assert pool.tiers.left == [(False, []), (False, ["b/0"])]
    assert (pool.at("a/0"), pool.at("b/0")) == (Residency.DEVICE, Residency.HOST)


def test_no_room_at_all_is_tried_patiently_and_then_told_with_the_figures(pool):
    pool.tiers.errors = [FULL] * 6
    action = pool.switch
    for _ in range(2):
        (action,) = pool.carry_out(action)
    assert pool.carry_out(action) == []
    assert [patient for patient, left in pool.tiers.left] == [False, False, False, True, False, True]
    assert list(pool.lost) == ["a/0"] and "400 bytes do not fit" in pool.lost["a/0"]
    assert pool.at("b/0") is Residency.HOST and ("a/0", "load") not in pool.hosts.told


def test_a_group_that_ended_by_what_was_damaged_is_not_loaded(pool):
    def end() -> None:
        pool.book.groups["a"].ended = "its state was damaged"

    async def bring(gang: str, patient: bool, left: Callable = ()) -> None:
        end()

    pool.tiers.bring_gang = bring
    pool.carry_out(pool.switch)
    assert ("a/0", "load") not in pool.hosts.told and "its state was damaged" in pool.lost["a/0"]


def test_a_build_waits_for_who_stays(pool):
    assert pool.carry_out(pool.switch) == []
    pool.scheduler.finished(pool._now(), "a:1", 1)
    spec = GroupSpec(group="c", role=Role.TRAIN, owner="c", gang_size=1, replicas=1, device_bytes=128)
    placement = pool.scheduler.place(pool._now(), spec)
    pool.book.apply(records.GroupPlaced(now_us=1, spec=spec, placement=placement, base="m", kind="full", model="c"))
    (build,) = [x for x in pool.scheduler.tick(pool._now()) if isinstance(x, Build)]
    pool.hosts.say("a/0", "offload", UNDONE)
    pool.actions.clear()
    asyncio.run(pool.switches.build(build))
    (again,) = [x for x in pool.actions if isinstance(x, Build)]
    assert again == build and pool.at("a/0") is Residency.OFFLOADING and "c/0" not in pool.hosts.lives
    asyncio.run(pool.switches.build(again))
    assert pool.at("c/0") is Residency.DEVICE and not pool.lost
