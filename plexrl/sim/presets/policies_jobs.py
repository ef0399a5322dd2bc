"""Workloads of the preset `policies`: many jobs on 2,048 GPUs, calibrated once and frozen.

All of it is ours: the paper's three-month trace is not public. What the calibration set (share of training nodes,
arrivals, sizes, lengths of jobs; and the stretch that the published policies accept, see `named`) was turned until our
versions of the four published policies came near their published figures. The load decides such figures: at low load
all policies end together, and with ever more jobs any ratio can be had. So they say that the simulator can be in the
paper's place, and nothing about the paper; what is compared is ours with ours, on this load and on others.
"""

from collections.abc import Iterable
from random import Random

from msgspec import Struct, structs

from plexrl.scheduler.costs import SWITCH_PRIOR
from plexrl.sim.draws import draw
from plexrl.sim.generate import REWARD_SHARE, Size, rollout_us, sides, step_us, with_share
from plexrl.sim.workload import Cluster, JobPlan, Lengths, Rollout, Workload

MINUTE_US = 60_000_000


# Trainers and rollout GPUs of the paper's three settings: T = 16, 96, 128 (facts 1.7), R = 8, 24, 64 (facts 1.9). The
# models are dense and ours, so that the roofline of `service_prior` holds; lengths as in `generate`.
SHAPES = {
    "small": Size(14e9, 14e9, 16, 4, 2, 64, 8192, 1800),
    "middle": Size(32.8e9, 32.8e9, 96, 3, 8, 32, 8192, 1800),
    "large": Size(32.8e9, 32.8e9, 128, 8, 8, 32, 8192, 1800),
}
CALLS = 3  # sample calls per replica and step, and one forward_backward: few, for speed


class Load(Struct, frozen=True, kw_only=True):
    """jobs arrive as a Poisson process over about `hours`. train_nodes: those that train; the others sample.

    sizes: weights of SHAPES. train_share: of a step alone, uniform. minutes: of a job alone without its start, uniform.
    lagged: share of jobs with one step of lag.
    """

    name: str
    jobs: int
    hours: float
    nodes: int = 256
    train_nodes: int = 104
    sizes: tuple[int, int, int] = (10, 2, 1)
    train_share: tuple[float, float] = (0.1, 0.3)  # facts 7.1: 14 to 31 %; 1.8: 19 to 29 % by the bubbles
    minutes: tuple[float, float] = (4.0, 10.0)
    lagged: float = 0.3


FROZEN = Load(name="frozen", jobs=300, hours=0.5)
OTHERS = (
    Load(name="lighter", jobs=200, hours=0.5),
    Load(name="longer training", jobs=260, hours=0.5, train_share=(0.2, 0.5), train_nodes=128),
)
SEED = 1
DIGEST = "fb1efa8e1e5d02527cee7d4d78e351162006cc100936e51e4590ccd770a3de98"  # of make(FROZEN, SEED)


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


def job(name: str, shape: str, *, share: float, lag: int, minutes: float) -> JobPlan:
    """share: training's of a step alone. minutes: of all its steps alone; three steps at least."""
    it = SHAPES[shape]
    train, sample = sides(it)
    plan = JobPlan(
        job=name,
        model=shape,
        lag=lag,
        train=structs.replace(train, calls=1),
        sample=sample,
        rollout=Rollout(
            prompts=it.prompts, lengths=Lengths(max_tokens=it.max_tokens, mean_tokens=it.mean_tokens), calls=CALLS
        ),
    )
    reward = REWARD_SHARE * rollout_us(plan, draw(plan, 0, 0))
    plan = with_share(structs.replace(plan, reward_us=round(reward)), share)
    return structs.replace(plan, steps=max(3, round(minutes * MINUTE_US / step_us(plan, steps=2))))
