"""plexrl.yaml read anew by a running head, budgets that end jobs, and checkpoints that have grown too old."""

import asyncio
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from plexrl.config import load
from plexrl.pool.admission import Standing
from plexrl.pool.book import Book
from plexrl.pool.governor import Governor, policies_of
from plexrl.pool.layout import Layout
from plexrl.pool.limits import OverLimit
from plexrl.pool.rules import scheduler_of, set_shares, tenant_of
from plexrl.pool.usage import HOUR_US, Usage
from plexrl.slurm.adapter import Association
from plexrl.types import CallKind, JobClass, Peer, Span, SpanClass, Unavailable, commands, records

BOB = Peer(uid=6, user="bob", account="ml", job="8.0")
NOW = 1_000 * HOUR_US


class Slurm:
    """Says what associations there are, or does not answer."""

    def __init__(self) -> None:
        self.found: tuple[Association, ...] | None = ()

    async def standing(self, usage: bool) -> Standing:
        if self.found is None:
            raise Unavailable("slurmctld does not answer")
        return Standing(self.found, {})


class Head:
    """What a governor needs of a head, with a real scheduler and a job of bob's."""

    def __init__(self, root: Path):
        self.file, self.root = root / "plexrl.yaml", root
        self.write()
        self.book, self.usage, self.slurm = Book(), Usage(), Slurm()
        self.ended: list[tuple[str, str]] = []
        self.deleted: list[str] = []
        self.now_us = NOW
        config = load(self.file)
        self.core = SimpleNamespace(
            config=config, book=self.book, layout=Layout(root / "state"), now_us=lambda: self.now_us,
            scheduler=scheduler_of(config, ["n:0"]),
        )  # fmt: skip
        self.core.layout.make()
        self.core.scheduler.start(NOW)
        turns = SimpleNamespace(perform=lambda actions: None, enroll=self.enroll)
        self.governor = Governor(self.core, self, turns, self.slurm, self.usage, str(self.file), self.end)
        attached = records.JobAttached(now_us=1, job=BOB.job, slurm_job=8, uid=6, user="bob", account="ml")
        self.book.apply(attached)
        self.enroll(attached)
        set_shares(config, self.core.scheduler, NOW)

    def write(self, text: str = "", engine: str = "noop") -> None:
        head = f"state_dir: {self.root}/state\nmodels:\n  m: {{path: {self.root}, engine: {engine}}}\n"
        self.file.write_text(head + text)

    def enroll(self, attached: records.JobAttached) -> None:
        self.core.scheduler.enroll(self.now_us, tenant_of(self.core.config, attached))

    async def end(self, job: str, why: str) -> None:
        self.ended.append((job, why))
        self.book.apply(records.JobEnded(now_us=self.now_us, job=job, reason=why))

    async def answer(self, peer: Peer, command: commands.Command) -> None:
        self.deleted.append(command.path)

    def reload(self) -> dict:
        """As after SIGHUP; what the pool then tells of its policies."""

        async def once() -> None:
            await self.governor._reload()
            self.governor._tell()

        asyncio.run(once())
        return json.loads(policies_of(self.core.layout.run).read_bytes())

    def use(self, hours: float) -> None:
        span = Span("n:0", NOW - round(hours * HOUR_US), NOW, SpanClass.BUSY, "g/0", ((BOB.job, 1),))
        self.usage.add(span, self.book)

    def mind(self) -> None:
        asyncio.run(self.governor._mind_budgets())


@pytest.fixture
def head(tmp_path) -> Head:
    return Head(tmp_path)


def test_what_changed_is_taken_up(head: Head):
    head.write(
        "shares: {ml: {shares: 3, users: {bob: 2}}, bio: {}}\ntenants: {ml: {class: scavenger}}\n"
        "limits: {models_per_job: 1}\nscheduler: {order: fair, quantum: 3s, half_life: 1d}\n"
    )
    told = head.reload()
    assert (told["refused"], told["order"], told["half_life_us"]) == ("", "fair", 86_400_000_000)
    scheduler = head.core.scheduler
    assert (scheduler.policy.quantum_us, scheduler.tenant(BOB.job).kind) == (3_000_000, JobClass.SCAVENGER)
    assert head.core.config.limits.models_per_job == 1
    (bob,) = told["users"]
    assert (bob["account"], bob["user"], bob["account_shares"], bob["shares"], bob["part"]) == ("ml", "bob", 3, 2, 0.75)
    head.write()
    head.reload()  # who is not named any more has 1 again
    scheduler.shares.charge(NOW, "bio", "ann", 1000)
    scheduler.shares.charge(NOW, "ml", "bob", 1000)
    assert scheduler.shares.level(NOW, "ml", "bob") == (1.0, 1.0)


