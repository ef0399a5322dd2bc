"""kill -9 of the head: programs notice nothing, each call is applied exactly once, the bits are the same."""

import resource
import signal

from plexrl.types import records

from .journals import applied_once, model_of, of_kind, same_training
from .localpool import LocalPool, finish
from .small import RESTLESS, device_for_one

STEPS = 8


def steps_done(folder, name: str = "job") -> int:
    """How many steps sft.py has told."""
    path = folder / f"{name}.steps"
    return int(path.read_text()) if path.exists() else 0


def heads(pool: LocalPool) -> int:
    """How many heads have taken over so far."""
    return len(of_kind(pool, records.EpochStarted))


def kill_head(pool: LocalPool) -> None:
    """SIGKILL, and wait for the next head."""
    before = heads(pool)
    pool.head().kill()
    await_head(pool, before + 1)


def await_head(pool: LocalPool, number: int) -> None:
    """Wait until so many heads have been, and the last is ready."""
    pool.wait_until(f"head {number}", lambda: heads(pool) >= number and pool.live()["state"] == "ready")


def arm(pool: LocalPool, point: str) -> None:
    """The head dies at this fault point, once."""
    folder = pool.state / "run" / "faults"
    folder.mkdir(mode=0o700, exist_ok=True)
    (folder / point).touch()


def test_three_times_under_training(local_pool, tiny_model, tmp_path):
    """While another job has every second turn, so that heads die in switches and while calls are half done, too."""
    model = {"micro_batch_tokens": 128, "sample": {"replicas": 1, "kv_bytes": 1 << 18, "max_batch": 4}}
    pool = local_pool(device=device_for_one(tiny_model), model=model, scheduler=RESTLESS)
    common = ("--rank", "0", "--steps", str(STEPS), "--lr", "1e-3")
    undisturbed = pool.run("sft.py", *common)
    here = ("--folder", str(tmp_path), "--think", "0.1")
    program = pool.popen("sft.py", *common, *here)
    other = pool.popen("sft.py", "--rank", "8", "--steps", "40", *here, "--name", "other")
    pool.wait_until("both models exist", lambda: len(list(tmp_path.glob("*.ready"))) == 2)
    (tmp_path / "go").touch()
    pool.wait_until("two steps", lambda: steps_done(tmp_path) >= 2)
    kill_head(pool)
    # Between the engine's application of an optim_step and its record.
    arm(pool, "applied-optim_step")
    await_head(pool, 3)
    assert not (pool.state / "run" / "faults" / "applied-optim_step").exists()
    pool.wait_until("more steps", lambda: steps_done(tmp_path) >= 5)
    kill_head(pool)
    disturbed, others = finish(program), finish(other)
    assert heads(pool) == 4
    same_training(pool, undisturbed, disturbed)
    # optim_step and two forward_backward calls a step, and the save.
    assert applied_once(pool, model_of(disturbed["checkpoint"])) == 3 * STEPS + 1
    assert applied_once(pool, model_of(others["checkpoint"])) == 3 * 40 + 1
    assert len(of_kind(pool, records.GroupPlaced)) == 3, "the engines outlived the heads"


def test_at_the_awkward_moments(local_pool, tmp_path):
    pool = local_pool()
    common = ("--rank", "8", "--steps", "4")
    (tmp_path / "go").touch()
    program = pool.popen("sft.py", *common, "--folder", str(tmp_path))
    # While the first model is made: its worker group is placed, and its engine is being built.
    pool.wait_until("the model is asked for", lambda: of_kind(pool, records.ModelCreated))
    assert not of_kind(pool, records.CallEnded)
    # Accepted and on disk, but neither dispatched nor promised to anybody.
    arm(pool, "accepted-forward_backward")
    arm(pool, "applied-forward_backward")
    arm(pool, "applied-save_state")
    kill_head(pool)
    disturbed = finish(program)
    assert heads(pool) == 5
    undisturbed = pool.run("sft.py", *common)
    same_training(pool, undisturbed, disturbed)
    assert applied_once(pool, model_of(disturbed["checkpoint"])) == 3 * 4 + 1


def test_while_samples_are_drawn(local_pool, tmp_path):
    pool = local_pool(gpus=2)
    program = pool.popen("draw.py", "--folder", str(tmp_path), "--calls", "24")
    pool.wait_until("the sampler is there", (tmp_path / "draw.ready").exists)
    pool.wait_until("samples are accepted", lambda: len(of_kind(pool, records.CallAccepted)) >= 20)
    kill_head(pool)
    seen = finish(program)
    assert [len(tokens) for tokens in seen["tokens"]] == seen["logprobs"]
    assert len(seen["tokens"]) == 48 and min(seen["logprobs"]) >= 1
    ended = [r.id for r in of_kind(pool, records.CallEnded)]
    assert len(ended) == len(set(ended)) == 25


def test_journal_cannot_be_written(local_pool, tmp_path):
    """As on a full disk: the head ends, and what it had acknowledged is there for the next one."""
    pool = local_pool()
    common = ("--rank", "8", "--steps", "6")
    undisturbed = pool.run("sft.py", *common)
    (tmp_path / "go").touch()
    program = pool.popen("sft.py", *common, "--folder", str(tmp_path), "--think", "0.2")
    pool.wait_until("two steps", lambda: steps_done(tmp_path) >= 2)
    head = pool.head()
    (journal,) = (pool.state / "journal").glob("*/*.log")
    size = journal.stat().st_size + 100
    head.rlimit(resource.RLIMIT_FSIZE, (size, size))
    await_head(pool, 2)
    disturbed = finish(program)
    assert "the journal cannot be written" in pool.logs()
    assert "ended with 75" in pool.logs()
    same_training(pool, undisturbed, disturbed)
    assert applied_once(pool, model_of(disturbed["checkpoint"])) == 3 * 6 + 1


def test_stop_signal_is_no_death(local_pool):
    """A head that is asked to end does, and is not started again."""
    pool = local_pool()
    pool.head().send_signal(signal.SIGTERM)
    pool.wait_until("the pool ends", lambda: pool.returncode() is not None)
    assert pool.returncode() == 0
    assert heads(pool) == 1
