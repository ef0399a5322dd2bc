"""Deployments between host memory and NVMe: a real arena and tier, real book and scheduler; engine hosts are stand-ins
that hold what they were told, and look whether their bytes are still theirs."""

import asyncio
import mmap
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from plexrl.config import Device, Host, Model, Nvme, PoolConfig
from plexrl.engines import noop
from plexrl.memory.nvme import Damaged
from plexrl.pool import messages as m
from plexrl.pool.book import Book
from plexrl.pool.links import OrderFailed
from plexrl.pool.nodememory import NodeMemory
from plexrl.pool.slabs import Slabs
from plexrl.pool.states import States
from plexrl.pool.tiers import Tiers
from plexrl.scheduler import Policy, Scheduler
from plexrl.types import Call, CallKind, DoesNotFit, GroupSpec, PlexrlError, Residency, Role, Slab, records

STATE = 1 << 16
MIB = 1 << 20


class Pool:
    """Trainers that sleep on one node whose memory holds `fit` states; NVMe holds `below`."""

    def __init__(self, folder: Path, fit: int, below: int | None, names: str, lora: bool = False):
        models = {"none": Model(path=str(folder), engine="noop")}
        nvme = None if below is None else Nvme(path=str(folder / "nvme"), bytes=below * (STATE + 8192) + 4096)
        self.config = PoolConfig(
            state_dir=str(folder / "state"),
            models=models,
            device=Device(bytes=MIB),
            host=Host(bytes=fit * STATE),
            nvme=nvme,
        )
        self.node = NodeMemory(self.config, "n", 1)
        self.arena = mmap.mmap(self.node.arena_fd, self.config.host.bytes)
        self.book = Book()
        self.scheduler = Scheduler({"n:0": MIB}, Policy())
        self.scheduler.start(0)
        self.slabs: dict[str, Slab | None] = {}  # what engine hosts know
        self.marks: dict[str, bytes] = {}
        self.stuck: set[str] = set()
        self.told: list[tuple[str, str]] = []
        self.damaged: list[str] = []
        core = SimpleNamespace(
            config=self.config,
            book=self.book,
            scheduler=self.scheduler,
            links=SimpleNamespace(order=self._agent),
            now_us=lambda: self.scheduler.now + 1,
        )
        self.hosts: dict[str, object] = {}
        gangs = SimpleNamespace(hosts=self.hosts, order=self._host, let_go=self._host, find=self._find)
        slabs = Slabs(core)
        self.states = States(core, gangs, slabs)
        self.tiers = Tiers(core, gangs, slabs, self.states)
        self.tiers.patience_s = 0.0
        self.tiers.on_damaged = self._on_damaged
        self.book.apply(records.JobAttached(now_us=1, job="7.0", slurm_job=7, uid=5, user="ann", account="a"))
        for name in names:
            self._place("all" if lora else name, name, lora)

    def _place(self, group: str, model: str, lora: bool) -> None:
        if group not in self.book.groups:
            spec = GroupSpec(group=group, role=Role.TRAIN, owner="7.0", gang_size=1, replicas=1, device_bytes=64)
            placement = self.scheduler.place(0, spec)
            self.book.apply(
                records.GroupPlaced(
                    now_us=1, spec=spec, placement=placement, base="none", kind="lora" if lora else "full", model=group
                )
            )
            self.scheduler.gangs[f"{group}/0"].residency = Residency.HOST
            self.hosts[f"{group}/0"] = True
        self.book.apply(
            records.ModelCreated(
                now_us=1, model=model, session="s", job="7.0", uid=5, account="a", base="none",
                lora_rank=8 if lora else None, seed=0, attn=True, mlp=True, unembed=True, group=group,
            )
        )  # fmt: skip

    def _find(self, gang: str):
        group = self.book.groups[gang.rpartition("/")[0]]
        return group, group.placed.placement.gangs[0]

    async def _agent(self, name: str, message: m.Message, timeout: float = 0.0) -> dict:
        try:
            return await self.node.do(message)
        except PlexrlError as error:
            kinds = {DoesNotFit: "user", Damaged: "damaged"}
            raise OrderFailed(str(error), kinds.get(type(error), "server")) from error

    async def _host(self, gang: str, verb: str, args: dict, timeout: float = 0.0) -> dict:
        name = args["deployment"]
        self.told.append((name, verb))
        await asyncio.sleep(0)
        if name in self.stuck:
            raise OrderFailed(f"{name} is on its device", "user")
        if verb == "drop":
            self.slabs[name] = None
            return {}
        if verb == "spill":
            assert self.bytes_of(name) == self.marks[name]
            self.slabs[name] = None
            return {"moved": []}
        (slab,) = args["slabs"]
        if verb == "create" and args["folder"]:
            self.arena[slab.offset : slab.offset + slab.size] = Path(args["folder"]).read_bytes()
        whole = self.arena[slab.offset : slab.offset + slab.size] == self.marks[name]
        if verb == "create" and not whole:
            raise OrderFailed("the state in the slab is not whole", "server")
        assert whole, f"{name} came back as something else"
        self.slabs[name] = slab
        return {"moved": []}

    async def _on_damaged(self, model, why: str) -> None:
        self.damaged.append(model.id)
        await self.states.free(model)
        self.tiers.forget(model)
        model.ended = why

    def bytes_of(self, name: str) -> bytes:
        slab = self.slabs[name]
        return self.arena[slab.offset : slab.offset + slab.size]

    async def create(self, name: str, seed: int = 0) -> None:
        """As `States.create` does, and fill it with bytes of its own."""
        slab = self.slabs[name] = await self.states.slab(self.book.models[name], 0)
        self.marks[name] = random.Random(f"{name}{seed}").randbytes(slab.size)
        self.arena[slab.offset : slab.offset + slab.size] = self.marks[name]
        self.book.apply(records.CallEnded(now_us=1, id=f"{name}:0", ok=True))

    async def bring(self, name: str, patient: bool = False) -> None:
        await self.tiers.bring(self.book.models[name], patient)

    def where(self) -> tuple[set[str], set[str]]:
        """Deployments in memory and on NVMe, by the agent's own account."""
        here, there = self.node.names()
        return {name.split(":")[1] for name in here}, {name.split(":")[1] for name in there}

    def open_call(self, name: str) -> None:
        call = Call(id=f"{name}:1", kind=CallKind.OPTIM_STEP, group=name, deployment=name, job="7.0", seq=1)
        self.book.apply(records.CallAccepted(now_us=2, call=call, uid=5, digest="", work={}, body=b""))


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Make pools, whose files go with the test. Their deployments have states of pages, as real ones have."""
    monkeypatch.setattr(noop, "BYTES", STATE)
    made: list[Pool] = []

    def make(fit: int, below: int | None, names: str, lora: bool = False) -> Pool:
        made.append(Pool(tmp_path, fit, below, names, lora))
        return made[-1]

    yield make
    for each in made:
        each.arena.close()
        each.node.close()


def go(body: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await body()

    asyncio.run(bounded())


def test_the_least_wanted_leave_and_come_back_with_their_bytes(pool):
    p = pool(2, 4, "abcd")

    async def body() -> None:
        for name in "abcd":
            await p.create(name)
            p.tiers.used(name)
            p.scheduler.now += 10
        assert p.where() == ({"c", "d"}, {"a", "b"})
        assert p.scheduler.gangs["a/0"].switch.refill_us > 0 == p.scheduler.gangs["c/0"].switch.refill_us
        assert p.tiers.report()["n"]["spilled"] == {"a": STATE, "b": STATE}
        p.open_call("c")  # who waits goes last
        await p.bring("a")
        assert p.where() == ({"a", "c"}, {"b", "d"})
        assert p.scheduler.gangs["a/0"].switch.refill_us == 0 < p.scheduler.gangs["a/0"].switch.spent_us
        await p.bring("a")
        assert p.told.count(("a", "rehome")) == 1

    go(body)


def damage(*paths: Path) -> None:
    """Change the last byte of each file."""
    for path in paths:
        with path.open("r+b") as file:
            file.seek(-1, 2)
            last = file.read(1)[0]
            file.seek(-1, 2)
            file.write(bytes([255 - last]))


def spilled(folder: Path) -> list[Path]:
    return [path for path in (folder / "nvme").rglob("*") if path.is_file() and path.stat().st_size > STATE]


def test_without_a_tier_what_does_not_fit_is_said(pool):
    p = pool(1, None, "ab")

    async def body() -> None:
        await p.create("a")
        with pytest.raises(OrderFailed, match="free") as refused:
            await p.create("b")
        assert refused.value.category == "user" and not p.told

    go(body)


def test_nobody_is_spilled_who_is_on_a_device_or_refuses(pool):
    p = pool(2, 4, "abc")

    async def body() -> None:
        await p.create("a")
        await p.create("b")
        p.scheduler.gangs["a/0"].residency = Residency.DEVICE
        p.stuck.add("b")
        with pytest.raises(OrderFailed):
            await p.create("c")
        assert p.told == [("b", "spill")] and p.where() == ({"a", "b"}, set())
        # A victim of the switch under way has left, although the scheduler does not know yet.
        p.scheduler.gangs["a/0"].residency = Residency.OFFLOADING
        assert await p.tiers.make_room("n", ["a/0"])
        assert p.where() == ({"b"}, {"a"})

    go(body)


def test_who_needs_room_waits_for_switches_under_way(pool):
    p = pool(1, 4, "ab")
    p.tiers.patience_s = 30.0

    async def body() -> None:
        await p.create("a")
        state = p.scheduler.gangs["a/0"]
        state.residency = Residency.OFFLOADING
        creating = asyncio.create_task(p.create("b"))
        done, _ = await asyncio.wait([creating], timeout=0.3)
        assert not done and p.where() == ({"a"}, set())
        state.residency = Residency.HOST
        await creating
        assert p.where() == ({"b"}, {"a"})

    go(body)


def test_no_room_below_either_leaves_it_whole(pool):
    p = pool(1, 1, "abc")

    async def body() -> None:
        await p.create("a")
        await p.create("b")
        with pytest.raises(OrderFailed):
            await p.create("c")
        assert p.where() == ({"b"}, {"a"}) and p.slabs["b"] is None
        await p.bring("b")
        assert p.bytes_of("b") == p.marks["b"]

    go(body)


def test_what_is_damaged_is_named_and_alone_is_lost(pool, tmp_path):
    p = pool(1, 3, "abc")

    async def body() -> None:
        for name in "abc":
            await p.create(name)
        assert p.where() == ({"c"}, {"a", "b"})
        # Their names tell not whose they are: whichever it is.
        damage(spilled(tmp_path)[0])
        for name in "ab":
            await p.bring(name)
        assert len(p.damaged) == 1 and "is damaged" in p.book.models[p.damaged[0]].ended
        (whole,) = {"a", "b"} - set(p.damaged)
        await p.bring(whole)
        assert p.bytes_of(whole) == p.marks[whole]
        await p.bring("c")
        assert p.where() == ({"c"}, {whole})

    go(body)


@pytest.mark.parametrize("readable", [True, False])
def test_what_is_damaged_goes_on_from_a_checkpoint_that_is_the_same(pool, tmp_path, readable):
    p = pool(1, 3, "ab")

    async def body() -> None:
        for name in "ab":
            await p.create(name)
        damage(*spilled(tmp_path))
        saved = tmp_path / "saved"
        saved.write_bytes(p.marks["a"] if readable else bytes(STATE))
        p.tiers.checkpoint_of = lambda model: str(saved)
        await p.bring("a")
        assert p.where()[0] == ({"a"} if readable else set()) and p.tiers.restored == readable
        if readable:
            assert not p.damaged and p.bytes_of("a") == p.marks["a"]
            assert p.told[-2:] == [("a", "drop"), ("a", "create")]
        else:
            assert p.damaged == ["a"] and "its checkpoint was not read" in p.book.models["a"].ended

    go(body)


def test_what_an_engine_that_was_ended_left_is_adopted_wherever_it_is(pool):
    p = pool(1, 4, "ab")

    async def body() -> None:
        await p.create("a")
        await p.tiers.engine_ends("a/0")
        p.hosts.clear()  # no engine is there
        p.slabs["a"] = None
        state = p.scheduler.gangs["a/0"]
        state.residency, state.unbuilt = Residency.COLD, True
        await p.create("b")
        assert p.where() == ({"b"}, {"a"}) and p.told == [], "nobody need be asked"
        p.hosts["b/0"] = True
        await p.bring("a")
        assert p.where() == ({"a"}, {"b"}) and p.slabs["a"] is None, "in memory, and waits for its engine"
        p.hosts["a/0"] = True
        await p.bring("a")
        assert p.told[-1] == ("a", "create") and p.bytes_of("a") == p.marks["a"]
        await p.bring("a")
        assert p.told.count(("a", "create")) == 1
        # Not whole: some of it was on the device.
        await p.tiers.engine_ends("a/0")
        p.arena[p.slabs["a"].offset] ^= 1
        await p.bring("a")
        assert p.damaged == ["a"] and "not whole" in p.book.models["a"].ended

    go(body)


def test_a_new_head_finds_what_the_last_one_had_spilled_and_what_it_had_begun_to(pool):
    p = pool(2, 4, "abc")

    async def body() -> None:
        for name in "abc":
            await p.create(name)
        (away,) = p.where()[1]
        sleeps, resident = sorted({"a", "b", "c"} - {away})
        p.slabs[sleeps] = None  # its engine host had let go; its agent was never told
        p.stuck.add(resident)  # on its device, where it is refused
        fresh = Tiers(p.states._core, p.states._gangs, p.states._slabs, p.states)
        fresh.patience_s, fresh.on_damaged, p.tiers = 0.0, p._on_damaged, fresh
        fresh.met("n", p.node.names()[1])
        for name in "abc":
            fresh.unsure(f"{name}/0")
        await p.bring(resident)
        await p.bring(sleeps)
        assert p.bytes_of(sleeps) == p.marks[sleeps]
        await p.bring(away)
        assert p.bytes_of(away) == p.marks[away]

    go(body)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "adapters-of-one-gang"])
@pytest.mark.parametrize("seed", range(4))
def test_all_at_once_every_deployment_is_whole_in_one_place(pool, seed, lora):
    """Refills that run side by side make room for each other, and none of them ever sees another's bytes."""
    p, draw = pool(3, 8, "abcdef", lora), random.Random(seed)

    async def body() -> None:
        for name in "abcdef":
            await p.create(name)
        for _ in range(12):
            names = draw.sample("abcdef", 3)
            await asyncio.gather(*(p.bring(name, patient=True) for name in names), return_exceptions=True)
            here, there = p.where()
            assert here | there == set("abcdef") and not here & there and len(here) <= 3
            for name in here - {n for n in here if p.slabs[n] is None}:
                assert p.bytes_of(name) == p.marks[name]
        for name in "abcdef":
            await p.bring(name)
            assert p.bytes_of(name) == p.marks[name]

    go(body)
