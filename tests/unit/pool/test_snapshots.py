"""Versions on the nodes: real arenas, tiers, book and samplers' hosts; only the engines behind those draw nothing."""

import asyncio
import json
import math
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from plexrl.config import Device, Host, Limits, Model, Nvme, PoolConfig
from plexrl.engines import layout, noop
from plexrl.memory.arena import ArenaMap
from plexrl.pool import messages as m
from plexrl.pool.book import Book
from plexrl.pool.layout import Layout
from plexrl.pool.links import OrderFailed
from plexrl.pool.nodememory import NodeMemory
from plexrl.pool.samplehost import SampleHost
from plexrl.pool.slabs import Slabs
from plexrl.pool.snapshots import Snapshots
from plexrl.types import BadInput, Call, CallKind, Gang, GroupSpec, Placement, PlexrlError, Role, records

MODEL = "s:train:0"
HERE, THERE = "full.sample/0", "full.sample/1"


class Sampler(noop.NoopSampler):
    """Looks, when it forgets a version, whether somebody has called it busy."""

    busy = False

    def detach(self, version: str) -> None:
        if self.busy:
            raise BadInput(f"version {version!r} is in use")


class Pool:
    """A trainer on node n, samplers on n and o. kept, below: versions in memory, and on NVMe (None: no NVMe)."""

    def __init__(self, folder: Path, model: Path, kept: int = 2, below: int | None = None):
        self.specs = layout.base_specs(layout.architecture(str(model)), "float32")
        size = layout.packed(self.specs)
        nvme = None if below is None else Nvme(path=str(folder / "nvme"), bytes=64 << 20)
        self.config = PoolConfig(
            state_dir=str(folder / "state"),
            models={"tiny": Model(path=str(model), engine="torch")},
            device=Device(bytes=1 << 20),
            host=Host(bytes=8 * (-(-size // 4096) * 4096)),
            nvme=nvme,
            limits=Limits(versions_per_model=kept, versions_on_nvme=below or 1),
        )
        self.memory = {node: NodeMemory(self.config, node, 0) for node in "no"}
        self.maps = {n: ArenaMap(memory.arena_fd, self.config.host.bytes) for n, memory in self.memory.items()}
        self.engines = {HERE: Sampler(), THERE: Sampler()}
        self.hosts = {g: SampleHost(self.engines[g], n, self.maps[n]) for g, n in ((HERE, "n"), (THERE, "o"))}
        self.attached: dict[str, set[str]] = {}
        self.book = Book()
        self.core = SimpleNamespace(
            config=self.config,
            book=self.book,
            layout=Layout(folder / "state"),
            links=SimpleNamespace(order=self._agent),
            commit=self.book.apply,
            now_us=lambda: 1,
        )
        slabs = Slabs(self.core)
        slabs.room = SimpleNamespace(patience_s=0.0, make_room=self._no_room)
        self.snapshots = Snapshots(self.core, self, slabs)
        for record in self._begun():
            self.book.apply(record)
        self.model = self.book.models[MODEL]

    def _begun(self) -> list[records.Record]:
        gangs = {
            Role.TRAIN: (Gang("full.train/0", "full.train", ("n:0",), ()),),
            Role.SAMPLE: (Gang(HERE, "full.sample", ("n:0",), ()), Gang(THERE, "full.sample", ("o:0",), ())),
        }
        placed = [
            records.GroupPlaced(
                now_us=1,
                spec=GroupSpec(
                    group=f"full.{role}",
                    role=role,
                    owner="1.0",
                    gang_size=1,
                    replicas=len(gangs[role]),
                    device_bytes=64,
                ),
                placement=Placement(f"full.{role}", gangs[role]),
                base="tiny",
                kind="full",
                model=MODEL,
            )
            for role in Role
        ]
        who = {"job": "1.0", "uid": os.getuid(), "account": "a"}
        made = {"base": "tiny", "lora_rank": None, "seed": 1, "attn": True, "mlp": True, "unembed": True}
        return [
            records.JobAttached(now_us=1, slurm_job=1, user="u", **who),
            records.SessionOpened(now_us=1, session="s", key="k", **who),
            records.SessionOpened(now_us=1, session="t", key="l", **who),
            *placed,
            records.ModelCreated(now_us=1, model=MODEL, session="s", group="full.train", **made, **who),
        ]

    # -- what Gangs does -----------------------------------------------------------------------------------------------

    def find(self, gang_id: str):
        group = self.book.groups[gang_id.rpartition("/")[0]]
        return group, next(gang for gang in group.placed.placement.gangs if gang.id == gang_id)

    async def order(self, gang_id: str, verb: str, args: dict) -> dict:
        args = m.decode(m.encode(m.Order(id=0, verb=verb, args=args))).args
        try:
            return self.hosts[gang_id].order(verb, args)
        except PlexrlError as error:
            raise OrderFailed(str(error), getattr(error, "category", "user")) from error

    async def _agent(self, name: str, message: m.Message, timeout: float = 0) -> dict:
        try:
            return await self.memory[name.removeprefix("agent:")].do(message)
        except PlexrlError as error:
            raise OrderFailed(str(error), "user" if error.exit_code == 3 else "server") from error

    async def _no_room(self, node: str, left: object) -> bool:
        return False

    # -- what trainers and jobs do -------------------------------------------------------------------------------------

    async def publish(self, name: str, named: bool = False, session: str = "s") -> str:
        """A version of random weights that a sampling session reads; its path."""
        version = f"tinker://{MODEL}/sampler_weights/{name}"
        slab = (await self.snapshots.make(self.model, version))["n"]
        tensors = {spec: torch.randn(shape) for spec, shape, _ in self.specs}
        content, at = torch.zeros(slab.size, dtype=torch.uint8), 0
        for spec, shape, _ in self.specs:
            size = 4 * math.prod(shape)
            content[at : at + size] = tensors[spec].reshape(-1).view(torch.uint8)
            at += layout.align(size)
        self.maps["n"].store(slab, content)
        folder = self.core.layout.checkpoint(os.getuid(), MODEL, "sampler_weights", name) if named else ""
        if folder:
            folder.mkdir(parents=True)
            save_file(tensors, folder / "model.safetensors")
        self.book.apply(
            records.VersionPublished(
                now_us=1,
                version=version,
                model=MODEL,
                job="1.0",
                uid=os.getuid(),
                account="a",
                base="tiny",
                lora_rank=None,
                attn=True,
                mlp=True,
                unembed=True,
                size=slab.size,
                nodes=("n",),
                folder=str(folder),
                checksum=self.maps["n"].checksum(slab, version),
                ephemeral=not named,
            )
        )
        if session:
            opened = {"sampler": f"{session}:{name}", "session": session, "job": "1.0", "uid": 5, "base": "tiny"}
            self.book.apply(records.SamplerOpened(now_us=1, version=version, **opened))
        await self.snapshots.settle_model(self.model)
        return version

    def kept(self) -> list[str]:
        """Of each version in order."""
        return [self.snapshots.kept(self.book.versions[name]) for name in self.model.versions]

    async def attach(self, version: str, gang: str = HERE) -> None:
        await self.snapshots.attach(gang, self.book.versions[version])

    def slabs(self, node: str = "n") -> int:
        """How many versions are in a node's arena."""
        return sum(name.startswith("version:") for name in self.memory[node].names()[0])

    def damage(self, version: str) -> None:
        """One bit of a version in memory."""
        slab = self.memory["n"].arena.get(f"version:{version}")
        with self.memory["n"].arena.bytes_of(slab) as memory:
            memory[slab.size // 2] ^= 1


@pytest.fixture
def pool(tmp_path: Path, tiny_model: Path):
    """settings -> a pool; its files go with the test."""
    made: list[Pool] = []

    def make(**settings: int | None) -> Pool:
        made.append(Pool(tmp_path, tiny_model, **settings))
        return made[-1]

    yield make
    for one in made:
        for memory in one.memory.values():
            memory.close()


def test_what_is_older_and_read_goes_to_nvme_and_comes_back_bit_for_bit(pool):
    async def main() -> None:
        pools = pool(below=1)
        first = await pools.publish("a")
        await pools.attach(first)
        for name in "bc":
            await pools.publish(name)
        assert pools.kept() == ["nvme", "memory", "memory"] and pools.slabs() == 2
        await pools.attach(first)  # its checksum is compared
        assert pools.kept() == ["memory"] * 3 and first in pools.hosts[HERE].versions
        await pools.snapshots.settle_all()
        assert pools.kept() == ["nvme", "memory", "memory"] and not pools.hosts[HERE].versions
        await pools.publish("d")
        assert pools.kept() == ["", "nvme", "memory", "memory"], "one of a model at most, the newest"

    asyncio.run(main())


def test_what_nobody_reads_is_dropped(pool):
    async def main() -> None:
        pools = pool(below=4)
        await pools.publish("a", session="t")
        await pools.publish("b", named=True, session="")
        for name in "cd":
            await pools.publish(name)
        assert pools.kept() == ["nvme", "disk", "memory", "memory"]
        pools.book.apply(records.SessionEnded(now_us=1, session="t", reason="over"))
        await pools.snapshots.settle_all()
        assert pools.kept() == ["", "disk", "memory", "memory"]

    asyncio.run(main())


def test_versions_of_an_ended_model_stay_as_long_as_they_are_read(pool):
    async def main() -> None:
        pools = pool()
        await pools.publish("a")
        await pools.publish("b", session="t")
        pools.book.apply(records.SessionEnded(now_us=1, session="s", reason="over"))
        pools.book.apply(records.ModelEnded(now_us=1, model=MODEL, reason="over"))
        await pools.snapshots.settle_all()
        assert pools.kept() == ["", "memory"] and pools.slabs() == 1
        pools.book.apply(records.SessionEnded(now_us=1, session="t", reason="over"))
        await pools.snapshots.settle_all()
        assert pools.kept() == ["", ""] and pools.slabs() == 0

    asyncio.run(main())


def test_a_version_with_a_folder_is_read_back_on_any_node(pool):
    async def main() -> None:
        pools = pool(kept=1)
        old = await pools.publish("a", named=True)
        await pools.publish("b")
        assert pools.kept() == ["disk", "memory"]
        for gang in (HERE, THERE):
            await pools.attach(old, gang)
            assert old in pools.hosts[gang].versions
        assert pools.book.versions[old].nodes == ("n", "o")
        await pools.snapshots.settle_all()
        assert pools.kept() == ["disk", "memory"] and pools.slabs("o") == 0
        with pytest.raises(PlexrlError, match="is not on o and has no name"):
            await pools.attach(pools.model.versions[1], THERE)

    asyncio.run(main())


def test_a_file_that_was_cut_or_is_of_another_model_is_refused(pool):
    async def main() -> None:
        pools = pool(kept=1)
        old = await pools.publish("a", named=True)
        await pools.publish("b")
        file = Path(pools.book.versions[old].published.folder) / "model.safetensors"
        whole = file.read_bytes()
        for content, why in ((whole[:-8], "ends too early"), (b"\x02" + b"\0" * 7 + b"{}", "has no ")):
            file.write_bytes(content)
            with pytest.raises(PlexrlError, match=why):
                await pools.attach(old)
            assert pools.slabs() == 1
        # Whole, and of other bytes than those that were published.
        file.write_bytes(whole[:-4] + bytes(4))
        with pytest.raises(PlexrlError, match="is damaged"):
            await pools.attach(old)
        assert not pools.hosts[HERE].versions

    asyncio.run(main())


def test_a_damaged_version_is_never_drawn_from(pool):
    async def main() -> None:
        pools = pool()
        lost, mended = await pools.publish("a"), await pools.publish("b", named=True)
        for version in (lost, mended):
            pools.damage(version)
        with pytest.raises(PlexrlError, match=r"is damaged in the memory of n: expected xxh3:\w+, found xxh3:\w+"):
            await pools.attach(lost)
        assert pools.kept() == ["", "memory"] and not pools.hosts[HERE].versions
        await pools.attach(mended)
        assert pools.hosts[HERE].versions == {mended} and pools.slabs() == 1

    asyncio.run(main())


def test_what_a_sampler_will_not_let_go_of_stays_in_memory(pool):
    async def main() -> None:
        pools = pool(kept=1)
        first = await pools.publish("a")
        await pools.attach(first)
        pools.engines[HERE].busy = True
        await pools.publish("b")
        assert pools.kept() == ["memory", "memory"] and pools.slabs() == 2
        pools.engines[HERE].busy = False
        await pools.snapshots.settle_all()
        assert pools.kept() == ["", "memory"] and pools.slabs() == 1

    asyncio.run(main())


def test_what_a_call_samples_from_stays(pool):
    async def main() -> None:
        pools = pool(kept=1)
        first = await pools.publish("a")
        call = Call(id="c", kind=CallKind.SAMPLE, group="full.sample", deployment=first, job="1.0")
        pools.book.apply(records.CallAccepted(now_us=1, call=call, uid=5, digest="", work={}, body=b""))
        await pools.publish("b")
        assert pools.kept() == ["memory", "memory"]
        pools.book.apply(records.CallEnded(now_us=1, id="c", ok=True))
        await pools.snapshots.settle_all()
        assert pools.kept() == ["", "memory"]

    asyncio.run(main())


def test_where_there_is_no_room_older_ones_leave_before_the_publication(pool, monkeypatch):
    async def main() -> None:
        pools = pool()
        for number in range(2):
            await pools.publish(str(number))
        taken = pools.memory["n"].arena.free_bytes() - 4096
        await pools.memory["n"].alloc("other", taken, -1)
        await pools.publish("2")
        assert pools.kept() == ["", "memory", "memory"]

    asyncio.run(main())


def test_a_version_without_a_name_gets_a_folder_for_samplers_elsewhere(pool):
    pools = pool()
    folder = pools.snapshots.folder(pools.model, f"tinker://{MODEL}/sampler_weights/e3")
    assert folder.endswith("/passing/e3") and "sampler_weights" not in folder
    pools.book.groups["full.sample"].ended = "over"
    assert pools.snapshots.folder(pools.model, f"tinker://{MODEL}/sampler_weights/e3") == ""


def test_how_far_behind_a_version_is(pool):
    async def main() -> None:
        pools = pool()
        first, second, third = [await pools.publish(name) for name in "abc"]
        assert [pools.book.behind(v) for v in (first, second, third)] == [(2, third), (1, third), (0, third)]
        assert json.dumps(sorted(pools.book.versions[third].readers)) == '["s"]'

    asyncio.run(main())
