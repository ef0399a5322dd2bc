"""A workload under one or several policies, and what came of it."""

from collections import Counter
from collections.abc import Mapping, Sequence

from plexrl.scheduler import Policy
from plexrl.sim.baselines import baseline
from plexrl.sim.found import Found, Progress
from plexrl.sim.metrics import figures, lower_bound
from plexrl.sim.page import pictures
from plexrl.sim.result import Result
from plexrl.sim.run import AccountShares, run
from plexrl.sim.table import Column
from plexrl.sim.workload import Workload
from plexrl.types import BadInput

COLUMNS = (
    Column("policy", "policy", text=True),
    Column("hours", "hours", ",.2f"),
    Column("relative_completion", "isolated", "0%"),
    Column("gpu_hours_per_step", "GPU-h/step", ",.3f"),
    Column("duty_cycle", "duty", "0%"),
    Column("stretch_mean", "stretch", ",.2f"),
    Column("stretch_p95", "p95", ",.2f"),
    Column("queue_wait_mean_s", "queue s", ",.0f"),
    Column("jain", "Jain", ".3f"),
    Column("switches_per_hour", "switch/h", ",.0f"),
)


def compare(
    workload: Workload,
    policies: Mapping[str, Policy],
    baselines: Sequence[str],
    progress: Progress,
    *,
    keep_timeline: bool = False,
    shares: AccountShares | None = None,
) -> Found:
    """Run the workload under each policy, then as each baseline does; `isolated` first, where it is among them.

    A baseline that the workload gives no room for is left out, with the reason in the notes. Recorded jobs have no
    stretch: what they would take alone is not known. shares: of accounts, under the policies; baselines know none.
    """
    drawn = all(plan.recorded is None for plan in workload.jobs)
    bound = lower_bound(workload) / 3.6e9
    runs: list[Result] = []
    notes = ["Duty: busy share of the GPU time that jobs held. Stretch: from arrival to end, over the time alone."]
    notes += [f"No schedule ends within {bound:,.2f} hours. Workload {workload.digest()[:12]}, seed {workload.seed}."]
    names = [*policies, *baselines]
    for number, name in enumerate(names):

        def told(ended: int, events: int, now_us: int, name: str = name, number: int = number) -> None:
            share = (number + ended / len(workload.jobs)) / len(names)
            progress(share, f"{name}, {ended:,} of {len(workload.jobs):,} jobs, {events:,} events")

        options = {"keep_timeline": keep_timeline, "compare_alone": drawn, "progress": told}
        progress(number / len(names), name)
        try:
            if name in policies:
                runs.append(run(workload, policies[name], name=name, shares=shares, **options))
            else:
                runs.append(baseline(name, workload, **options))
        except BadInput as error:
            notes.append(f"{name}: {error}")
    isolated = next((one for one in runs if one.policy == "isolated"), None)
    rows = [_row(one, isolated, bound, drawn) for one in runs]
    for row in rows:
        if len(row["accounts"]) > 1:
            parts = ", ".join(f"{name or '(none)'} {part:.0%}" for name, part in row["accounts"].items())
            notes.append(f"{row['policy']}: of the GPU time that was charged, {parts}.")
    for one in runs:
        notes += [f"{one.policy}: job {job} was refused: {why}" for job, why in one.jobs_refused.items()]
    return Found(
        title=f"{workload.name}: {len(workload.jobs):,} jobs on {workload.gpus.size:,} GPUs",
        words=f"Simulated under the live scheduler; seed {workload.seed}.",
        columns=COLUMNS,
        rows=rows,
        notes=notes,
        sections=pictures(runs),
        runs=runs,
    )


def _accounts(one: Result) -> dict[str, float]:
    """The part of each account of what was charged."""
    charged: Counter[str] = Counter()
    for job in one.jobs:
        charged[job.account] += job.busy_us + job.switch_us + job.kept_us
    whole = charged.total()
    return {account: used / whole for account, used in sorted(charged.items())} if whole else {}


def _row(one: Result, isolated: Result | None, bound: float, drawn: bool) -> dict:
    same = isolated if isolated and len(isolated.jobs) == len(one.jobs) else None
    hours = one.wall_us / 3.6e9
    row: dict = {"policy": one.policy, "hours": hours, "lower_bound_hours": bound}
    if drawn and one.jobs:
        row |= figures(one, same)
    total = one.wall_us * one.gpus
    shares = {kind: value / total for kind, value in one.classes.items()} if total else {}
    return row | {
        "jobs": len(one.jobs),
        "jobs_refused": len(one.jobs_refused),
        "shares": shares,
        "accounts": _accounts(one),
        "switches": one.switches,
        "prefetches": one.prefetches,
        "gathers": one.gathers,
        "builds": one.builds,
        "events": one.events,
        "wall_s": one.wall_s,
    }
