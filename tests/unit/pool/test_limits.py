"""What policies and budgets refuse, by what a pool's book and ledger know."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec import structs

from plexrl.config import PoolConfig
from plexrl.pool import budgets
from plexrl.pool.admission import Standing
from plexrl.pool.book import Book
from plexrl.pool.layout import Layout, meta_of
from plexrl.pool.limits import Limits, OverLimit
from plexrl.pool.stored import Stored
from plexrl.pool.usage import HOUR_US, Usage, Used
from plexrl.slurm.adapter import Association
from plexrl.types import ApiError, CallKind, Peer, Span, SpanClass, commands, records

NOW = 1_000 * HOUR_US
ALICE = Peer(uid=5, user="alice", account="ml", job="7.0", qos="long")
BOB = Peer(uid=6, user="bob", account="ml", job="8.0")


class Pool:
    """A book with alice's and bob's jobs, and the limits that a file gives them."""

    def __init__(self, root: Path, gpus: int = 1, **sections: object):
        model = {"path": str(root), "engine": "noop", "train": {"gpus": gpus}}
        self.config = PoolConfig.model_validate({"state_dir": str(root), "models": {"m": model}, **sections})
        self.book, self.usage, self.layout = Book(), Usage(), Layout(root / "state")
        self.stored = Stored(self.layout)
        self.now_us = NOW
        for peer in (ALICE, BOB):
            self.book.apply(
                records.JobAttached(
                    now_us=1, job=peer.job, slurm_job=7, uid=peer.uid, user=peer.user, account=peer.account,
                    qos=peer.qos,
                )
            )  # fmt: skip
        core = SimpleNamespace(config=self.config, book=self.book, layout=self.layout, now_us=lambda: self.now_us)
        self.limits = Limits(core, self.usage, self.stored)

    def model(self, peer: Peer, name: str, rank: int | None) -> None:
        self.book.apply(
            records.ModelCreated(
                now_us=2, model=name, session="s", job=peer.job, uid=peer.uid, account=peer.account, base="m",
                lora_rank=rank, seed=0, attn=True, mlp=True, unembed=True, group=f"g-{rank or name}",
            )
        )  # fmt: skip

    def used(self, peer: Peer, at_us: int, gpu_us: int) -> None:
        span = Span("n:0", at_us - gpu_us, at_us, SpanClass.BUSY, "g/0", ((peer.job, 1),))
        self.usage.add(span, self.book)


def create(rank: int | None = 4, seq: int = 9) -> commands.CreateModel:
    return commands.CreateModel(
        session="s", model_seq=seq, base_model="m", lora_rank=rank, lora_seed=None, train_attn=True, train_mlp=True,
        train_unembed=True,
    )  # fmt: skip


def train(kind: CallKind, name: str | None = None) -> commands.Train:
    return commands.Train(model="s:train:0", seq=1, kind=kind, body=b"", digest="", name=name)


def test_jobs_of_a_user_and_the_rule_for_all_others(tmp_path):
    pool = Pool(tmp_path, policies={"users": {"alice": {"jobs": 2}, "*": {"jobs": 1}}})
    another = {peer: structs.replace(peer, job=f"{9 + peer.uid}.0") for peer in (ALICE, BOB)}
    pool.limits.hello(another[ALICE])  # her second
    with pytest.raises(OverLimit, match=r"user 'bob' has 1 jobs attached.*policies\.users\.\*\.jobs") as refused:
        pool.limits.hello(another[BOB])
    assert (refused.value.status, refused.value.exit_code, refused.value.kind) == (403, 5, "over_limit")
    pool.limits.hello(structs.replace(BOB, job="8.1"))  # requeued: its first run is on its way out
    pool.book.apply(records.JobEnded(now_us=3, job=BOB.job, reason="over"))
    pool.limits.hello(another[BOB])


def test_gang_groups_and_host_memory_of_an_account(tmp_path):
    with pytest.raises(OverLimit, match="trains on 2 GPUs.*gang_size"):
        Pool(tmp_path, gpus=2, policies={"accounts": {"ml": {"gang_size": 1}}}).limits.command(ALICE, create())
    pool = Pool(tmp_path, policies={"accounts": {"ml": {"worker_groups": 2}}, "qos": {"long": {"host_bytes": 1}}})
    pool.model(BOB, "b", 4)
    pool.limits.command(BOB, create(4))  # it shares the group of the base
    pool.limits.command(BOB, create(None))
    pool.model(BOB, "full", None)
    with pytest.raises(OverLimit, match="account 'ml' has 2 worker groups"):
        pool.limits.command(BOB, create(None))
    with pytest.raises(OverLimit, match=r"QOS 'long' holds 0 bytes.*policies\.qos\.long\.host_bytes allows 1\."):
        pool.limits.command(ALICE, create(4))
    pool.model(BOB, "s:train:9", 4)
    pool.limits.command(BOB, create(None))  # a repeat of what there is


def test_gpu_time_in_a_window(tmp_path):
    pool = Pool(tmp_path, policies={"users": {"alice": {"gpu_time": "2h", "window": "1d"}}})
    for at, used in ((NOW - 25 * HOUR_US, HOUR_US), (NOW - 20 * HOUR_US, HOUR_US), (NOW, HOUR_US)):
        pool.limits.command(ALICE, train(CallKind.FORWARD_BACKWARD))
        pool.used(ALICE, at, used)
    pool.now_us += 1_000_000  # it is looked at once a second
    with pytest.raises(OverLimit, match=r"user 'alice' has used 2.00 GPU hours in 24 h.*gpu_time allows 2.*from"):
        pool.limits.command(ALICE, train(CallKind.FORWARD_BACKWARD))
    with pytest.raises(OverLimit):
        pool.limits.hello(ALICE)
    pool.limits.command(ALICE, train(CallKind.SAVE_STATE, "last"))  # what she has is hers to keep
    pool.limits.command(ALICE, commands.Retrieve(request_id="s:train:0:1"))
    pool.limits.command(BOB, train(CallKind.FORWARD_BACKWARD))


def test_bytes_on_the_disk_count_for_user_and_account(tmp_path):
    pool = Pool(tmp_path, policies={"users": {"*": {"checkpoint_bytes": 100}}, "accounts": {"ml": {"jobs": 9}}})
    pool.layout.make()
    pool.model(ALICE, "s:train:0", 4)
    for uid, name, meta in ((5, "one", {"account": "ml"}), (5, "two", None), (77, "x", {"account": "bio"})):
        folder = pool.layout.checkpoint(uid, "s:train:0", "weights", name)
        folder.mkdir(parents=True)
        (folder / "state").write_bytes(bytes(60))
        if meta:
            meta_of(folder).write_text(json.dumps(meta))
    pool.stored.note(pool.stored.look(), pool.book)
    # Of a checkpoint that does not say its account the book knows whose model it is of.
    assert [pool.stored.of(*who) for who in (("users", "alice"), ("accounts", "ml"), ("accounts", "bio"))] == [
        120, 120, 60,
    ]  # fmt: skip
    assert {each.path for each in pool.stored.kept if each.uid == 5} == {
        "tinker://s:train:0/weights/one",
        "tinker://s:train:0/weights/two",
    }
    with pytest.raises(ApiError, match="user 'alice' has 120 bytes of checkpoints") as refused:
        pool.limits.command(ALICE, train(CallKind.SAVE_STATE, "three"))
    assert refused.value.status == 400
    pool.limits.command(ALICE, train(CallKind.PUBLISH))  # without a name it stays in memory
    pool.limits.command(BOB, train(CallKind.SAVE_STATE, "b"))


def association(account: str, user: str = "", parent: str = "root", **mins: str) -> Association:
    return Association(account=account, user=user, parent=parent, shares=1, grp_tres_mins=mins)


def test_a_budget_counts_the_pool_and_slurm(tmp_path):
    tree = (
        association("root", parent=""),
        Association(account="dept", user="", parent="root", shares=1, grp_tres_mins={"gres/gpu": "60", "cpu": "1"}),
        association("ml", parent="dept"),
        association("bio"),
    )
    pool = Pool(tmp_path, budgets={"from_slurm": True, "users": {"carl": {"gpu_time": "1h"}}})
    used = {Used("ml", "alice", ""): HOUR_US // 2, Used("bio", "carl", ""): HOUR_US}

    def refused(slurm_s: int, **who: str):
        standing = Standing(tree, {("dept", ""): slurm_s, ("ml", ""): 10**6})
        known = budgets.lines(pool.config, standing, used)
        return budgets.exhausted(known, standing, SimpleNamespace(**who))

    assert refused(1799, account="ml", user="alice") is None
    line = refused(1800, account="ml", user="alice")
    assert "account 'dept' is used up: GrpTRESMins" in str(line) and line.left_s == 0
    assert "1.00 GPU hours, 0.50 were used of this pool and 0.50 in Slurm" in str(line)
    assert refused(1800, account="bio", user="ann") is None
    assert refused(0, account="ml", user="carl").source == "budgets.users.carl"


def test_a_budget_counts_from_a_day_on(tmp_path):
    pool = Pool(tmp_path, budgets={"since": "1970-02-11", "accounts": {"ml": {"gpu_time": "1h"}}})
    start = budgets.since_us(pool.config)
    assert start == 41 * 86_400_000_000
    pool.used(ALICE, start - 1, 10 * HOUR_US)
    pool.used(ALICE, start + HOUR_US, HOUR_US // 4)
    (line,) = budgets.lines(pool.config, Standing(), pool.usage.since(start))
    assert line.pool_s == 900 and os.path.commonprefix([str(line), "the GPU budget of account"])
