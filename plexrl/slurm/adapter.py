"""What PlexRL asks of a Slurm, whichever way it is asked: a protocol and the structs that it speaks."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from msgspec import Struct


class JobInfo(Struct, frozen=True, kw_only=True):
    """A job as slurmctld knows it now. Nothing here can be made up by its user: name and comment are not asked for.

    id: of the array element itself, where there is one. gpus: allocated (0 while pending). tres: allocated, TRES name
    -> amount as printed. licenses: name -> count. start_time: unix seconds, of this run of a requeued job, None before
    it began. reason: why a pending job waits. admin_comment: may hold text that came from the user, in JSON.
    """

    id: int
    state: str
    uid: int
    user: str
    account: str
    restart_count: int
    start_time: int | None
    gpus: int
    tres: dict[str, str]
    licenses: dict[str, int]
    nodes: tuple[str, ...]
    partition: str
    reason: str
    admin_comment: str
    qos: str = ""


class AccountingRow(Struct, frozen=True, kw_only=True):
    """One `sacct -D` row: one run, or the part of one between two resizes, of a job.

    Times in unix seconds, None where unknown. elapsed: seconds. gpus: from AllocTRES.
    """

    job: int
    state: str
    user: str
    account: str
    gpus: int
    tres: dict[str, str]
    start: int | None
    end: int | None
    elapsed: int
    nodes: tuple[str, ...]
    admin_comment: str

    @property
    def gpu_seconds(self) -> int:
        """Allocated GPUs times seconds."""
        return self.gpus * self.elapsed


class Association(Struct, frozen=True, kw_only=True):
    """A user (or, with user "", an account) in the tree of shares. shares: None means `parent`."""

    account: str
    user: str
    parent: str
    shares: int | None
    grp_tres_mins: dict[str, str]


class Person(Struct, frozen=True, kw_only=True):
    """A user in slurmdbd. admin_level: None, Operator or Administrator. coordinates: accounts."""

    name: str
    admin_level: str
    coordinates: tuple[str, ...]


class JobOutput(Struct, frozen=True, kw_only=True):
    """Where a job's script writes. uid: of its user, who chose the paths."""

    uid: int
    stdout: Path
    stderr: Path


class Slurm(Protocol):
    """Every method raises Unavailable when Slurm does not answer in time, BadInput when it refuses, with its words."""

    def submit(
        self,
        script: Path,
        arguments: Sequence[str] = (),
        options: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> int:
        """Submit a batch script; returns the job id. options: sbatch's own, before the script."""
        ...

    def job(self, job_id: int) -> JobInfo | None:
        """One job; None when slurmctld does not know it (any more), or does not show it to this user."""
        ...

    def jobs(self, job_ids: Iterable[int]) -> dict[int, JobInfo]:
        """Many jobs in one call; those that slurmctld does not know are left out."""
        ...

    def holders(self, licences: Iterable[str]) -> dict[int, JobInfo]:
        """Jobs visible to this user that have not ended and hold or ask for one of these licences."""
        ...

    def active(self) -> list[int]:
        """Ids of all jobs visible to this user that have not ended."""
        ...

    def cancel(self, *job_ids: int, signal: str | None = None, batch: bool = False) -> None:
        """End jobs, or send them a signal; batch: the batch shell only. A job that has ended is no error."""
        ...

    def sacct(self, job_ids: Iterable[int]) -> list[AccountingRow]:
        """All rows of these jobs from slurmdbd: requeued, resized and failed runs included.

        slurmdbd lags a second or two: a row without `end`, or one of a job that is still COMPLETING, is not final.
        """
        ...

    def associations(self) -> list[Association]:
        """All accounts and users with their shares, of this cluster."""
        ...

    def gpu_seconds(self) -> dict[tuple[str, str], int]:
        """(account, user) -> GPU-seconds that slurmctld holds against their GrpTRESMins, decayed and reset as the site
        says; user "": the whole account with all below it. Who used none may be left out."""
        ...

    def output(self, job_id: int) -> JobOutput | None:
        """Where a job's script writes, patterns expanded; None when slurmctld does not know the job (any more)."""
        ...

    def people(self) -> list[Person]:
        """Admin levels and coordinators, as far as this user may see them."""
        ...

    def licenses(self) -> dict[str, int]:
        """The site's licences and how many there are of each, free or not."""
        ...

    def hold_licenses(self, reservation: str, user: str, licenses: Mapping[str, int]) -> None:
        """Keep licences from everybody but `user` by a licence-only reservation: jobs that ask for them stay PENDING.

        Nothing happens when a reservation of that name exists.
        """
        ...

    def release_licenses(self, reservation: str) -> None:
        """Delete that reservation; nothing happens when there is none."""
        ...
