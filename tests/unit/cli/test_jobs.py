"""`plexrl jobs`: what a job that waits in Slurm is said to wait for. What pools tell is tried on real ones."""

import pytest

from plexrl.cli.jobs import _why
from plexrl.slurm.adapter import JobInfo


def job(state: str, reason: str = "None") -> JobInfo:
    return JobInfo(
        id=7, state=state, uid=5, user="alice", account="ml", restart_count=0, start_time=None, gpus=0, tres={},
        licenses={"plexrl_lab": 1}, nodes=(), partition="p", reason=reason, admin_comment="",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("info", "pool", "told"),
    [
        (job("PENDING", "Licenses"), "down", "is down; the job starts when it is up"),
        (job("PENDING", "Licenses"), "starting", "is starting"),
        (job("PENDING", "Licenses"), "draining", "is draining; the job starts under the next one"),
        (job("PENDING", "Licenses"), "ready", "has no place"),
        (job("PENDING", "Priority"), "ready", "waits in Slurm: Priority"),
        (job("PENDING", "Priority"), "down", "waits in Slurm: Priority"),
        (job("RUNNING"), "down", "is down: the job's requests are held"),
        (job("RUNNING"), "draining", "is draining: the job's requests are held"),
        (job("RUNNING"), "ready", "plexrl explain tells inside the job"),
    ],
)
def test_what_it_waits_for(info: JobInfo, pool: str, told: str):
    assert told in _why(info, {"pool": "lab", "state": pool})
