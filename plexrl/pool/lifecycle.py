"""Declaring, starting and stopping a pool through Slurm, under its service account."""

import os
import pwd
import shutil
import socket
import time
from pathlib import Path

from plexrl.config import load
from plexrl.pool.share import shared
from plexrl.slurm.adapter import Slurm
from plexrl.types import BadInput, PlexrlError, Unavailable
from plexrl.wire.registry import Declared, Live, Registry

_STOP_S = 60.0


def licence(pool: str) -> str:
    """The licence that admits logical jobs of a pool."""
    return f"plexrl_{pool}"


def account_of(uid: int) -> str:
    """A uid's name. Raises BadInput."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        raise BadInput(f"uid {uid} has no account on this machine", "Create the service account first") from None


class Lifecycle:
    """The verbs of `plexrl pool` for pools of one registry. slurm None: only private pools without Slurm."""

    def __init__(self, registry: Registry, slurm: Slurm | None):
        self._registry = registry
        self._slurm = slurm

    def declare(self, name: str, config_file: Path, owner: str | None, private: bool) -> Declared:
        """Make a pool known for good. Raises BadInput for a configuration or an account that is no use."""
        config = load(config_file)
        if private:
            uid = os.getuid()
        else:
            who = owner or config.service_user
            try:
                uid = pwd.getpwnam(who).pw_uid
            except KeyError:
                raise BadInput(f"the service account {who!r} does not exist", "Create it, or name another") from None
            if uid == 0:
                raise BadInput("a pool does not run as root", "Name an unprivileged service account")
        declared = Declared(
            name=name,
            kind="private" if private else "site",
            owner_uid=uid,
            config=str(config_file.resolve()),
            state_dir=config.state_dir,
        )
        self._registry.declare(declared)
        return declared

    def make_folder(self, folder: Path, uid: int, mode: int) -> None:
        """A folder of the service account. Raises BadInput when only root could make it."""
        try:
            for missing in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
                missing.mkdir(mode=0o755)
                missing.chmod(0o755)  # whatever the umask
            os.chown(folder, uid, -1)
            folder.chmod(mode)
        except OSError as error:
            raise BadInput(
                f"{folder} cannot be made for uid {uid} ({error.strerror})", "Declare the pool as root"
            ) from error

    def forget(self, name: str) -> None:
        """Remove what an earlier life of the pool left: journal, ledger, intervals. Raises BadInput while it runs."""
        if self._running(name) is not None:
            raise BadInput(f"pool {name!r} is up", "Stop it first")
        self._registry.withdraw(name)
        for folder in ("journal", "ledger", "agents", "logs", "checkpoints"):
            shutil.rmtree(Path(self._registry.declared(name).state_dir) / folder, ignore_errors=True)

    def hold(self, name: str) -> None:
        """Keep logical jobs PENDING (Licenses) while the pool is down."""
        slurm = self._need_slurm()
        totals = slurm.licenses()
        if licence(name) not in totals:
            raise BadInput(
                f"Slurm has no licence {licence(name)!r}", f"Add Licenses={licence(name)}:N to slurm.conf and restart"
            )
        owner = account_of(self._registry.declared(name).owner_uid)
        slurm.hold_licenses(licence(name), owner, {licence(name): totals[licence(name)]})

    def release(self, name: str) -> None:
        """Let logical jobs start."""
        self._need_slurm().release_licenses(licence(name))

    def start(self, name: str, nodes: int, gpus_per_node: int, options: list[str]) -> int:
        """Submit the pool's Slurm job; its id. Raises BadInput when the pool runs or the caller may not start it."""
        declared = self._registry.declared(name)
        if declared.kind == "private":
            raise BadInput(f"pool {name!r} is private and runs without Slurm", f"Run: plexrl pool run {name}")
        live = self._running(name)
        if live is not None:
            raise BadInput(f"pool {name!r} is {live.state} in Slurm job {live.slurm_job}", "Stop it first")
        who = os.getuid()
        submit_as = []
        if who == 0:
            submit_as = [f"--uid={declared.owner_uid}", f"--gid={pwd.getpwuid(declared.owner_uid).pw_gid}"]
        elif who != declared.owner_uid:
            raise BadInput(
                f"pool {name!r} belongs to {account_of(declared.owner_uid)}", "Run this as that account, or as root"
            )
        return self._need_slurm().submit(
            shared("sbatch_templates/pool.sbatch"),
            [name, self._registry.directory],
            [
                f"--job-name=plexrl-{name}",
                f"--nodes={nodes}",
                f"--gpus-per-node={gpus_per_node}",
                f"--chdir={declared.state_dir}",
                f"--output={declared.state_dir}/pool-%j.out",
                *submit_as,
                *options,
            ],
        )

    def wait(self, name: str, job_id: int, timeout: float) -> Live:
        """Wait until the pool of this Slurm job is ready. Raises Unavailable with the job's state."""
        slurm = self._need_slurm()
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            live = self._registry.live(name)
            if live is not None and live.slurm_job == job_id and live.state == "ready":
                return live
            job = slurm.job(job_id)
            if job is None or job.state not in ("PENDING", "CONFIGURING", "RUNNING"):
                state = job.state if job else "gone"
                raise Unavailable(f"pool {name!r} did not start: Slurm job {job_id} is {state}", "See its output file")
            time.sleep(0.3)
        raise Unavailable(f"pool {name!r} is not ready after {timeout:.0f} s (Slurm job {job_id})", "See its output")

    def drain(self, name: str) -> int:
        """Tell the pool's batch script to drain and end; its Slurm job. Slurm decides who may."""
        live = self._registry.live(name)
        if live is None:
            raise BadInput(f"pool {name!r} is down", "Nothing to do")
        if not live.slurm_job:
            raise BadInput(f"pool {name!r} runs without Slurm", "End the process of `plexrl pool run`")
        self._need_slurm().cancel(live.slurm_job, signal="TERM", batch=True)
        return live.slurm_job

    def reload(self, name: str) -> int:
        """Tell the pool's head to read its plexrl.yaml again; its Slurm job. Slurm decides who may.

        Raises BadInput for a file that no head would take; whether this one does, it says in run/policies.json.
        """
        load(self._registry.declared(name).config)
        live = self._registry.live(name)
        if live is None:
            raise BadInput(f"pool {name!r} is down", "It reads the file when it starts")
        if not live.slurm_job:
            raise BadInput(f"pool {name!r} runs without Slurm", "Send SIGHUP to the process of `plexrl pool run`")
        self._need_slurm().cancel(live.slurm_job, signal="HUP", batch=True)
        return live.slurm_job

    def stop(self, name: str) -> int:
        """Drain and end the pool, and wait for the end of its Slurm job."""
        job_id = self.drain(name)
        slurm = self._need_slurm()
        deadline = time.monotonic() + _STOP_S
        while time.monotonic() < deadline:
            job = slurm.job(job_id)
            if job is None or job.state not in ("RUNNING", "COMPLETING", "PENDING"):
                return job_id
            time.sleep(0.3)
        slurm.cancel(job_id)
        raise PlexrlError(f"pool {name!r} did not end within {_STOP_S:.0f} s and was cancelled", "See its output")

    def _running(self, name: str) -> Live | None:
        """The pool's live file, None also when what it tells of is dead: a head that was killed withdraws nothing."""
        live = self._registry.live(name)
        if live is None:
            return None
        if live.slurm_job:
            job = self._need_slurm().job(live.slurm_job)
            return live if job is not None and job.state in ("RUNNING", "PENDING", "COMPLETING") else None
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(live.address.removeprefix("ipc://"))
            except OSError:
                return None
        return live

    def _need_slurm(self) -> Slurm:
        if self._slurm is None:
            raise Unavailable("Slurm's commands are not on this machine", "Install Slurm, or use a private pool")
        return self._slurm
