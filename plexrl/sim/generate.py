"""Workloads by name, with parameters. Sizes of jobs and families of workloads; `files` reads and writes them."""

from random import Random
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta, Struct, structs

from plexrl.scheduler.costs import SWITCH_PRIOR, service_prior
from plexrl.sim.draws import draw
from plexrl.sim.workload import (
    GIB,
    Cluster,
    Count,
    JobPlan,
    Lengths,
    Natural,
    Rollout,
    SamplePlan,
    Share,
    Stalls,
    StepWork,
    TrainPlan,
    Workload,
)
from plexrl.types import BadInput

Part = Annotated[float, Meta(ge=0, lt=1)]

KV_BYTES = 24 * GIB  # ours: a sampler's cache per GPU, given up when it leaves the device (facts 5.2, sleep level 1)
WORKSPACE_BYTES = 8 * GIB  # ours: a trainer's activations per GPU, given up likewise
PUBLISH_BYTES_PER_US = 20_000  # ours; facts 5.5: 92 GB/s beyond the first seconds, over 8 GPUs at once
REWARD_SHARE = 0.05  # of the rollout before it; facts 7.1: 2 to 6 % of a step are neither phase
STUCK_US = (30_000_000, 60_000_000)  # ours: a timeout of 60 s, else the slowest of 1,000 samples makes the whole step
STATE_PER_PARAMETER = 16  # facts 5.7: mixed-precision Adam
WEIGHT_PER_PARAMETER = 2  # facts 5.7: bf16


class Size(Struct, frozen=True):
    """A model and the GPUs that a job of it uses. parameters, active: of all experts and of those that a token meets.

    prompts: per step, each answered by 8 samples. max_tokens, mean_tokens: as in Lengths.
    """

    parameters: float
    active: float
    train_gpus: int
    replicas: int
    replica_gpus: int
    prompts: int
    max_tokens: int
    mean_tokens: float


# Parameters and trainers: facts 1.7 and 5.7 (0.5B on 1, 7.6B on 16, 32.8B on 64 GPUs); 1.5B and 7B on a node: ours.
# Replicas: ours, near the R of facts 1.9. Lengths: facts 7.2, 4k to 32k; mean 0.22 of the maximum, as in Lengths.
SIZES = {
    "0.5B": Size(0.5e9, 0.5e9, 1, 1, 1, 32, 4096, 900),
    "1.5B": Size(1.5e9, 1.5e9, 4, 4, 1, 64, 8192, 1800),
    "7B": Size(7.6e9, 7.6e9, 8, 8, 1, 128, 8192, 1800),
    "7B-16": Size(7.6e9, 7.6e9, 16, 8, 1, 128, 16384, 3600),
    "32B": Size(32.8e9, 32.8e9, 64, 8, 4, 256, 16384, 3600),
}
WEIGHTS = {"0.5B": 4.0, "1.5B": 3.0, "7B": 2.0, "7B-16": 1.0}  # ours: small jobs abound


def sides(it: Size) -> tuple[TrainPlan, SamplePlan]:
    """Trainer and sampler of a size: bytes by parameter, speeds by costs.service_prior."""
    state = int(STATE_PER_PARAMETER * it.parameters / it.train_gpus)
    weights = int(WEIGHT_PER_PARAMETER * it.parameters / it.replica_gpus)
    train = TrainPlan(
        gpus=it.train_gpus,
        device_bytes=state + WORKSPACE_BYTES,
        host_bytes=state,
        service=service_prior(it.active, it.train_gpus),
        publish_us=round(500_000 + WEIGHT_PER_PARAMETER * it.parameters / PUBLISH_BYTES_PER_US),
    )
    sample = SamplePlan(
        replicas=it.replicas,
        gpus=it.replica_gpus,
        device_bytes=weights + KV_BYTES,
        host_bytes=weights,
        service=service_prior(it.active, it.replica_gpus),
    )
    return train, sample


def job(
    name: str, size: str, *, train_share: float, lag: int = 0, stalls: Stalls | None = None, **fields: object
) -> JobPlan:
    """A job of one of the SIZES. train_share: of rollout + training alone, to which training's time per token is set.

    fields: of JobPlan. Decoding and prefill by costs.service_prior, which is set by published rates.
    """
    it = SIZES[size]
    train, sample = sides(it)
    plan = JobPlan(
        job=name,
        model=size,
        lag=lag,
        train=train,
        sample=sample,
        rollout=Rollout(
            prompts=it.prompts,
            lengths=Lengths(max_tokens=it.max_tokens, mean_tokens=it.mean_tokens),
            stalls=stalls or Stalls(),
        ),
        **fields,
    )
    reward = REWARD_SHARE * rollout_us(plan, draw(structs.replace(plan, job="mean"), 0, 0))
    return with_share(structs.replace(plan, reward_us=round(reward)), train_share)


