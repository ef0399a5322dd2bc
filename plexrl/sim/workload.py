"""What a simulation is given: a cluster and the jobs that come to it. Values only; `draws` turns a plan into steps.

A job is a closed loop. Step n: roll out (all its sample calls at once, on all replicas), think for the reward, train
(`train.calls` forward_backward calls, then optim_step, then publish). lag 0: the next rollout begins when the step's
weights are published. lag 1: it begins when the rollout before it has ended and the weights of step n-1 are there.
A job with a `recorded` stream submits those calls instead, each think_us after what it had been given before.
"""

import hashlib
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from plexrl.scheduler.costs import ServiceModel, SwitchModel
from plexrl.types import CallKind, JobClass, Role

GIB = 1 << 30
Count = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
Positive = Annotated[float, Meta(ge=0)]


class Lengths(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tokens of a sample: log-normal by prompt times log-normal within the group, cut at max_tokens.

    mean_tokens: mean before the cut. at_cap: share of samples at max_tokens; what the cut leaves below that share is
    made up by runaways. drift: standard deviation of the logarithm of a job's mean over its steps, an AR(1) series;
    memory: its coefficient. prompt_tokens: of one prompt.
    """

    max_tokens: Count = 8192  # facts 7.2: JigsawRL; 4k to 32k RollMux, 65,536 Moonlight
    mean_tokens: Annotated[float, Meta(gt=0)] = 1800.0  # ours: puts 30 to 50 % of a rollout behind its 90th percentile
    sigma_prompt: Positive = 0.7  # facts 7.2: 0.6 to 0.8
    sigma_sample: Positive = 0.4  # facts 7.2: 0.3 to 0.5
    at_cap: Share = 0.05  # facts 7.2: 2 to 10 %
    drift: Positive = 0.1  # ours: facts 7.2 name the drift, not its size
    memory: Annotated[float, Meta(ge=0, lt=1)] = 0.9  # ours: consecutive steps are alike (facts 7.2, JigsawRL)
    prompt_tokens: Natural = 512  # ours: a maths prompt with its instructions


class Stalls(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Waits for tools inside a sample: each of its turns waits once, by a mixture of three log-normal or uniform parts.

    turns_min, turns_max: turns of a sample, uniform; both 0: no tools. spread: sigma of the factor by which a job's
    tools are slow in all of its samples.
    """

    turns_min: Natural = 0  # facts 7.3: 5 to 150 with tools
    turns_max: Natural = 0
    quick_share: Share = 0.80  # facts 7.3
    quick_us: Natural = 500_000  # facts 7.3: median
    slow_share: Share = 0.18  # facts 7.3
    slow_us: Natural = 5_000_000  # facts 7.3: median
    stuck_us: tuple[Natural, Natural] = (30_000_000, 300_000_000)  # facts 7.3: the remaining 2 %, or a timeout
    sigma: Positive = 0.5  # ours: facts 7.3 give medians only
    spread: Positive = 0.5  # ours: facts 7.3 say that slow environments are correlated inside a job


class Rollout(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One step's samples: prompts times group, dealt to the replicas prompt by prompt.

    calls: sample calls that a replica's share is cut into, shortest sequences first, so that its tail shows.
    """

    prompts: Count = 64  # facts 7.2: 64 x 8 (Hugging Face); 400 to 800 x 8 to 16 (Seer)
    group: Count = 8
    lengths: Lengths = Lengths()
    stalls: Stalls = Stalls()
    calls: Count = 10  # ours: the slowest 10 % are a call of their own


class TrainPlan(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A job's trainer. gpus: its gang. device_bytes, host_bytes, residual_bytes: per GPU, as in GroupSpec.

    service: of the whole gang. calls: forward_backward calls per step. publish_us: of the publish call, which makes a
    step's weights usable by the job's sampler. build_us: a cold start.
    """

    gpus: Count
    device_bytes: Natural
    service: ServiceModel
    host_bytes: Natural = 0
    residual_bytes: Natural = 2 * GIB  # ours: context, graphs, communicators (facts 9: 96 % of the memory is freed)
    calls: Count = 4  # ours: mini-batches of a step
    publish_us: Natural = 2_000_000  # ours; facts 5.5: 4 to 7 s for 100B to 235B on 8 GPUs
    build_us: Natural = 80_000_000  # facts 4.1: up to 80 s


class SamplePlan(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A job's sampler: replicas of gpus GPUs each. The other fields as in TrainPlan; service of one replica."""

    replicas: Count
    gpus: Count
    device_bytes: Natural
    service: ServiceModel
    host_bytes: Natural = 0
    residual_bytes: Natural = 2 * GIB  # ours, as in TrainPlan
    build_us: Natural = 60_000_000  # facts 5.2: 47 to 98 s cold


class RecordedCall(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One call of a recorded job. seen: how many of `Recorded.delivered` it had been given before it submitted this;
    think_us: from the last of them, or from its arrival, to the submission. service_us: alone on the whole gang (one
    replica), by the fitted model. units: tokens. step: training step that it belongs to, from 0.
    """

    kind: CallKind
    role: Role
    seen: Natural
    think_us: Natural
    service_us: Natural
    units: Natural = 1
    step: Natural = 0


class Recorded(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A job as it really ran. calls: in the order of submission; training calls run in it. delivered: indices into
    calls, in the order in which the job was given the results."""

    calls: tuple[RecordedCall, ...]
    delivered: tuple[Natural, ...]


class JobPlan(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One logical job. lag: steps by which its samples may be old, 0 or 1. reward_us: from the end of a rollout to the
    submission of its training. model: a label. base: jobs of one non-empty base share its worker groups, each with a
    LoRA adapter of its own; their train and sample plans must be equal. recorded: instead of drawn steps.
    """

    job: Annotated[str, Meta(min_length=1)]
    train: TrainPlan
    sample: SamplePlan
    rollout: Rollout = Rollout()
    steps: Count = 20
    account: str = ""
    user: str = ""
    kind: JobClass = JobClass.NORMAL
    arrival_us: Natural = 0
    lag: Annotated[int, Meta(ge=0, le=1)] = 0
    reward_us: Natural = 5_000_000  # ours: rules and small verifiers; facts 7.1: 2 to 6 % of a step are neither phase
    model: str = ""
    base: str = ""
    recorded: Recorded | None = None


class Cluster(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """nodes of per_node GPUs. bytes: of one GPU. host_bytes: of one node, 0 = unbounded. train_nodes: the first so
    many take trainers only; sample_nodes: the next so many samplers only; the rest take both."""

    nodes: Count
    per_node: Count = 8
    bytes: Count = 80 * GIB  # facts 4.1, 5.1: H100, H800
    host_bytes: Natural = 1536 * GIB  # facts 7.4: 1 to 2 TB
    train_nodes: Natural = 0
    sample_nodes: Natural = 0

    @property
    def size(self) -> int:
        """GPUs."""
        return self.nodes * self.per_node


class Workload(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that a simulation depends on beside the policy. jobs: by arrival."""

    name: str
    gpus: Cluster
    jobs: tuple[JobPlan, ...]
    switch: SwitchModel
    seed: int = 0

    def digest(self) -> str:
        """SHA-256 of its MessagePack form, in hex: equal workloads have equal digests, on every machine.

        Numbers take the types of their fields first: 2000 and 2000.0 microseconds are the same.
        """
        same = msgspec.convert(msgspec.to_builtins(self), Workload)
        return hashlib.sha256(msgspec.msgpack.encode(same)).hexdigest()


class SampleWork(Struct, frozen=True, gc=False):
    """One sample call: sequences that start together and of which the slowest ends the call.

    prompt_tokens: of all sequences. tokens: decode steps of the sequence that ends last. sequences: in the batch.
    stall_us: what that sequence waits for tools. units: tokens drawn by all sequences.
    """

    prompt_tokens: int
    tokens: int
    sequences: int
    stall_us: int
    units: int


class StepWork(Struct, frozen=True, gc=False):
    """What `draws.draw(plan, step, seed)` gives. samples: replica by replica in turn, the shortest of each first.

    train_tokens: prompts and drawn tokens of the whole step.
    """

    samples: tuple[SampleWork, ...]
    train_tokens: int
    reward_us: int
