"""Whatever ends a pool, nothing of it stays: no process, socket, temporary file."""

import os
import signal

import psutil
import pytest

from plexrl.types import records

from .journals import of_kind
from .localpool import finish


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda s: s.name)
def test_the_run_loop_is_ended(local_pool, tmp_path, number):
    shared = shared_memory()
    pool = local_pool(gpus=2)
    pool.run("sft.py", "--steps", "1")
    pool.popen("sft.py", "--steps", "1", "--folder", str(tmp_path))
    pool.wait_until("a model exists", (tmp_path / "job.ready").exists)
    family = pool.processes("plexrl.")
    assert len(family) >= 5  # head, agent, nursery, two ranks
    os.kill(pool.pid(), number)
    pool.wait_until("every process ends", lambda: not any(p.is_running() and not dead(p) for p in family))
    assert list((pool.state / "run").iterdir()) == []
    assert not (pool.registry / "test.live.json").exists()
    assert shared_memory() <= shared
    assert len(of_kind(pool, records.EpochEnded)) == 1


def shared_memory() -> set[str]:
    """Named shared memory as torch, gloo and multiprocessing call theirs."""
    return {name for name in os.listdir("/dev/shm") if name.startswith(("torch_", "gloo", "psm_", "sem.", "plexrl."))}


def dead(process: psutil.Process) -> bool:
    """Ended, and not yet waited for by whoever inherited it."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_all_at_once_by_sigkill(local_pool):
    """Not even those who would tell are left: engine hosts end by their lifeline. The next start is a new pool."""
    pool = local_pool()
    pool.run("sft.py", "--steps", "1")
    family = pool.processes("plexrl.")
    (agent,), head = pool.processes(" agent "), pool.head()
    for process in (psutil.Process(pool.pid()), head, agent):
        process.kill()
    pool.wait_until("every process ends", lambda: not any(p.is_running() and not dead(p) for p in family))
    pool.start()
    assert finish(pool.popen("sft.py", "--steps", "1"))["losses"]
