"""Preset `philly`: 10,000 jobs of the Philly trace through the whole scheduler, every event of it."""

from pathlib import Path

from plexrl.sim.found import Found, Progress
from plexrl.sim.named import POLICIES
from plexrl.sim.page import pictures
from plexrl.sim.philly import WHERE, philly
from plexrl.sim.run import run
from plexrl.sim.table import Column
from plexrl.types import BadInput

JOBS = 10_000
POLICY = "plexrl"
COLUMNS = (
    Column("jobs", "jobs", ",.0f"),
    Column("jobs_dropped", "dropped", ",.0f"),
    Column("events", "events", ",.0f"),
    Column("wall_s", "seconds", ",.1f"),
    Column("events_per_s", "events/s", ",.0f"),
    Column("gpus", "GPUs", ",.0f"),
    Column("simulated_days", "days simulated", ",.1f"),
    Column("busy_share", "busy", "%"),
)


def run_preset(progress: Progress, trace: Path, jobs: int = JOBS) -> Found:
    """jobs: the first so many that last two steps or more. Raises BadInput for a file that is not the trace."""
    progress(0.0, "reading the trace")
    given = philly(trace, jobs=jobs)
    count = len(given.workload.jobs)
    result = run(
        given.workload,
        POLICIES[POLICY],
        name=POLICY,
        compare_alone=False,
        progress=lambda ended, events, now_us: progress(ended / count, f"{ended:,} jobs, {events:,} events"),
    )
    row = {
        "policy": POLICY,
        "jobs": len(result.jobs),
        "jobs_dropped": given.dropped,
        "jobs_refused": len(result.jobs_refused),
        "events": result.events,
        "wall_s": round(result.wall_s, 2),
        "events_per_s": round(result.events_per_s),
        "gpus": result.gpus,
        "simulated_days": result.wall_us / 86.4e9,
        "busy_share": result.classes["busy"] / (result.wall_us * result.gpus),
        "switches": result.switches,
        "digest": result.digest,
    }
    return Found(
        title="Philly: jobs of the trace under the whole scheduler",
        words=f"Jobs, their mapping and what is ours: plexrl.sim.philly. Policy {POLICY}.",
        columns=COLUMNS,
        rows=[row],
        notes=["Dropped: jobs shorter than two steps. Every event went through the scheduler; nothing was skipped."],
        sections=pictures([result]),
    )


def preset(progress: Progress, seeds: int | None, trace: Path | None) -> Found:
    """As the command line asks for it. Raises BadInput without a trace, and for several seeds: a trace has none."""
    if trace is None:
        raise BadInput("the preset philly needs the trace", WHERE)
    if seeds is not None:
        raise BadInput("--seeds has no meaning for a trace", "Leave it out")
    return run_preset(progress, trace)
