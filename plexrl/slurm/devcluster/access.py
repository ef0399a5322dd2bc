"""What lies where in a development cluster, and running commands in it as its users."""

import os
import pwd
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from plexrl.slurm.commands import SlurmCommands
from plexrl.slurm.devcluster import people
from plexrl.types import Unavailable

_SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"


class Access:
    """The cluster below `directory`, as its users find it once it is up."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @property
    def opt(self) -> Path:
        """What is installed, readable by all: bin, lib, venv, models."""
        return self.directory / "opt"

    @property
    def registry(self) -> Path:
        """Where pools are declared; root and the service account write it."""
        return self.directory / "registry"

    @property
    def pools(self) -> Path:
        """A place of the service account for state directories of pools."""
        return self.directory / "pools"

    @property
    def munge_socket(self) -> Path:
        """The socket of the cluster's own munged."""
        return self.directory / "run" / "munge.socket"

    @property
    def slurm_conf(self) -> Path:
        """What SLURM_CONF has to be."""
        return self.directory / "etc" / "slurm.conf"

    def env(self) -> dict[str, str]:
        """The environment in which Slurm's and PlexRL's commands talk to this cluster, once it has been up."""
        return {
            "PATH": f"{self.opt}/bin:{self.opt}/venv/bin:{_SYSTEM_PATH}",
            "SLURM_CONF": str(self.slurm_conf),
            "PLEXRL_REGISTRY": str(self.registry),
            "PLEXRL_MUNGE_SOCKET": str(self.munge_socket),
            "PLEXRL_POOL_UIDS": f"0,{pwd.getpwnam(people.SERVICE).pw_uid}",
            "LANG": "C.UTF-8",
        }

    def slurm(self) -> SlurmCommands:
        """The adapter to this cluster's Slurm, as the calling user."""
        return SlurmCommands(env=self.env())

    def as_user(self, user: str, env: Mapping[str, str] | None = None) -> dict:
        """Keyword arguments that make a subprocess run as `user`, in that user's home, with this cluster's env()."""
        entry = pwd.getpwnam(user)
        home = "/root" if entry.pw_uid == 0 else str(self.directory / "home" / user)
        own = {"HOME": home, "USER": user, "LOGNAME": user, "SHELL": "/bin/bash"}
        who = {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": os.getgrouplist(user, entry.pw_gid)}
        return {**who, "cwd": home, "env": self.env() | own | dict(env or {})}

    def run(
        self,
        user: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdin: str | None = None,
        timeout: float = 60.0,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command as `user` and return what it printed; Unavailable when `check` and it failed or hung."""
        try:
            done = subprocess.run(
                list(argv), input=stdin, capture_output=True, text=True, timeout=timeout, **self.as_user(user, env)
            )
        except subprocess.TimeoutExpired as error:
            raise Unavailable(f"{user}: {' '.join(argv)} did not end in {timeout:.0f} s", f"{error.stderr}") from error
        if check and done.returncode:
            raise Unavailable(f"{user}: {' '.join(argv)} ended with {done.returncode}", done.stderr or done.stdout)
        return done
