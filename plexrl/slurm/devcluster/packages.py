"""Debian's packages that a development cluster is made of."""

import os
import shutil
import subprocess
from pathlib import Path

from plexrl.types import BadInput, Unavailable

_SBIN = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# program -> Debian package that brings it
_PROGRAMS = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
    "slurmdbd": "slurmdbd",
    "mariadbd": "mariadb-server",
    "mariadb-install-db": "mariadb-server",
    "munged": "munge",
    "useradd": "passwd",
    "gcc": "gcc",
    "make": "make",
}
_FILES = {
    "/usr/include/slurm/spank.h": "libslurm-dev",
    "/usr/include/stdio.h": "libc6-dev",
    "/usr/bin/python3": "python3",
}

# Debian's maintainer scripts start each daemon unless this hook says 101 ("action forbidden by policy"): the
# development cluster runs its own instances and must not leave a second set behind.
_POLICY = Path("/usr/sbin/policy-rc.d")
_POLICY_TEXT = "#!/bin/sh\nexit 101\n"


def program(name: str) -> str | None:
    """Absolute path of a program, looked up where Debian puts them."""
    return shutil.which(name, path=_SBIN)


def missing() -> list[str]:
    """Names of the Debian packages that are not there yet."""
    packages = {package for name, package in _PROGRAMS.items() if program(name) is None}
    packages |= {package for file, package in _FILES.items() if not Path(file).exists()}
    return sorted(packages)


def ensure() -> None:
    """Install what is missing with apt-get, without starting any service.

    Raises BadInput with the exact command when this is not root on a system with apt, Unavailable when apt fails.
    """
    packages = missing()
    if not packages:
        return
    command = ["apt-get", "install", "-y", "--no-install-recommends", *packages]
    apt = program("apt-get")
    if os.geteuid() != 0 or apt is None:
        raise BadInput(f"A development cluster needs {', '.join(packages)}", f"As root, run: {' '.join(command)}")
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    ours = not _POLICY.exists()
    if ours:
        _POLICY.write_text(_POLICY_TEXT)
        _POLICY.chmod(0o755)
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
        if done.returncode:  # a fresh image has no package lists yet, or stale ones
            subprocess.run([apt, "update"], env=env, capture_output=True, timeout=300)
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    finally:
        if ours:
            _POLICY.unlink()
    if done.returncode or missing():
        tail = "\n".join(done.stderr.strip().splitlines()[-5:])
        raise Unavailable(
            f"apt-get could not install {', '.join(packages)}:\n{tail}", f"Run it by hand: {' '.join(command)}"
        )
