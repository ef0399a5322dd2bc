"""Slurm: one adapter protocol, two backends (Slurm's commands, pyslurm), and a development cluster."""

from plexrl.slurm.adapter import AccountingRow, Association, JobInfo, JobOutput, Person, Slurm
from plexrl.slurm.commands import SlurmCommands

__all__ = ["AccountingRow", "Association", "JobInfo", "JobOutput", "Person", "Slurm", "SlurmCommands", "slurm_of"]


def slurm_of(backend: str) -> Slurm:
    """The backend of this name, `commands` or `pyslurm`. Raises BadInput for a pyslurm that cannot be used here."""
    if backend == "commands":
        return SlurmCommands()
    from plexrl.slurm.pyslurm_backend import SlurmPy

    slurm = SlurmPy()
    slurm.check()
    return slurm
