"""The numbers of a report, out of what a pool published and Slurm's own rows. Pure."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from plexrl.accounting.charges import MINUTE_US
from plexrl.accounting.moves import total
from plexrl.accounting.published import Job, Published
from plexrl.types import BadInput, SpanClass

CONFIDENCE = "estimated"  # recorded CPU seconds are replayed; a fitted service model would make it "replayed"


class Row(Protocol):
    """A `sacct -D` row: GPUs held from start to end, unix seconds, None where it has not happened."""

    gpus: int
    start: int | None
    end: int | None


def figures(
    published: Published, since_us: int | None = None, user: str | None = None, rows: Sequence[Row] | None = None
) -> dict[str, object]:
    """The report's JSON: seconds are GPU-seconds unless a key says otherwise.

    since_us: count from the minute that it lies in. user: show only that user's jobs; the sums stay the pool's. rows:
    Slurm's accounting of the pool's jobs; None: there is no Slurm, or it does not tell. Raises BadInput for a since_us
    after the last minute, or a user without jobs.
    """
    begin = published.from_us if since_us is None else max(published.from_us, since_us - since_us % MINUTE_US)
    if begin > published.until_us:
        raise BadInput("--since is later than all that the pool published", "Name an earlier time")
    minutes = [m for m in published.minutes if since_us is None or m.start_us >= begin]
    jobs = [job for job in published.jobs if since_us is None or job.ended_us >= begin]
    if user is not None:
        jobs = [job for job in jobs if user in (job.user, str(job.uid))]
        if not jobs:
            whose = "you may see your own jobs only" if published.uid is not None else "no job of theirs was there"
            raise BadInput(f"there is nothing to report about user {user}: {whose}")
    pool = sum(m.pool_us for m in minutes)
    dedicated = sum(m.dedicated_us for m in minutes)
    split = sum(m.split_us for m in minutes)
    saved = dedicated - pool
    stretches = sorted(s for job in jobs if (s := stretch(job)) is not None)
    return {
        "pool": published.pool,
        "from": begin / 1e6,
        "until": published.until_us / 1e6,
        "running": published.running,
        "gpus": len(published.gpus),
        "pool_gpu_seconds": _s(pool),
        "sacct_gpu_seconds": None if rows is None else _s(sacct_gpu_us(rows, begin, published.until_us, since_us)),
        "charged_gpu_seconds": _s(sum(m.charged_us for m in minutes)),
        "overhead_gpu_seconds": _s(sum(m.overhead_us for m in minutes)),
        "unattributed_gpu_seconds": _s(sum(m.unattributed_us for m in minutes)),
        "dedicated_gpu_seconds": _s(dedicated),
        "dedicated_split_gpu_seconds": _s(split),
        "saved_gpu_seconds": _s(saved),
        "saved_percent": round(100 * saved / dedicated, 2) if dedicated else None,
        "ideal_saved_gpu_seconds": None if since_us is not None else _s(dedicated - published.ideal_us),
        "confidence": CONFIDENCE,
        "stretch_mean": round(sum(stretches) / len(stretches), 3) if stretches else None,
        "stretch_p95": stretches[max(0, -(-95 * len(stretches) // 100) - 1)] if stretches else None,
        "shares": {
            kind.value: round(sum(m.classes.get(kind, 0) for m in minutes) / pool, 6) if pool else 0.0
            for kind in (
                SpanClass.BUSY,
                SpanClass.SWITCH,
                SpanClass.KEPT,
                SpanClass.IDLE,
                SpanClass.STARTUP,
                SpanClass.DRAIN,
            )
        },
        "switch_gpu_seconds": _s(sum(m.classes.get(SpanClass.SWITCH, 0) for m in minutes)),
        "moved": total(m for m in published.moves if since_us is None or m.start_us >= begin),
        "jobs": [_job(job, begin if since_us is not None else None) for job in jobs],
        "notes": published.notes,
    }


def _job(job: Job, begin: int | None) -> dict[str, object]:
    minutes = [m for m in job.minutes if begin is None or m[0] >= begin]
    busy, switch, kept, dedicated, split = (sum(m[i] for m in minutes) for i in range(1, 6))
    charged = busy + switch + kept
    return {
        "slurm_id": job.slurm_id,
        "job": job.job,
        "user": job.user,
        "account": job.account,
        "running": job.running,
        "charged": _s(charged),
        "busy": _s(busy),
        "switch": _s(switch),
        "kept": _s(kept),
        "dedicated": _s(dedicated),
        "dedicated_split": _s(split),
        "saved": _s(dedicated - charged),
        "stretch": stretch(job),
        "wall_seconds": _s(job.wall_us),
        "replayed_seconds": _s(job.replayed_us),
        "dedicated_gpus": job.gpus,
        "dedicated_split_gpus": job.gpus_split,
        "calls": job.calls,
        "wait_seconds": _s(job.wait_us),
    }


def stretch(job: Job) -> float | None:
    """Shared wall over replayed wall; None for a job that called nothing."""
    return round(job.wall_us / job.replayed_us, 3) if job.gpus and job.replayed_us else None


def sacct_gpu_us(rows: Iterable[Row], begin_us: int, until_us: int, since_us: int | None) -> int:
    """Slurm's GPU-microseconds of the pool's jobs: running ones up to until_us; with since_us from begin_us on."""
    total = 0
    for row in rows:
        if row.start is not None:
            start, end = row.start * 1_000_000, until_us if row.end is None else row.end * 1_000_000
            if since_us is not None:
                start = max(start, begin_us)
            total += row.gpus * max(0, end - start)
    return total


def _s(us: int) -> float:
    return us / 1e6
