"""`python -m bench.ablation [--json]`: what each mechanism of the scheduler is worth, switched off in turn.

Every mechanism has the case in which it matters: a small workload, the full setting, and the same without it, in the
same run. `worth` is the figure without the mechanism over the figure with it: above 1 it helps. A case is chosen so
that the mechanism has something to do; on other workloads it may do nothing. All runs are simulated, so the figures are
the same on every machine.
"""

import argparse
import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from unittest.mock import patch

from msgspec import Struct, structs

from plexrl.scheduler import Policy
from plexrl.scheduler.costs import SwitchModel
from plexrl.sim.generate import job
from plexrl.sim.metrics import pool_gpu_hours_per_step, stretches
from plexrl.sim.result import Result
from plexrl.sim.run import run
from plexrl.sim.workload import GIB, Cluster, JobPlan, Workload
from plexrl.types import JobClass, PlexrlError

FULL = Policy(placement="spread_backfill", max_stretch=dict.fromkeys(JobClass, 64.0))
SLOW = SwitchModel(gbps_in=2.4, gbps_out=2.4, overhead_us=100_000, exchange=False)  # facts 5.7: memory-saver rate
USUAL = SwitchModel(gbps_in=24.0, gbps_out=24.0, overhead_us=100_000, exchange=True)  # facts 5.7


class Case(Struct, frozen=True):
    """One mechanism. on, off: (workload, policy) with and without it. measure: of a run, the smaller the better.

    learnt: False switches off the windows that the scheduler has learnt too, for which a policy has no knob.
    """

    mechanism: str
    case: str
    on: tuple[Workload, Policy]
    off: tuple[Workload, Policy]
    figure: str
    measure: Callable[[Result], float]
    learnt: bool = True


def jobs(count: int, size: str = "7B", *, name: str = "j", **fields: object) -> list[JobPlan]:
    """Equal jobs of different users, a few seconds apart."""
    plan = {"train_share": 0.3, "steps": 15} | fields
    return [job(f"{name}{n}", size, arrival_us=n * 7_000_000, user=f"{name}{n}", **plan) for n in range(count)]


def workload(plans: list[JobPlan], gpus: int = 8, bytes_: int = 80, switch: SwitchModel = USUAL) -> Workload:
    """gpus: of one node. bytes_: GiB of one GPU."""
    cluster = Cluster(nodes=1, per_node=gpus, bytes=bytes_ * GIB, host_bytes=0)
    return Workload(name="ablation", gpus=cluster, jobs=tuple(plans), switch=switch, seed=1)


def without(given: Workload, **changed: object) -> tuple[tuple[Workload, Policy], tuple[Workload, Policy]]:
    """(on, off): the same workload, with the full policy and with some of its knobs changed."""
    return (given, FULL), (given, structs.replace(FULL, **changed))


def retrained(plans: list[JobPlan], **changed: object) -> list[JobPlan]:
    """Jobs with other trainers."""
    return [structs.replace(plan, train=structs.replace(plan.train, **changed)) for plan in plans]


def rolled(plans: list[JobPlan], **changed: object) -> list[JobPlan]:
    """Jobs with other rollouts."""
    return [structs.replace(plan, rollout=structs.replace(plan.rollout, **changed)) for plan in plans]


def quick(plans: list[JobPlan]) -> list[JobPlan]:
    """Jobs whose engines are up at once, so that only their calls count."""
    return [
        structs.replace(
            plan,
            train=structs.replace(plan.train, build_us=0, residual_bytes=0),
            sample=structs.replace(plan.sample, build_us=0, residual_bytes=0),
        )
        for plan in plans
    ]


def mean_stretch(result: Result) -> float:
    """Of all jobs: arrival to end, over the time alone."""
    values = stretches(result)
    return sum(values) / len(values)


def worst_stretch(result: Result) -> float:
    """Of the job that suffers most: arrival to end, over the time alone."""
    return max(stretches(result))


