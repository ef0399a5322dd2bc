"""Where a development cluster may lie, and what this machine must offer for one."""

import os
import stat
from pathlib import Path

from plexrl.types import BadInput, DoesNotFit

DEFAULT_DIR = Path("/var/tmp/plexrl-devcluster")

# sun_path holds 108 bytes; the longest socket below DIR is run/mariadb.socket.
_LONGEST_DIR = 80


def check_root() -> None:
    """Raise BadInput unless this is root."""
    if os.geteuid() != 0:
        raise BadInput(
            "A development cluster runs jobs under several users and makes device nodes, which only root may do",
            "Run it as root (a container will do); everything that needs no Slurm works without",
        )


def check(directory: Path, nodes: int, gpus_per_node: int) -> None:
    """Raise BadInput or DoesNotFit, naming the mend, when a cluster of this shape cannot live in `directory`."""
    check_root()
    if nodes < 1 or gpus_per_node < 0:
        raise BadInput(f"{nodes} nodes with {gpus_per_node} GPUs each are no cluster", "Ask for at least one node")
    cores = len(os.sched_getaffinity(0))
    if nodes * gpus_per_node > cores:
        raise DoesNotFit(
            f"{nodes} nodes x {gpus_per_node} pretend GPUs need {nodes * gpus_per_node} cores, and there are {cores}: "
            "a pretend GPU is a core of its own, without it every figure is an artefact",
            "Ask for fewer nodes or GPUs",
        )
    check_directory(directory)


def check_directory(directory: Path) -> None:
    """Every uid must be able to reach `directory`, and only root (or a sticky bit) may decide what lies there."""
    if not directory.is_absolute() or len(str(directory)) > _LONGEST_DIR or set(str(directory)) & set(" \t\n\"'#,[]%="):
        raise BadInput(
            f"{directory} cannot hold a development cluster: unix sockets and slurm.conf need an absolute path of at "
            f"most {_LONGEST_DIR} plain characters",
            f"Choose another, for example --dir {DEFAULT_DIR}",
        )
    if directory.resolve() != directory:
        raise BadInput(
            f"{directory} leads through a symbolic link", f"Name the real place: --dir {directory.resolve()}"
        )
    for folder in [*reversed(directory.parents), directory]:
        if not folder.exists():
            break
        mode = folder.stat().st_mode
        if not stat.S_ISDIR(mode):
            raise BadInput(f"{folder} is not a directory", f"Choose another, for example --dir {DEFAULT_DIR}")
        if not mode & stat.S_IXOTH:
            raise BadInput(
                f"{directory} cannot be reached by unprivileged users: {folder} has mode {stat.S_IMODE(mode):04o}",
                f"Choose a place that others can enter, for example --dir {DEFAULT_DIR}, or chmod o+x {folder}",
            )
        if mode & (stat.S_IWOTH | stat.S_IWGRP) and not mode & stat.S_ISVTX:
            raise BadInput(
                f"{folder}, on the way to {directory}, can be written by others, so that MUNGE refuses keys below it",
                f"Choose another, for example --dir {DEFAULT_DIR}, or chmod go-w {folder}",
            )