def with_share(plan: JobPlan, share: float, seed: int = 0, steps: int = 5) -> JobPlan:
    """The plan with training tokens so dear that training takes `share` (below 1) of rollout + training, alone.

    Means over drawn steps, the same for every job of a kind; fixed costs of its calls are left as they are, so a tiny
    share is not always reached.
    """
    works = [draw(structs.replace(plan, job="mean"), step, seed) for step in range(steps)]
    rollout = sum(rollout_us(plan, work) for work in works)
    tokens = sum(work.train_tokens for work in works)
    fixed = steps * (plan.train.calls * plan.train.service.train_us(0) + plan.train.service.step_optimizer_us())
    each = max(0.0, rollout * share / (1 - share) - fixed) / tokens
    service = structs.replace(plan.train.service, train_us_per_token=each)
    return structs.replace(plan, train=structs.replace(plan.train, service=service))


def rollout_us(plan: JobPlan, work: StepWork) -> float:
    """What a rollout takes alone on all its replicas; decoding gets faster as its calls end."""
    replicas = min(plan.sample.replicas, len(work.samples))
    service, longest = plan.sample.service, 0.0
    for replica in range(replicas):
        part = work.samples[replica::replicas]
        batch, at = sum(call.sequences for call in part), 0
        now = service.prefill_us_per_token * sum(call.prompt_tokens for call in part) + service.call_us
        end = now
        for call in part:
            now += max(0, call.tokens - at) * service.step_us(batch)
            at = max(at, call.tokens)
            batch -= call.sequences
            end = max(end, now + call.stall_us)
        longest = max(longest, end)
    return longest


def train_us(plan: JobPlan, work: StepWork) -> float:
    """What training takes alone: forward_backward calls, optimizer, publication."""
    service, calls = plan.train.service, plan.train.calls
    return (
        calls * service.call_us
        + service.train_us_per_token * work.train_tokens
        + service.step_optimizer_us()
        + plan.train.publish_us
    )


def step_us(plan: JobPlan, seed: int = 0, steps: int = 5) -> float:
    """Mean time of a step alone, over the first steps: the sum of its phases, or with lag 1 the longer of both."""
    total = 0.0
    for step in range(steps):
        work = draw(plan, step, seed)
        phases = rollout_us(plan, work) + work.reward_us, train_us(plan, work)
        total += max(phases) if plan.lag else sum(phases)
    return total / steps