def cases() -> list[Case]:
    """One for each mechanism."""
    hours = "GPU-hours per step", pool_gpu_hours_per_step
    roomy = workload(jobs(3), bytes_=200, switch=SLOW)
    tight = workload(jobs(3), bytes_=60, switch=SLOW)
    two_of_three = workload(jobs(3, "0.5B", steps=30), gpus=1, bytes_=85, switch=SLOW)
    few = rolled(jobs(3, "0.5B", steps=10, train_share=0.5), prompts=128, calls=1)
    many = rolled(jobs(5, "0.5B", name="s", steps=60, train_share=0.05), prompts=4, calls=1)
    crowd = workload(quick([*few, *many]), gpus=1, bytes_=400)
    singles = rolled(jobs(8, "0.5B", name="s", steps=30), calls=2)
    mixed = workload(quick([*jobs(2, steps=8), *singles]))
    tails = workload(rolled(jobs(3), calls=10))
    pieces = workload(retrained(jobs(3, train_share=0.3), calls=12), bytes_=60, switch=SLOW)
    alike = jobs(4)
    shared = [structs.replace(plan, base="7B") for plan in alike]
    plain, first_come = structs.replace(FULL, prefetch=False), structs.replace(FULL, order="fifo")
    hasty = structs.replace(FULL, quantum_us=1_000_000, sample_quantum_us=1_000_000)
    patient = structs.replace(FULL, quantum_us=15_000_000, gradient_anticipation_us=15_000_000)
    return [
        Case(
            "lazy offload",
            "3 jobs whose states fit together, no prefetch to hide the copies",
            (roomy, plain),
            (roomy, structs.replace(plain, lazy=False)),
            *hours,
        ),
        Case("prefetch", "3 jobs, two states fit, slow copies", *without(two_of_three, prefetch=False), *hours),
        Case(
            "HRRS",
            "3 jobs of long calls, 5 of short ones, one GPU; beside fifo",
            (crowd, structs.replace(FULL, order="hrrs")),
            (crowd, structs.replace(FULL, order="fifo")),
            "worst stretch",
            worst_stretch,
        ),
        Case(
            "anticipation",
            "3 jobs, slow copies",
            *without(tight, anticipation_us=0, gradient_anticipation_us=0),
            *hours,
            learnt=False,
        ),
        Case(
            "minimum turn",
            "3 jobs, slow copies, quanta of a second",
            (tight, hasty),
            (tight, structs.replace(hasty, min_turn_factor=0.0)),
            *hours,
        ),
        Case(
            "backfill",
            "2 jobs on all GPUs, 8 on one each, order fifo",
            (mixed, first_come),
            (mixed, structs.replace(first_come, backfill=False)),
            "mean stretch",
            mean_stretch,
        ),
        Case("long-tail gathering", "3 jobs of 8 replicas", *without(tails, gather_share=1.0), *hours),
        Case("shared base", "4 LoRA jobs of one base", (workload(shared), FULL), (workload(alike), FULL), *hours),
        Case(
            "natural ends",
            "3 jobs, training in 12 pieces, quantum 15 s",
            (pieces, patient),
            (pieces, structs.replace(patient, natural_ends=False)),
            *hours,
        ),
    ]


def _never(think: object, prior_us: int, switch_us: int) -> int:
    """A window of anticipation that keeps nothing."""
    return 0


def measure(case: Case) -> dict:
    """Both runs of a case, as a row."""
    on = run(*case.on)
    with nullcontext() if case.learnt else patch("plexrl.scheduler.turn.anticipation_us", _never):
        off = run(*case.off)
    with_it, without_it = case.measure(on), case.measure(off)
    return {
        "mechanism": case.mechanism,
        "case": case.case,
        "figure": case.figure,
        "with": with_it,
        "without": without_it,
        "worth": without_it / with_it,
        "switches_with": on.switches,
        "switches_without": off.switches,
    }


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m bench.ablation", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    asked = parser.parse_args()
    try:
        rows = [measure(case) for case in cases()]
    except PlexrlError as error:
        print(f"bench.ablation: {error}", file=sys.stderr)
        return error.exit_code
    if asked.json:
        print(json.dumps({"rows": rows}))
        return 0
    for row in rows:
        figures = f"{row['figure']} {row['with']:.4f}, without {row['without']:.4f}"
        print(f"{row['mechanism']:20} {row['worth']:6.3f}  {figures}  ({row['case']})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
