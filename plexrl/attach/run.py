"""`plexrl attach -- CMD`: a command as a logical job of a private pool, where no SPANK hook is."""

import os
import signal
import subprocess
from collections.abc import Sequence
from types import FrameType

from plexrl.attach import launch
from plexrl.attach.settings import Settings
from plexrl.types import BadInput
from plexrl.wire.registry import Registry

_PASSED_ON = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


def attach_and_run(
    registry: str,
    pool: str,
    command: Sequence[str],
    pool_uids: frozenset[int] = frozenset(),
    munge_socket: str | None = None,
    deadline: float = 45.0,
) -> int:
    """Run the command attached to the pool; its exit code, 128 + n when signal n ended it.

    The job is the Slurm job that we are in; at a private pool without Slurm it is this process. The proxy ends with
    this process. pool_uids: whose registry files are believed, beside root's and our own. Raises PlexrlError when the
    job is not admitted; the command is then not started.
    """
    if not command:
        raise BadInput("no command to run", "Write: plexrl attach -- COMMAND ...")
    uids = frozenset(pool_uids) | {os.geteuid()}
    declared = Registry(registry, uids).declared(pool)
    job, restart = _job(declared.kind == "private")
    secret = launch.new_secret()
    lifeline, ours = os.pipe()
    try:
        settings = Settings(
            pool=pool,
            registry=registry,
            pool_uids=tuple(sorted(uids)),
            job=job,
            restart=restart,
            secret=secret,
            lifeline=lifeline,
            munge_socket=munge_socket,
            max_staleness=launch.own_max_staleness(),
        )
        started = launch.start(settings, deadline)
        os.close(lifeline)
        lifeline = -1
        variables = launch.environment(started.port, secret, pool, launch.own_no_proxy())
        code = _run(command, {**os.environ, **variables})
    finally:
        if lifeline >= 0:
            os.close(lifeline)
        os.close(ours)
    started.process.wait()
    return code


def _job(private: bool) -> tuple[int, int]:
    if private:
        # Also inside a Slurm job: a private pool knows processes of this machine, and no Slurm.
        return os.getpid(), 0
    job = os.environ.get("SLURM_JOB_ID", "")
    if job.isdigit():
        return int(job), int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    raise BadInput("this is no Slurm job", "Submit it with sbatch --plexrl-pool=NAME")


def _run(command: Sequence[str], environment: dict[str, str]) -> int:
    child: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        if child is None:
            early.append(number)
        else:
            child.send_signal(number)

    # Before the child begins: it may call for a signal at once.
    before = {number: signal.signal(number, pass_on) for number in _PASSED_ON}
    try:
        child = subprocess.Popen(command, env=environment)
        for number in early:
            child.send_signal(number)
        code = child.wait()
    except OSError as error:
        raise BadInput(f"cannot run {command[0]!r} ({error.strerror})", "Name an executable") from error
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code