class Mixed(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Jobs of several sizes, accounts and kinds, arriving as a Poisson process.

    load: GPUs that the jobs would hold on dedicated ones, over the cluster's, on average. sizes: weights. lagged: share
    of jobs with one step of lag; tools: share with multi-turn samples. train_share, steps, turns: ranges, uniform.
    """

    summary: ClassVar[str] = "jobs of several sizes, accounts and kinds, arriving at random"
    nodes: Count = 16
    jobs: Count = 24
    load: Annotated[float, Meta(gt=0)] = 1.5  # ours
    sizes: dict[str, Annotated[float, Meta(gt=0)]] = msgspec.field(default_factory=lambda: dict(WEIGHTS))
    accounts: Count = 3  # ours
    users: Count = 2  # ours: per account
    lagged: Share = 0.5  # ours: facts 1.7 have both kinds
    tools: Share = 0.25  # ours
    turns: tuple[Natural, Natural] = (5, 10)  # facts 7.3: 5 to 150
    train_share: tuple[Part, Part] = (0.08, 0.35)  # facts 7.1: training 14 to 31 %, rollouts up to more than 90 %
    steps: tuple[Count, Count] = (20, 60)  # ours

    def make(self, seed: int) -> Workload:
        """The workload of a seed. Raises BadInput for an unknown size, none, or a range that is none."""
        unknown = set(self.sizes) - set(SIZES)
        if unknown or not self.sizes:
            what = f"sizes: no model size {min(unknown)!r}" if unknown else "sizes is empty"
            raise BadInput(what, f"Choose from {', '.join(SIZES)}")
        for name in ("turns", "train_share", "steps"):
            low, high = getattr(self, name)
            if low > high:
                raise BadInput(f"{name}: {low} is above {high}", "Write the lower bound first")
        cluster, rng = Cluster(nodes=self.nodes), Random(f"mixed/{seed}")
        plans = [self._job(f"j{number:03d}", rng) for number in range(self.jobs)]
        held = [(plan.train.gpus + plan.sample.replicas * plan.sample.gpus) * duration_us(plan) for plan in plans]
        every = sum(held) / len(held) / (self.load * cluster.size)
        at, jobs = 0.0, []
        for plan in plans:
            jobs.append(structs.replace(plan, arrival_us=round(at)))
            at += rng.expovariate(1 / every)
        return Workload(name="mixed", gpus=cluster, jobs=tuple(jobs), switch=SWITCH_PRIOR, seed=seed)

    def _job(self, name: str, rng: Random) -> JobPlan:
        (size,) = rng.choices(list(self.sizes), list(self.sizes.values()))
        account = rng.randrange(self.accounts)
        low, high = self.turns
        stalls = Stalls(turns_min=low, turns_max=high, stuck_us=STUCK_US) if rng.random() < self.tools else Stalls()
        return job(
            name,
            size,
            train_share=rng.uniform(*self.train_share),
            lag=int(rng.random() < self.lagged),
            stalls=stalls,
            account=f"a{account}",
            user=f"a{account}u{rng.randrange(self.users)}",
            steps=rng.randint(*self.steps),
        )


class Equal(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Equal jobs of different users that share one trainer pool, each with GPUs enough for its own sampler.

    stagger: jobs start apart by a share of a step over their number. share_samplers: only one job's sampler GPUs exist.
    """

    summary: ClassVar[str] = "equal jobs that share one pool of training GPUs"
    jobs: Count = 2
    size: str = "7B"
    train_share: Part = 0.2  # facts 7.1
    lag: Annotated[int, Meta(ge=0, le=1)] = 0
    steps: Count = 30  # ours
    stagger: Share = 1.0
    share_samplers: bool = False

    def make(self, seed: int) -> Workload:
        """The workload of a seed. Raises BadInput for an unknown size."""
        if self.size not in SIZES:
            raise BadInput(f"size: no model size {self.size!r}", f"Choose from {', '.join(SIZES)}")
        plans = [
            job(f"j{i}", self.size, train_share=self.train_share, lag=self.lag, steps=self.steps, user=f"u{i}")
            for i in range(self.jobs)
        ]
        apart = self.stagger * step_us(plans[0], seed) / self.jobs
        plans = [structs.replace(plan, arrival_us=round(i * apart)) for i, plan in enumerate(plans)]
        per_node = min(8, plans[0].train.gpus)
        train_nodes = -(-plans[0].train.gpus // per_node)
        sampled = plans[0].sample.replicas * plans[0].sample.gpus * (1 if self.share_samplers else self.jobs)
        sample_nodes = -(-sampled // per_node)
        cluster = Cluster(
            nodes=train_nodes + sample_nodes, per_node=per_node, train_nodes=train_nodes, sample_nodes=sample_nodes
        )
        return Workload(name="equal", gpus=cluster, jobs=tuple(plans), switch=SWITCH_PRIOR, seed=seed)


class Pair(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Two small synchronous jobs on one node of two GPUs: quick, and easy to follow turn by turn."""

    summary: ClassVar[str] = "two small jobs on two GPUs"
    train_share: Part = 0.3
    steps: Count = 60

    def make(self, seed: int) -> Workload:
        """The workload of a seed."""
        jobs = tuple(
            job(f"{user}-1", "0.5B", train_share=self.train_share, steps=self.steps, user=user, account=user)
            for user in ("ada", "bob")
        )
        return Workload(name="pair", gpus=Cluster(nodes=1, per_node=2), jobs=jobs, switch=SWITCH_PRIOR, seed=seed)


FAMILIES = {"mixed": Mixed, "equal": Equal, "pair": Pair}


def duration_us(plan: JobPlan) -> float:
    """A job alone: build of both groups, then its steps."""
    return max(plan.train.build_us, plan.sample.build_us) + plan.steps * step_us(plan, steps=3)


def generate(family: str, seed: int = 0, **parameters: object) -> Workload:
    """A workload of a family. Raises BadInput for an unknown family or parameter, or a wrong value, naming it."""
    if family not in FAMILIES:
        raise BadInput(f"no family of workloads is called {family!r}", f"Choose from {', '.join(FAMILIES)}")
    try:
        return msgspec.convert(parameters, FAMILIES[family]).make(seed)
    except msgspec.ValidationError as error:
        known = ", ".join(FAMILIES[family].__struct_fields__)
        raise BadInput(f"workload {family}: {error}", f"Its parameters are {known}") from error
