"""What the head believes of a hello: the decision, apart from MUNGE and Slurm, which tests/slurm asks for real."""

import asyncio
import os

import msgspec
import pytest

from plexrl.pool.admission import PrivateAdmission, SlurmAdmission
from plexrl.slurm.adapter import JobInfo
from plexrl.types import BadInput, Peer, Unavailable
from plexrl.wire import munge
from plexrl.wire.messages import Hello, Proof, encode_proof

SOUND = JobInfo(
    id=7,
    state="RUNNING",
    uid=1001,
    user="alice",
    account="ml",
    restart_count=0,
    start_time=1,
    gpus=0,
    tres={},
    licenses={"plexrl_lab": 1},
    nodes=("n1",),
    partition="cpu",
    reason="None",
    admin_comment='JS1:abc PXL1:{"pool":"lab","gres":"gpu:{2}\\"","gpus":2} more',
    qos="long",
)


class Book:
    """Stands where the adapter stands: answers with the jobs it was given, or not at all."""

    def __init__(self, *jobs: JobInfo, silent: bool = False):
        self._jobs = {job.id: job for job in jobs}
        self._silent = silent

    def job(self, number: int) -> JobInfo | None:
        return self.jobs([number]).get(number)

    def jobs(self, numbers: list[int]) -> dict[int, JobInfo]:
        if self._silent:
            raise Unavailable("slurmctld does not answer")
        return {number: self._jobs[number] for number in numbers if number in self._jobs}


def admit(monkeypatch, slurm: Book, proof: dict | None = None, uid: int = 1001, key: str = "K" * 40) -> Peer:
    admission = SlurmAdmission(slurm, "lab", "one", None)
    told = {"pool": "lab", "instance": "one", "nonce": admission.nonce, "job": 7, "restart": 0, "proxy_key": "K" * 40}
    payload = encode_proof(Proof(**(told | (proof or {}))))
    monkeypatch.setattr(munge, "decode", lambda credential, socket: munge.Credential(uid, uid, payload))
    return asyncio.run(admission.admit(Hello("lab", "MUNGE:..", 7, 0), key))


def test_a_sound_job_is_admitted_by_what_slurm_says_of_it(monkeypatch):
    assert admit(monkeypatch, Book(SOUND)) == Peer(
        uid=1001, user="alice", account="ml", job="7.0", qos="long", partition="cpu", declared_gpus=2
    )


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"uid": 1002}, "not of uid 1001"),
        ({"state": "PENDING"}, "is PENDING"),
        ({"state": "COMPLETED"}, "is COMPLETED"),
        ({"restart_count": 1}, "run 1"),
        ({"admin_comment": ""}, "did not ask for pool"),
        ({"admin_comment": 'PXL1:{"pool":"other"}'}, "did not ask for pool"),
        ({"admin_comment": "PXL1:{not json"}, "did not ask for pool"),
        ({"admin_comment": 'PXL1:["lab"]'}, "did not ask for pool"),
        ({"gpus": 1}, "holds 1 GPUs"),
        ({"licenses": {}}, "does not hold licence plexrl_lab"),
        ({"licenses": {"plexrl_other": 1}}, "does not hold licence plexrl_lab"),
    ],
)
def test_a_job_that_is_not_what_it_says_is_refused(monkeypatch, change, told):
    with pytest.raises(BadInput, match=told):
        admit(monkeypatch, Book(msgspec.structs.replace(SOUND, **change)))


def test_a_job_that_slurm_does_not_show_is_refused(monkeypatch):
    with pytest.raises(BadInput, match="Operator"):
        admit(monkeypatch, Book())


@pytest.mark.parametrize(
    ("proof", "told"),
    [
        ({"nonce": "x"}, "another head"),
        ({"instance": "two"}, "another head"),
        ({"pool": "other"}, "another head"),
        ({"proxy_key": "L" * 40}, "another connection"),
        ({"job": 8}, "another job"),
        ({"restart": 1}, "another job"),
    ],
)
def test_a_credential_made_for_something_else_is_refused(monkeypatch, proof, told):
    with pytest.raises(BadInput, match=told):
        admit(monkeypatch, Book(SOUND), proof)


def test_a_silent_slurm_refuses_nobody_for_good(monkeypatch):
    with pytest.raises(Unavailable):
        admit(monkeypatch, Book(SOUND, silent=True))


@pytest.mark.parametrize(
    ("jobs", "told"),
    [
        ([SOUND], None),
        ([msgspec.structs.replace(SOUND, state="SUSPENDED")], None),
        ([], "no longer knows"),
        ([msgspec.structs.replace(SOUND, restart_count=1)], "requeued"),
        ([msgspec.structs.replace(SOUND, state="TIMEOUT")], "is TIMEOUT"),
        ([msgspec.structs.replace(SOUND, licenses={})], "gave its licence back"),
    ],
)
def test_jobs_are_over_when_slurm_says_so(jobs, told):
    peer = Peer(uid=1001, user="alice", account="ml", job="7.0")
    over = asyncio.run(SlurmAdmission(Book(*jobs), "lab", "one", None).over([peer]))
    assert (told in over["7.0"]) if told else over == {}


def test_nobody_is_over_while_slurm_is_silent():
    peer = Peer(uid=1001, user="alice", account="ml", job="7.0")
    assert asyncio.run(SlurmAdmission(Book(silent=True), "lab", "one", None).over([peer])) == {}


def test_a_private_job_is_the_process_that_attached():
    admission = PrivateAdmission()
    peer = asyncio.run(admission.admit(Hello("mine", "", os.getpid(), 0), "K" * 40))
    assert (peer.uid, peer.job) == (os.getuid(), f"{os.getpid()}.0")
    gone = Peer(uid=peer.uid, user=peer.user, account="private", job="4194304.0")
    assert asyncio.run(admission.over([peer, gone])) == {"4194304.0": "its process ended"}