@pytest.mark.parametrize(
    ("text", "engine", "told"),
    [
        ("limits: {models_per_job: 1}\ndevice: {bytes: 1GiB}\n", "noop", "device cannot change while the pool runs"),
        ("limits: {models_per_job: 1}\nshares: {ml: {share: 3}}\n", "noop", r":5: shares.ml.share: unknown key"),
        ("limits: {models_per_job: 1}\nshares_from: slurm\n", "noop", "slurmctld does not answer"),
        ("limits: {models_per_job: 1\n", "noop", "not YAML"),
    ],
)
def test_all_or_nothing(head: Head, text, engine, told):
    head.slurm.found = None
    before = head.core.config, head.core.scheduler.policy
    head.write(text, engine)
    found = head.reload()
    assert (head.core.config, head.core.scheduler.policy) == before
    with pytest.raises(AssertionError, match=told):
        raise AssertionError(found["refused"])
    head.write()
    assert head.reload()["refused"] == ""


def test_shares_of_slurm(head: Head):
    head.slurm.found = (
        Association(account="root", user="", parent="", shares=1, grp_tres_mins={}),
        *(Association(account=a, user="", parent="root", shares=s, grp_tres_mins={}) for a, s in (("ml", 3), ("b", 1))),
        *(Association(account=a, user="bob", parent="", shares=1, grp_tres_mins={}) for a in ("ml", "b")),
    )
    head.write("shares_from: slurm\n")
    told = {each["account"]: each["part"] for each in head.reload()["users"]}
    assert told == {"ml": 0.75, "b": 0.25}


def test_a_budget_that_ran_out_ends_the_job_after_its_grace(head: Head):
    head.write("budgets: {grace: 2m, accounts: {ml: {gpu_time: 1h}}}\n")
    head.reload()
    head.use(0.9)
    head.mind()
    forward = commands.Train(model="s:train:0", seq=1, kind=CallKind.FORWARD, body=b"", digest="")
    save = commands.Train(model="s:train:0", seq=2, kind=CallKind.SAVE_STATE, body=b"", digest="", name="last")
    head.governor.command(BOB, forward)
    head.use(0.2)
    head.mind()
    with pytest.raises(OverLimit, match=r"budget of account 'ml' is used up: budgets.accounts.ml allows 1.00 GPU"):
        head.governor.command(BOB, forward)
    head.governor.command(BOB, save)
    with pytest.raises(OverLimit, match="used up"):
        head.governor.hello(Peer(uid=7, user="ann", account="ml", job="9.0"))
    head.governor.hello(Peer(uid=7, user="ann", account="bio", job="9.0"))
    head.now_us += 119_000_000
    head.mind()
    assert head.ended == []
    head.now_us += 1_000_000
    head.mind()
    ((job, why),) = head.ended
    assert job == BOB.job and "1.10 were used of this pool" in why


def test_a_budget_that_grew_lets_the_job_go_on(head: Head):
    head.write("budgets: {grace: 0s, accounts: {ml: {gpu_time: 1h}}}\n")
    head.reload()
    head.use(2)
    head.mind()
    head.write("budgets: {grace: 0s, accounts: {ml: {gpu_time: 3h}}}\n")
    head.reload()
    head.mind()
    head.mind()
    assert head.ended == []
    head.governor.command(BOB, commands.Train(model="m", seq=1, kind=CallKind.FORWARD, body=b"", digest=""))


def test_checkpoints_that_are_too_old_go(head: Head):
    for name, age_s in (("new", 0), ("old", 7200)):
        folder = head.core.layout.checkpoint(6, "s:train:0", "weights", name)
        folder.mkdir(parents=True)
        os.utime(folder, (time.time() - age_s,) * 2)
    asyncio.run(head.governor._look())
    assert head.deleted == []  # no rule is about them
    head.write("policies: {users: {bob: {checkpoint_age: 1h}}, accounts: {bio: {checkpoint_age: 1s}}}\n")
    head.reload()
    asyncio.run(head.governor._look())
    assert head.deleted == ["tinker://s:train:0/weights/old"]
