"""Roles, classes, residencies and epochs."""

from enum import StrEnum

from msgspec import Struct

POOL_NAME = r"^[a-z][a-z0-9_-]{0,31}$"


class Role(StrEnum):
    """What a worker group is for."""

    TRAIN = "train"
    SAMPLE = "sample"


class GpuRole(StrEnum):
    """Which worker groups may be placed on a GPU."""

    TRAIN = "train"
    SAMPLE = "sample"
    ANY = "any"


class JobClass(StrEnum):
    """How a job's calls rank, before everything else. A scavenger fills GPUs that nobody else wants now."""

    INTERACTIVE = "interactive"
    NORMAL = "normal"
    SCAVENGER = "scavenger"


class Residency(StrEnum):
    """Where a worker group's or a deployment's state is."""

    COLD = "cold"
    LOADING = "loading"
    DEVICE = "device"
    OFFLOADING = "offloading"
    HOST = "host"
    SPILLING = "spilling"
    NVME = "nvme"
    LOST = "lost"


class Epoch(Struct, frozen=True, order=True):
    """Which head may write: compared by start time (unix seconds), then Slurm job id, then restart count."""

    start: int
    job: int
    restart: int

    def __str__(self) -> str:
        return f"{self.start}-{self.job}-{self.restart}"
