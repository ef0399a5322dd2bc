"""What others do, on the same workload: each a configuration of the same simulator, so that the metrics compare.

isolated     Every job has GPUs of its own; its trainer and sampler share them where roles allow it.
colocated    The same on GPUs without roles: trainer and sampler of a job take turns on the larger of both, and each
             hand-over is a sleep, then a wake. Synchronous: a step ahead gains nothing where phases exclude each other.
split_async  A trainer pool and a rollout pool, GPUs of one job in both, one step of lag.
rollmux      Weave, once RollMux (arXiv 2512.11306): jobs time-share one set of rollout nodes and one of training nodes,
             in cyclic order, whole phases; state is loaded at a phase's begin and offloaded at its end; when 80 % of
             a rollout is done, its tail moves to few workers. Differs: jobs are put together by our admission
             (predicted stretch within bounds), not at the least cost of provisioning; the cluster's size is given.
llmd         Time slicing by llm-d (facts 9): a first come, first served lock per group of GPUs, held for a phase; a
             hand-over is an offload, then a load; nothing stays, nothing is prefetched, nobody is preempted. Differs: a
             lock is on the gang's GPUs, not on all of a group that a user named, which is kinder to it.

Switch cost, builds, draws and service times are the workload's in all of them.
"""

from collections.abc import Callable
from typing import Any

from msgspec import Struct, structs

from plexrl.scheduler import Policy
from plexrl.sim.program import GAP_US
from plexrl.sim.result import Result
from plexrl.sim.run import run
from plexrl.sim.workload import Workload
from plexrl.types import BadInput

_NEVER_US = 365 * 86_400_000_000
# A phase is one turn: nobody breaks it off, and it is kept for the round trips inside it.
_PHASES = Policy(
    order="fifo",
    anticipation_us=2 * GAP_US,
    gradient_anticipation_us=_NEVER_US,
    quantum_us=_NEVER_US,
    sample_quantum_us=_NEVER_US,
    min_turn_factor=0.0,
    starvation_us=_NEVER_US,
    interactive_switches_per_hour=0,
    gather_share=1.0,
    backfill=False,
    prefetch=False,
    lazy=False,
    natural_ends=False,
)


class Baseline(Struct, frozen=True):
    """A policy, and what is made of the workload before it runs."""

    policy: Policy
    prepare: Callable[[Workload], Workload]


def _as_it_is(workload: Workload) -> Workload:
    return workload


def _one_by_one(workload: Workload) -> Workload:
    """Copies in the one direction after those in the other."""
    return structs.replace(workload, switch=structs.replace(workload.switch, exchange=False))


def _colocated(workload: Workload) -> Workload:
    gpus = structs.replace(workload.gpus, train_nodes=0, sample_nodes=0)
    jobs = tuple(structs.replace(plan, lag=0) for plan in workload.jobs)
    return _one_by_one(structs.replace(workload, gpus=gpus, jobs=jobs))


def _split_async(workload: Workload) -> Workload:
    jobs = tuple(structs.replace(plan, lag=1) for plan in workload.jobs)
    return structs.replace(parted(workload), jobs=jobs)


def parted(workload: Workload) -> Workload:
    """The workload on nodes that train or sample, never both: as it is if all are so already, else parted in the
    proportion of the GPUs that its jobs ask for. Raises BadInput when that leaves no room for the largest gangs."""
    cluster = workload.gpus
    if cluster.train_nodes and cluster.train_nodes + cluster.sample_nodes == cluster.nodes:
        return workload
    train = sum(plan.train.gpus * plan.steps for plan in workload.jobs)
    sample = sum(plan.sample.gpus * plan.sample.replicas * plan.steps for plan in workload.jobs)
    least = max(-(-plan.train.gpus // cluster.per_node) for plan in workload.jobs)
    most = cluster.nodes - max(
        -(-plan.sample.gpus * plan.sample.replicas // cluster.per_node) for plan in workload.jobs
    )
    if least > most:
        raise BadInput(
            f"workload {workload.name}: its largest trainer and its largest sampler do not fit {cluster.nodes} nodes "
            "side by side",
            "Give it more nodes, or use a baseline that shares them",
        )
    nodes = min(most, max(least, round(cluster.nodes * train / (train + sample))))
    return structs.replace(
        workload, gpus=structs.replace(cluster, train_nodes=nodes, sample_nodes=cluster.nodes - nodes)
    )


BASELINES = {
    "isolated": Baseline(Policy(placement="isolated", order="fifo"), _as_it_is),
    "colocated": Baseline(structs.replace(_PHASES, placement="isolated"), _colocated),
    "split_async": Baseline(Policy(placement="isolated", order="fifo"), _split_async),
    "rollmux": Baseline(
        structs.replace(_PHASES, placement="pack", order="round_robin", gather_share=0.8),
        lambda workload: _one_by_one(parted(workload)),
    ),
    "llmd": Baseline(structs.replace(_PHASES, placement="pack"), _one_by_one),
}


def baseline(name: str, workload: Workload, **options: Any) -> Result:
    """Run the workload as a baseline does. options: of `run`. Raises BadInput: unknown name, or see `parted`."""
    if name not in BASELINES:
        raise BadInput(f"no baseline is called {name!r}", f"Use one of {', '.join(BASELINES)}")
    chosen = BASELINES[name]
    return run(chosen.prepare(workload), chosen.policy, name=name, **options)
