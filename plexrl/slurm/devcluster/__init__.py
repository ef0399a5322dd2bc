"""A development cluster: `plexrl devcluster` and the tests' real Slurm."""

from plexrl.slurm.devcluster.cluster import Cluster, Status
from plexrl.slurm.devcluster.people import SERVICE, SHARES, USERS
from plexrl.slurm.devcluster.place import DEFAULT_DIR

__all__ = ["DEFAULT_DIR", "SERVICE", "SHARES", "USERS", "Cluster", "Status"]
