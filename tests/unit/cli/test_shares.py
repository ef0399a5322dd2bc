"""`plexrl shares`: the tree of a pool, and what another file would make of it."""

import json
import os
import time
from pathlib import Path

import pytest

from plexrl.cli.shares import shares
from plexrl.scheduler.fairshare import HOUR_US, Shares
from plexrl.types import BadInput
from plexrl.wire.registry import Declared, Live, Registry

DAY_US = 24 * HOUR_US


@pytest.fixture
def registry(tmp_path: Path) -> str:
    """A pool that runs and has told of its policies: ml has 3 of 4 shares and used 3 of 4 hours."""
    folder = tmp_path / "pools"
    folder.mkdir(mode=0o755)
    books = Registry(str(folder), frozenset({os.getuid()}))
    state = tmp_path / "state"
    (state / "run").mkdir(parents=True)
    books.declare(
        Declared(name="lab", kind="private", owner_uid=os.getuid(), config=str(tmp_path / "x"), state_dir=str(state))
    )
    live = Live(
        name="lab", instance="i", state="ready", address="ipc:///x", server_key="k" * 40, nonce="n",
        service_uid=os.getuid(), slurm_job=0, epoch="1-0-0",
    )  # fmt: skip
    books.publish(live)
    now_us = time.time_ns() // 1000
    tree = Shares(7 * DAY_US)
    tree.set("ml", 3, {"ann": 1})
    for account, user, hours in (("ml", "ann", 2), ("ml", "bob", 1), ("bio", "carl", 1)):
        tree.charge(now_us, account, user, hours * HOUR_US)
    line = {
        "account": "ml",
        "user": "",
        "limit_s": 3600,
        "pool_s": 5400.0,
        "slurm_s": 0,
        "source": "s",
        "left_s": -1800,
    }
    told = {
        "now_us": now_us, "file": "plexrl.yaml", "loaded_us": 1, "refused": "device cannot change", "readings": 1,
        "shares_from": "file", "order": "fair", "half_life_us": 7 * DAY_US,
        "users": [each._asdict() for each in tree.tree(now_us)], "budgets": [line],
    }  # fmt: skip
    (state / "run" / "policies.json").write_text(json.dumps(told))
    return str(folder)


def test_the_tree_and_what_one_more_hour_would_change(registry, capsys):
    shares(pool="", config=None, registry=registry, pool_uids="", as_json=True)
    (pool,) = json.loads(capsys.readouterr().out)
    users = {(each["account"], each["user"]): each for each in pool["users"]}
    assert [round(each["part"], 3) for each in users.values()] == [0.25, 0.375, 0.375]
    ann = users["ml", "ann"]
    assert ann["usage_us"] == 2 * HOUR_US and ann["used"] == 0.5
    # Slurm's classic formula: effective usage 2/4 + 1/4 * 1/2 of a part of 3/8.
    assert ann["factor"] == pytest.approx(2 ** -((2 / 4 + 1 / 4 / 2) / (3 / 8)))
    assert all(each["next_factor"] < each["factor"] for each in users.values())


def test_what_another_file_would_change(registry, capsys, tmp_path):
    file = tmp_path / "new.yaml"
    file.write_text(
        f"state_dir: {tmp_path}/s\nmodels: {{m: {{path: {tmp_path}, engine: noop}}}}\nshares: {{bio: {{shares: 3}}}}\n"
    )
    shares(pool="lab", config=file, registry=registry, pool_uids="", as_json=True)
    (pool,) = json.loads(capsys.readouterr().out)
    bio, ann, bob = pool["users"]
    assert (bio["new_part"], ann["new_part"], bob["new_part"]) == (0.75, 0.125, 0.125)
    assert bio["new_factor"] > bio["factor"] and ann["new_factor"] < ann["factor"]
    file.write_text(file.read_text().replace("shares: {bio: {shares: 3}}", "shares_from: slurm"))
    with pytest.raises(BadInput, match="takes its shares from Slurm"):
        shares(pool="lab", config=file, registry=registry, pool_uids="", as_json=True)


def test_on_a_terminal(registry, capsys):
    shares(pool="", config=None, registry=registry, pool_uids="", as_json=False)
    told = capsys.readouterr().out
    assert "order fair" in told and "not taken up: device cannot change" in told and "-0.50" in told
    assert [line.split()[0] for line in told.splitlines() if line.split()[:1] in (["bio"], ["ml"])] == [
        "bio",
        "ml",
        "ml",
    ]


def test_nobody_else_sees_it(registry, tmp_path):
    (tmp_path / "state" / "run" / "policies.json").unlink()
    with pytest.raises(BadInput, match="no pool runs into which this account may look"):
        shares(pool="", config=None, registry=registry, pool_uids="", as_json=True)
    with pytest.raises(BadInput, match="no registry"):
        shares(pool="", config=None, registry="", pool_uids="", as_json=True)
