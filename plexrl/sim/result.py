"""What a simulated run came to. Times in integer microseconds of the virtual clock; GPU time in GPU-microseconds."""

import hashlib

import msgspec
from msgspec import Struct

from plexrl.types import JobClass


class Bar(Struct, frozen=True, array_like=True, gc=False):
    """What one GPU did in [start_us, end_us). kind: a class of rule 11. gang, job: "" where nobody's."""

    gpu: str
    start_us: int
    end_us: int
    kind: str
    gang: str
    job: str


class StepSpan(Struct, frozen=True, array_like=True, gc=False):
    """One step of a job: from the begin of its rollout to the publication of its weights."""

    job: str
    step: int
    start_us: int
    end_us: int


class TurnMark(Struct, frozen=True, array_like=True, gc=False):
    """A turn began or ended, and why: what the scheduler's trace said."""

    at_us: int
    gang: str
    ended: bool
    reason: str


class JobResult(Struct, frozen=True, kw_only=True):
    """What became of one job.

    gpus_train, gpus_sample: what its groups asked for (replicas included). gpus_alone: what it would hold alone, the
    sum of both. placed_us: all its groups were placed. start_us: its first rollout was submitted (its engines are
    built). end_us: the weights of its last step were published. alone_us: from placement to end of the same job with
    the same draws alone on GPUs of its own, 0 where that was not asked for. busy_us, switch_us, kept_us: GPU time in
    these classes, charged to it. steps: those that it did. tokens: trained.
    """

    job: str
    account: str
    user: str
    kind: JobClass
    gpus_train: int
    gpus_sample: int
    arrival_us: int
    placed_us: int
    start_us: int
    end_us: int
    steps: int
    alone_us: int
    busy_us: int
    switch_us: int
    kept_us: int
    tokens: int

    @property
    def gpus_alone(self) -> int:
        """GPUs that it would hold alone, trainer and sampler apart."""
        return self.gpus_train + self.gpus_sample

    @property
    def wait_us(self) -> int:
        """How long it queued for its placement."""
        return self.placed_us - self.arrival_us


class Result(Struct, frozen=True, kw_only=True):
    """One run of a workload under a policy.

    policy: the policy's name as it was asked for, with placement and order beside it. workload, digest, seed: what was
    run. gpus: of the cluster. wall_us: from 0 to the last job's end. held_us: GPU time in which a GPU belonged to at
    least one job. classes: GPU time by class of rule 11; their sum is wall_us x gpus. switches: loads of a gang in a
    turn of its own; prefetches: loads beside another's turn; hidden_us: GPU time of those copies. train_busy_us,
    train_held_us: GPU time that trainers computed, and that a GPU belonged to at least one trainer. jobs_refused:
    name -> why it could never be placed. events: calls of a Scheduler's event method. wall_s: real seconds that the
    run took. steps: every step of every job. timeline, marks: empty unless kept.
    """

    policy: str
    placement: str
    order: str
    workload: str
    digest: str
    seed: int
    gpus: int
    wall_us: int
    held_us: int
    classes: dict[str, int]
    jobs: tuple[JobResult, ...]
    switches: int
    prefetches: int
    builds: int
    pauses: int
    gathers: int
    relocations: int
    hidden_us: int
    train_busy_us: int
    train_held_us: int
    jobs_refused: dict[str, str]
    events: int
    wall_s: float
    steps: tuple[StepSpan, ...] = ()
    timeline: tuple[Bar, ...] = ()
    marks: tuple[TurnMark, ...] = ()

    @property
    def events_per_s(self) -> float:
        """Events of the scheduler per real second, simulator and scheduler together."""
        return self.events / self.wall_s if self.wall_s else 0.0

    def fingerprint(self) -> str:
        """sha256 of everything but the real seconds: equal for equal runs."""
        return hashlib.sha256(msgspec.msgpack.encode(msgspec.structs.replace(self, wall_s=0.0))).hexdigest()
