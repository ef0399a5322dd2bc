"""Profiles: what groups showed is kept, is the first guess for the next, and tells how wrong the guess was."""

import logging
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from msgspec import structs

from plexrl.config import PoolConfig
from plexrl.pool.book import Book
from plexrl.pool.groups import Groups
from plexrl.pool.layout import Layout
from plexrl.pool.profiles import EVERYBODY, Profiles, read
from plexrl.pool.rules import scheduler_of
from plexrl.types import Call, CallKind, GroupSpec, Moved, Role, records

S = 1_000_000


class Pool:
    """A book and a scheduler in which one trainer works."""

    def __init__(self, root: Path, placement: str = "pack", device: str = "cpu"):
        models = {"none": {"path": str(root), "engine": "noop"}}
        self.config = PoolConfig.model_validate(
            {
                "state_dir": str(root / "state"),
                "models": models,
                "scheduler": {"placement": placement},
                "device": {"kind": device, "bytes": 8 << 30},
            }
        )
        self.layout = Layout(self.config.state_dir)
        self.layout.make()
        self.book = Book()
        self.book.apply(records.JobAttached(now_us=1, job="7.0", slurm_job=7, uid=5, user="ann", account="a"))
        self.scheduler = scheduler_of(self.config, ["n:0"])
        self.scheduler.start(0)
        self.core = SimpleNamespace(
            config=self.config, layout=self.layout, book=self.book, scheduler=self.scheduler, now_us=lambda: 1
        )
        self.profiles = Profiles(self.core)

    def place(self, kind: str = "full", group: str = "g") -> None:
        key = self.profiles.key("none", Role.TRAIN, kind, "7.0")
        spec = GroupSpec(
            group=group, role=Role.TRAIN, owner="7.0", gang_size=1, replicas=1, device_bytes=64,
            duty=self.profiles.duty(key),
        )  # fmt: skip
        placement = self.scheduler.place(0, spec)
        self.book.apply(
            records.GroupPlaced(now_us=1, spec=spec, placement=placement, base="none", kind=kind, model="m")
        )
        self.scheduler.tick(0)
        self.scheduler.built(0, f"{group}/0")

    def work(self, steps: int, busy_us: int, think_us: int, group: str = "g") -> None:
        now = self.scheduler.now
        for step in range(1, steps + 1):
            call = Call(id=f"{group}{step}", kind=CallKind.OPTIM_STEP, group=group, deployment="m", job="7.0", seq=step)
            self.scheduler.submit(now, call)
            now += busy_us
            self.scheduler.finished(now, call.id, 1)
            now += think_us


def test_what_was_seen_is_the_next_guess(tmp_path):
    first = Pool(tmp_path)
    assert list(first.profiles.live()) == []
    first.place()
    first.work(5, busy_us=1 * S, think_us=3 * S)
    ((name, key, seen),) = first.profiles.live()
    assert (name, key.user, key.kind) == ("g", "ann", "full")
    assert seen.duty == pytest.approx(5 / 17)  # five seconds of work, four gaps between
    assert seen.expected == 0.25 and seen.error == pytest.approx(5 / 17 - 0.25)
    assert seen.think_us == 3 * S and seen.steps == 5
    first.profiles.save()

    second = Pool(tmp_path)
    assert second.profiles.duty(key) == pytest.approx(5 / 17)
    second.place()
    assert second.scheduler.specs["g"].duty == pytest.approx(5 / 17)
    second.work(5, busy_us=2 * S, think_us=0)
    second.profiles.end("g")
    second.book.apply(records.GroupEnded(now_us=9, group="g", reason="over"))
    assert second.profiles.duty(key) == pytest.approx((5 / 17 + 1) / 2)  # both weigh the same
    second.profiles.save()
    (line,) = msgspec.json.decode((tmp_path / "state" / "profiles.json").read_bytes())["groups"]
    assert line["profile"]["steps"] == 10
    assert line["profile"]["expected"] == pytest.approx(5 / 17, abs=1e-6)


def test_an_old_profile_gives_way(tmp_path):
    pool = Pool(tmp_path)
    key = pool.profiles.key("none", Role.TRAIN, "full", "7.0")
    for turn in range(4):
        pool.place(group=f"g{turn}")
        pool.work(100, busy_us=1 * S, think_us=0 if turn else 9 * S, group=f"g{turn}")
        pool.profiles.end(f"g{turn}")
        pool.book.apply(records.GroupEnded(now_us=9, group=f"g{turn}", reason="over"))
    assert pool.profiles.duty(key) > 0.85


def test_whose_a_profile_is(tmp_path):
    assert Pool(tmp_path).profiles.key("none", Role.TRAIN, "lora", "7.0").user == EVERYBODY
    assert Pool(tmp_path).profiles.key("none", Role.TRAIN, "full", "7.0").user == "ann"
    assert Pool(tmp_path, "isolated").profiles.key("none", Role.SAMPLE, "lora", "7.0").user == "ann"


