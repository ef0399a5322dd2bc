"""One development cluster for all of these tests, in a place of its own."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from plexrl.slurm.devcluster import Cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A real Slurm with 2 nodes of 1 GPU each."""
    cluster = Cluster(Path(f"/var/tmp/plexrl-test-{os.getpid()}"))
    cluster.up(nodes=2, gpus_per_node=1)
    yield cluster
    cluster.down(purge=True)
