"""Who may attach: MUNGE says which uid speaks, slurmctld what the job is. A private pool serves its own uid alone."""

import asyncio
import os
import pwd
import secrets
from collections.abc import Iterable
from typing import Protocol

import msgspec

from plexrl.slurm.adapter import Association, Slurm
from plexrl.types import BadInput, Peer, PlexrlError
from plexrl.wire import munge
from plexrl.wire.messages import Hello, decode_proof

REQUEST_MARK = "PXL1:"


class Standing(msgspec.Struct, frozen=True):
    """What Slurm says of accounts and users. used: as `Slurm.gpu_seconds`, empty where it was not asked for."""

    associations: tuple[Association, ...] = ()
    used: dict[tuple[str, str], int] = {}


class Admission(Protocol):
    """Decides about hellos, and which admitted jobs are over."""

    nonce: str

    async def admit(self, hello: Hello, client_key: str) -> Peer:
        """The peer behind a hello. Raises PlexrlError saying why it is not admitted."""
        ...

    async def over(self, peers: Iterable[Peer]) -> dict[str, str]:
        """Jobs among these that ended, with the reason."""
        ...

    async def standing(self, usage: bool) -> Standing:
        """Accounts and users; their usage of GPUs outside of the pool only if asked for. Raises PlexrlError."""
        ...


class PrivateAdmission:
    """The socket lies in a 0700 folder of this uid: whoever reaches it is this uid (or root)."""

    nonce = ""

    def __init__(self) -> None:
        self._uid = os.getuid()

    async def admit(self, hello: Hello, client_key: str) -> Peer:
        """Always admitted; the job is the process that attached."""
        try:
            user = pwd.getpwuid(self._uid).pw_name
        except KeyError:
            user = str(self._uid)
        return Peer(uid=self._uid, user=user, account="private", job=f"{hello.job}.{hello.restart}")

    async def over(self, peers: Iterable[Peer]) -> dict[str, str]:
        """A private job is over when its process is gone."""
        return {
            peer.job: "its process ended" for peer in peers if not os.path.exists(f"/proc/{peer.job.partition('.')[0]}")
        }

    async def standing(self, usage: bool) -> Standing:
        """There is no Slurm behind a private pool."""
        return Standing()


class SlurmAdmission:
    """A site pool: the credential is restricted to our uid and made for this head and key; the job is RUNNING, is that
    user's, is of this pool by its AdminComment (which users cannot edit), holds no GPU and holds the pool's licence.
    """

    def __init__(self, slurm: Slurm, pool: str, instance: str, munge_socket: str | None):
        self._slurm = slurm
        self._pool = pool
        self._instance = instance
        self._munge_socket = munge_socket
        self.nonce = secrets.token_hex(16)

    async def admit(self, hello: Hello, client_key: str) -> Peer:
        """Raises BadInput with the reason for the user, Unavailable when MUNGE or Slurm does not answer."""
        credential = await asyncio.to_thread(munge.decode, hello.credential, self._munge_socket)
        proof = decode_proof(credential.payload)
        if (proof.pool, proof.instance, proof.nonce) != (self._pool, self._instance, self.nonce):
            raise BadInput("the credential was made for another head", "Attach again")
        if proof.proxy_key != client_key:
            raise BadInput("the credential was made for another connection", "Attach again")
        if (proof.job, proof.restart) != (hello.job, hello.restart):
            raise BadInput("the credential was made for another job", "Attach again")
        job = await asyncio.to_thread(self._slurm.job, proof.job)
        if job is None:
            raise BadInput(
                f"slurmctld does not show job {proof.job} to this pool",
                "The service account must be a Slurm Operator where PrivateData hides jobs",
            )
        if job.uid != credential.uid:
            raise BadInput(f"job {proof.job} is not of uid {credential.uid}", "Attach your own job")
        if job.state != "RUNNING" or job.restart_count != proof.restart:
            raise BadInput(f"job {proof.job} is {job.state}, run {job.restart_count}", "Only a running job attaches")
        request = _request(job.admin_comment)
        if request.get("pool") != self._pool:
            raise BadInput(f"job {proof.job} did not ask for pool {self._pool!r}", "Use sbatch --plexrl-pool")
        if job.gpus:
            raise BadInput(f"job {proof.job} holds {job.gpus} GPUs", "A logical job holds none")
        if not job.licenses.get(f"plexrl_{self._pool}"):
            raise BadInput(f"job {proof.job} does not hold licence plexrl_{self._pool}", "Submit it again")
        gpus = request.get("gpus")
        return Peer(
            uid=job.uid,
            user=job.user,
            account=job.account,
            job=f"{job.id}.{job.restart_count}",
            qos=job.qos,
            partition=job.partition,
            declared_gpus=gpus if isinstance(gpus, int) and gpus > 0 else 0,
        )

    async def over(self, peers: Iterable[Peer]) -> dict[str, str]:
        """One call for all jobs. While slurmctld does not answer nobody is over."""
        peers = list(peers)
        try:
            jobs = await asyncio.to_thread(self._slurm.jobs, [int(p.job.partition(".")[0]) for p in peers])
        except PlexrlError:
            return {}
        over: dict[str, str] = {}
        for peer in peers:
            number, _, restart = peer.job.partition(".")
            job = jobs.get(int(number))
            if job is None:
                over[peer.job] = "slurmctld no longer knows its Slurm job"
            elif job.restart_count != int(restart):
                over[peer.job] = "its Slurm job was requeued"
            elif job.state not in ("RUNNING", "SUSPENDED"):
                over[peer.job] = f"its Slurm job is {job.state}"
            elif not job.licenses.get(f"plexrl_{self._pool}"):
                over[peer.job] = "its Slurm job gave its licence back"
        return over

    async def standing(self, usage: bool) -> Standing:
        """Two calls at most."""
        associations = await asyncio.to_thread(self._slurm.associations)
        used = await asyncio.to_thread(self._slurm.gpu_seconds) if usage else {}
        return Standing(tuple(associations), used)


def _request(admin_comment: str) -> dict[str, object]:
    """The object of `PXL1:{"pool": ...}`, wherever it stands in the AdminComment; empty where there is none."""
    _, found, rest = admin_comment.partition(REQUEST_MARK)
    if not found:
        return {}
    try:
        request = msgspec.json.decode(_first_object(rest))
    except msgspec.DecodeError:
        return {}
    return request if isinstance(request, dict) else {}


def _first_object(text: str) -> str:
    """The JSON object that text begins with; whatever else the comment holds follows it."""
    depth, quoted, escaped = 0, False, False
    for at, char in enumerate(text):
        if escaped:
            escaped = False
        elif char == "\\":
            escaped = True
        elif char == '"':
            quoted = not quoted
        elif not quoted:
            depth += (char == "{") - (char == "}")
            if depth == 0:
                return text[: at + 1]
    return text
