"""Workloads of the preset `policies`: many jobs on 2,048 GPUs, calibrated once and frozen.

All of it is ours: the paper's three-month trace is not public. What the calibration set (the share of training nodes,
how many jobs, how long; and the stretch that the published policies accept, see `named`) was turned until our versions
of the four published policies came near their published figures. The load decides such figures: at low load all
policies end together, and with ever more jobs any ratio can be had. So they say that the simulator can be in the
paper's place, and nothing about the paper; what is compared is ours with ours, on this load and on others.

Nothing fits side by side: a sampler's cache and a trainer's activations take what a GPU has, as they do in practice, so
who has a turn moves states. Gangs are the paper's. Steps take 3 to 9 minutes alone.
"""

from collections.abc import Iterable
from random import Random

from msgspec import Struct, structs

from plexrl.scheduler.costs import SWITCH_PRIOR
from plexrl.sim.draws import draw
from plexrl.sim.generate import REWARD_SHARE, Size, rollout_us, sides, step_us, with_share
from plexrl.sim.workload import GIB, Cluster, JobPlan, Lengths, Rollout, Workload

MINUTE_US = 60_000_000


# Trainers and rollout GPUs of the paper's three settings: T = 16, 96, 128 (facts 1.7), R = 8, 24, 64 (facts 1.9). The
# models are dense and ours, so that the roofline of `service_prior` holds. 64 x 8 samples of at most 32,768 tokens:
# facts 7.2 (Hugging Face; 4k to 32k in RollMux); the mean is 0.22 of the maximum, as in Lengths.
SHAPES = {
    "small": Size(14e9, 14e9, 16, 2, 4, 64, 32768, 7200),
    "middle": Size(32.8e9, 32.8e9, 96, 3, 8, 64, 32768, 7200),
    "large": Size(32.8e9, 32.8e9, 128, 8, 8, 64, 32768, 7200),
}
CALLS = 3  # sample calls per replica and step, and one forward_backward: few, for speed
SAMPLER_BYTES = 72 * GIB  # 0.9 of a GPU for weights and cache, as engines take it (traps B5: 0.92)
ACTIVATION_BYTES = 40 * GIB  # ours: sequences of 32k tokens; no two trainers fit a GPU of 80 GiB together


class Load(Struct, frozen=True, kw_only=True):
    """jobs arrive as a Poisson process over about `hours`. train_nodes: those that train; the others sample.

    sizes: weights of SHAPES. train_share: of a step alone, uniform. minutes: of a job alone without its start, uniform.
    lagged: share of jobs with one step of lag.
    """

    name: str
    jobs: int
    hours: float = 0.75
    nodes: int = 256
    train_nodes: int = 136
    sizes: tuple[int, int, int] = (10, 2, 1)
    train_share: tuple[float, float] = (0.1, 0.3)  # facts 7.1: 14 to 31 %; 1.8: 19 to 29 % by the bubbles
    minutes: tuple[float, float] = (15.0, 45.0)
    lagged: float = 0.3


FROZEN = Load(name="frozen", jobs=220)
OTHERS = (
    Load(name="lighter", jobs=150),
    Load(name="longer training", jobs=180, train_share=(0.2, 0.5), train_nodes=160),
)
SEED = 1
DIGEST = "4624faeec4f26e63fe3a726e451d2f2fc1537d0314379d2020c73a63a2cd2b89"  # of make(FROZEN, SEED)


def make(load: Load, seed: int) -> Workload:
    """The workload of a load and a seed."""
    rng, at_us, jobs = Random(f"policies/{seed}"), 0.0, []
    for number in range(load.jobs):
        account = rng.randrange(4)
        plan = job(
            f"j{number:03d}",
            rng.choices(list(SHAPES), load.sizes)[0],
            share=rng.uniform(*load.train_share),
            lag=int(rng.random() < load.lagged),
            minutes=rng.uniform(*load.minutes),
        )
        plan = structs.replace(plan, account=f"a{account}", user=f"a{account}u{rng.randrange(3)}")
        jobs.append(structs.replace(plan, arrival_us=round(at_us)))
        at_us += rng.expovariate(1.0) * load.hours * 60 * MINUTE_US / load.jobs
    return workload(load.name, jobs, seed, nodes=load.nodes, train_nodes=load.train_nodes)


def workload(name: str, jobs: Iterable[JobPlan], seed: int, *, nodes: int, train_nodes: int = 0) -> Workload:
    """Jobs on a cluster; without train_nodes every node trains and samples."""
    sample_nodes = nodes - train_nodes if train_nodes else 0
    cluster = Cluster(nodes=nodes, train_nodes=train_nodes, sample_nodes=sample_nodes)
    return Workload(name=name, gpus=cluster, jobs=tuple(jobs), switch=SWITCH_PRIOR, seed=seed)


def job(
    name: str, shape: str, *, share: float, lag: int, minutes: float, sampler_bytes: int = SAMPLER_BYTES
) -> JobPlan:
    """share: training's of a step alone. minutes: of all its steps alone; three steps at least. sampler_bytes: per GPU
    of the sampler."""
    it = SHAPES[shape]
    train, sample = sides(it)
    plan = JobPlan(
        job=name,
        model=shape,
        lag=lag,
        train=structs.replace(train, calls=1, device_bytes=train.host_bytes + ACTIVATION_BYTES),
        sample=structs.replace(sample, device_bytes=sampler_bytes),
        rollout=Rollout(
            prompts=it.prompts, lengths=Lengths(max_tokens=it.max_tokens, mean_tokens=it.mean_tokens), calls=CALLS
        ),
    )
    reward = REWARD_SHARE * rollout_us(plan, draw(plan, 0, 0))
    plan = with_share(structs.replace(plan, reward_us=round(reward)), share)
    return structs.replace(plan, steps=max(3, round(minutes * MINUTE_US / step_us(plan, steps=2))))