def test_a_group_that_did_nothing_leaves_nothing(tmp_path):
    pool = Pool(tmp_path)
    pool.place()
    pool.profiles.end("g")
    pool.profiles.save()
    assert not (tmp_path / "state" / "profiles.json").exists()


def test_a_spoilt_file_is_told_and_left_aside(tmp_path, caplog):
    (tmp_path / "state").mkdir(mode=0o700)
    (tmp_path / "state" / "profiles.json").write_text("[{]")
    with caplog.at_level(logging.ERROR):
        pool = Pool(tmp_path)
    assert "profiles.json" in caplog.text
    assert pool.profiles.duty(pool.profiles.key("none", Role.TRAIN, "full", "7.0")) is None


def test_links_outlive_a_pool_and_the_faster_node_is_taken_among_equals(tmp_path):
    first = Pool(tmp_path)
    for node, seconds in (("n", 0.4), ("m", 0.1)):
        first.scheduler.bandwidth.moved(node, Moved(bytes_in=1 << 30, seconds=seconds))
        first.scheduler.bandwidth.moved(node, Moved(bytes_out=1 << 30, seconds=seconds))
    first.profiles.save()
    assert links_kept(tmp_path)["m"]["gbps_in"] == pytest.approx(10.737, abs=0.01)

    second = Pool(tmp_path)
    scheduler = scheduler_of(second.config, ["n:0", "m:0"])
    second.profiles.teach(scheduler)
    spec = GroupSpec(group="g", role=Role.TRAIN, owner="7.0", gang_size=1, replicas=1, device_bytes=1 << 30)
    (gang,) = scheduler.place(0, spec).gangs
    assert gang.gpus == ("m:0",)
    assert scheduler.gangs["g/0"].switch.mean == pytest.approx(0.1 * S, rel=0.01)
    assert read(tmp_path / "state" / "profiles.json").links["n"].moves == 2


def links_kept(root: Path) -> dict:
    return msgspec.json.decode((root / "state" / "profiles.json").read_bytes())["links"]


def spawned(pool: Pool, spec: GroupSpec) -> dict[str, object]:
    """What the first rank of a group is told."""
    placement = pool.scheduler.place(0, spec)
    placed = records.GroupPlaced(now_us=1, spec=spec, placement=placement, base="none", kind="lora", model="m")
    pool.book.apply(placed)
    return Groups(pool.core, pool.profiles).gangs._spawn(placed, placement.gangs[0], 0, "b", "").engine


def test_what_processes_keep_of_a_real_gpu_is_promised_to_the_next(tmp_path):
    first = Pool(tmp_path, device="cuda")
    groups = Groups(first.core, first.profiles)
    spec = groups._spec("none", Role.TRAIN, "lora", "7.0", "g")
    assert spec.residual_bytes == 2 << 30 and spec.device_bytes == 64 + (2 << 30), "nothing was seen yet"
    assert spawned(first, spec)["extent_size"] == 64, "the engine's place does not grow by it"
    groups.gangs.keeps("g/0", 0)
    assert groups._spec("none", Role.TRAIN, "lora", "7.0", "h").residual_bytes == 2 << 30
    for seen in (400 << 20, 300 << 20):
        groups.gangs.keeps("g/0", seen)
    first.profiles.save()

    second = Pool(tmp_path, device="cuda")
    spec = Groups(second.core, second.profiles)._spec("none", Role.TRAIN, "lora", "7.0", "g")
    assert spec.residual_bytes == (400 + 100 + 256) << 20 and spec.device_bytes == 64 + spec.residual_bytes
    # 8 GiB have room for what ten of them keep asleep, whoever is there; of eleven one is ended at times.
    lighter, floor = structs.replace(spec, duty=0.01), second.scheduler.floor
    for number in range(11):
        assert not any(map(floor.crowded, floor.gpus))
        second.scheduler.place(0, structs.replace(lighter, group=f"g{number}"))
    assert any(map(floor.crowded, floor.gpus))


def test_on_pretend_gpus_nothing_is_promised_whatever_was_seen_on_real_ones(tmp_path):
    first = Pool(tmp_path, device="cuda")
    groups = Groups(first.core, first.profiles)
    spawned(first, groups._spec("none", Role.TRAIN, "lora", "7.0", "g"))
    groups.gangs.keeps("g/0", 400 << 20)
    first.profiles.save()
    second = Pool(tmp_path)
    spec = Groups(second.core, second.profiles)._spec("none", Role.TRAIN, "lora", "7.0", "g")
    assert (spec.residual_bytes, spec.device_bytes, spawned(second, spec)["extent_size"]) == (0, 64, 64)
