"""A rank, a replica, an agent killed: who had it is told and goes on from the checkpoint; others do not notice."""

import psutil
import pytest

from plexrl.types import records

from .journals import applied_once, checkpoint_files, model_of, of_kind, status_of
from .localpool import LocalPool, finish
from .small import device_for_one


def ranks(pool: LocalPool) -> list[psutil.Process]:
    """Engine hosts that run, oldest first: forks of the nursery."""
    nursery = "plexrl.pool.nursery"
    forks = [p for p in pool.processes(nursery) if nursery in " ".join(p.parent().cmdline())]
    return sorted(forks, key=lambda p: (p.create_time(), p.pid))


def open_calls(pool: LocalPool) -> set[str]:
    """Calls that were accepted and have not ended."""
    return {r.call.id for r in of_kind(pool, records.CallAccepted)} - {r.id for r in of_kind(pool, records.CallEnded)}


@pytest.mark.parametrize(("rank", "gpus"), [(0, 1), (8, 2)], ids=["full", "follower-of-a-lora-gang"])
def test_in_the_middle_of_a_call(local_pool, tmp_path, rank, gpus):
    pool = local_pool(gpus=gpus)
    (tmp_path / "go").touch()
    undisturbed = pool.run("survivor.py", "--rank", str(rank))
    before = {p.pid for p in ranks(pool)}
    # The other kind of training: another worker group.
    other = pool.popen("sft.py", "--rank", str(8 - rank), "--folder", str(tmp_path), "--steps", "30", "--lr", "1e-3")
    pool.wait_until("the other trains", (tmp_path / "job.steps").exists)
    theirs = {p.pid for p in ranks(pool)} - before
    program = pool.popen("survivor.py", "--rank", str(rank), "--hit", str(tmp_path))
    pool.wait_until("a long call runs", (tmp_path / "hit.calling").exists)
    mine = [p for p in ranks(pool) if p.pid not in theirs]
    assert len(mine) == gpus
    assert any(":train:0:6" in call for call in open_calls(pool))
    mine[-1].kill()
    seen = finish(program)
    assert seen["before"] == undisturbed["before"]
    assert len(seen["errors"]) == 2
    assert all(f"last checkpoint is {seen['kept']}" in error for error in seen["errors"]), seen["errors"]
    assert seen["after"] == undisturbed["after"]
    files, others = (checkpoint_files(pool, x["checkpoint"]) for x in (seen, undisturbed))
    assert [name for name in files if files[name] != others[name]] == []
    assert applied_once(pool, model_of(finish(other)["checkpoint"])) == 3 * 30 + 1
    lost = {r.model for r in of_kind(pool, records.ModelEnded) if r.lost}
    assert lost == {model_of(seen["kept"])}


@pytest.mark.parametrize("side", ["newcomer", "victim"])
def test_in_the_middle_of_a_switch(local_pool, tiny_model, tmp_path, side):
    """One side of a switch stands still, and then dies: the other side of the gate goes on."""
    small = {"micro_batch_tokens": 128, "sample": {"replicas": 1, "kv_bytes": 1 << 18, "max_batch": 4}}
    pool = local_pool(device=device_for_one(tiny_model), model=small)
    program = pool.popen("survivor.py", "--rank", "0", "--hit", str(tmp_path), "--wait")
    pool.wait_until("it has saved", (tmp_path / "hit.saved").exists)
    (mine,) = ranks(pool)
    other = pool.popen("sft.py", "--rank", "0", "--folder", str(tmp_path), "--name", "other", "--lr", "1e-3")
    pool.wait_until("the other is there in its place", (tmp_path / "other.ready").exists)
    (theirs,) = [rank for rank in ranks(pool) if rank.pid != mine.pid]
    doomed = mine if side == "newcomer" else theirs
    doomed.suspend()
    (tmp_path / "hit.on").touch()
    (tmp_path / "hit.go").touch()
    pool.wait_until("a switch is under way", lambda: status_of(pool)["gpus"]["local:0"]["phase"] == "switch")
    doomed.kill()
    seen = finish(program)
    assert seen["after"][0] < seen["before"][1]
    (tmp_path / "go").touch()
    lost = {r.model for r in of_kind(pool, records.ModelEnded) if r.lost}
    if side == "newcomer":
        assert len(seen["errors"]) == 2
        assert all(f"last checkpoint is {seen['kept']}" in error for error in seen["errors"]), seen["errors"]
        assert applied_once(pool, model_of(finish(other)["checkpoint"])) == 3 * 6 + 1
        assert lost == {model_of(seen["kept"])}
    else:
        assert seen["errors"] == []
        assert other.wait(timeout=120) != 0
        assert lost == {r.model for r in of_kind(pool, records.ModelCreated)} - {
            model_of(seen[saved]) for saved in ("kept", "checkpoint")
        }


def test_a_replica_that_draws(local_pool, tmp_path):
    pool = local_pool(gpus=2)
    program = pool.popen("draw.py", "--folder", str(tmp_path), "--calls", "24")
    pool.wait_until("the sampler is there", (tmp_path / "draw.ready").exists)
    pool.wait_until("samples are drawn", lambda: len(of_kind(pool, records.CallAccepted)) >= 20)
    ranks(pool)[0].kill()
    seen = finish(program)
    assert len(seen["tokens"]) == 48 and min(seen["logprobs"]) >= 1
    ended = of_kind(pool, records.CallEnded)
    assert all(r.ok for r in ended) and len({r.id for r in ended}) == len(ended) == 25
    pool.wait_until("it is built again", lambda: len(ranks(pool)) == 2)


def test_the_agent(local_pool, tmp_path):
    pool = local_pool()
    (tmp_path / "go").touch()
    program = pool.popen("survivor.py", "--rank", "8", "--hit", str(tmp_path))
    pool.wait_until("a long call runs", (tmp_path / "hit.calling").exists)
    (agent,) = pool.processes(" agent ")
    family = agent.children(recursive=True)
    assert len(family) >= 2
    agent.kill()
    pool.wait_until("its ranks end with it", lambda: not any(p.is_running() for p in family))
    seen = finish(program)
    assert all(f"last checkpoint is {seen['kept']}" in error for error in seen["errors"]), seen["errors"]
    assert seen["after"][0] < seen["before"][1]
