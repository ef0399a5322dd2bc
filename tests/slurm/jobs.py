"""Submitting and awaiting jobs of a development cluster."""

import time
from collections.abc import Callable
from typing import TypeVar

from plexrl.slurm.devcluster import Cluster

T = TypeVar("T")


def until(what: Callable[[], T], seconds: float = 30.0) -> T:
    """The first true answer of `what`."""
    deadline = time.monotonic() + seconds
    while not (answer := what()):
        assert time.monotonic() < deadline, f"still {answer!r}"
        time.sleep(0.1)
    return answer


def sbatch(cluster: Cluster, user: str, script: str, *options: str) -> int:
    done = cluster.run(user, ["sbatch", "--parsable", "--output=%j.out", *options], stdin=f"#!/bin/bash\n{script}\n")
    return int(done.stdout)


def finished(cluster: Cluster, job: int) -> str:
    """Wait for the end of a job, expect success, return its output."""
    slurm = cluster.slurm()
    until(lambda: slurm.job(job).state in ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL"))
    found = slurm.job(job)
    output = cluster.directory / "home" / found.user / f"{job}.out"
    assert found.state == "COMPLETED", (found, output.read_text())
    return output.read_text()
