"""Slurm: one adapter protocol, the backend over Slurm's commands, and a development cluster."""

from plexrl.slurm.adapter import AccountingRow, Association, JobInfo, JobOutput, Person, Slurm
from plexrl.slurm.commands import SlurmCommands

__all__ = ["AccountingRow", "Association", "JobInfo", "JobOutput", "Person", "Slurm", "SlurmCommands"]
