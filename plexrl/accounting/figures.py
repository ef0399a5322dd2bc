"""The numbers of a report, out of what a pool published and Slurm's own rows. Pure."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from plexrl.accounting.basis import CONFIDENCES, ESTIMATED
from plexrl.accounting.moves import total
from plexrl.accounting.published import Job, Published
from plexrl.accounting.window import ALL, Window
from plexrl.types import BadInput, SpanClass


class Row(Protocol):
    """A `sacct -D` row: GPUs held from start to end, unix seconds, None where it has not happened."""

    gpus: int
    start: int | None
    end: int | None


def figures(
    published: Published,
    window: Window = ALL,
    user: str | None = None,
    rows: Sequence[Row] | None = None,
    account: str | None = None,
) -> dict[str, object]:
    """The report's JSON: seconds are GPU-seconds unless a key says otherwise.

    window: what is counted, by whole minutes. user, account: show only their jobs; the sums stay the pool's. rows:
    Slurm's accounting of the pool's jobs; None: there is no Slurm, or it does not tell. Raises BadInput for a window
    after the last minute, or a user or account without jobs.
    """
    begin, until = window.within(published.from_us, published.until_us)
    if begin > published.until_us:
        raise BadInput("that is later than all that the pool published", "Name an earlier time")
    minutes = [m for m in published.minutes if window.holds(m.start_us)]
    jobs = chosen(published, window, user, account)
    pool = sum(m.pool_us for m in minutes)
    dedicated = sum(m.dedicated_us for m in minutes)
    split = sum(m.split_us for m in minutes)
    saved = dedicated - pool
    stretches = sorted(s for job in jobs if (s := stretch(job)) is not None)
    return {
        "pool": published.pool,
        "from": begin / 1e6,
        "until": until / 1e6,
        "running": published.running,
        "gpus": len(published.gpus),
        "pool_gpu_seconds": _s(pool),
        "sacct_gpu_seconds": None if rows is None else _s(sacct_gpu_us(rows, begin, until, window)),
        "charged_gpu_seconds": _s(sum(m.charged_us for m in minutes)),
        "overhead_gpu_seconds": _s(sum(m.overhead_us for m in minutes)),
        "unattributed_gpu_seconds": _s(sum(m.unattributed_us for m in minutes)),
        "dedicated_gpu_seconds": _s(dedicated),
        "dedicated_split_gpu_seconds": _s(split),
        "saved_gpu_seconds": _s(saved),
        "saved_percent": round(100 * saved / dedicated, 2) if dedicated else None,
        "ideal_saved_gpu_seconds": None if window != ALL else _s(dedicated - published.ideal_us),
        "confidence": weakest(published.sure),
        "by_confidence": by_confidence(jobs, window),
        "fit_error": fit_error(jobs),
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
        "moved": total(m for m in published.moves if window.holds(m.start_us)),
        "jobs": [_job(job, window) for job in jobs],
        "notes": published.notes,
    }


def chosen(published: Published, window: Window, user: str | None, account: str | None) -> list[Job]:
    """The jobs that are asked for. Raises BadInput when a user or account is named of whom there is nothing to see."""
    jobs = [job for job in published.jobs if window.meets(job)]
    if account is not None:
        jobs = [job for job in jobs if job.account == account]
        if not jobs:
            raise BadInput(f"there is nothing to report about account {account}: {_visible(published)}")
    if user is not None:
        jobs = [job for job in jobs if user in (job.user, str(job.uid))]
        if not jobs:
            raise BadInput(f"there is nothing to report about user {user}: {_visible(published)}")
    return jobs


def _visible(published: Published) -> str:
    if published.uid is None:
        return "no job of theirs was there"
    if published.accounts:
        return f"you may see your own jobs and those of {', '.join(published.accounts)} only"
    return "you may see your own jobs only"


def weakest(confidences: Iterable[str]) -> str:
    """Of a sum of figures, its least sure one's word."""
    return max(confidences, key=CONFIDENCES.index, default=ESTIMATED)


def by_confidence(jobs: Iterable[Job], window: Window = ALL) -> dict[str, dict[str, float]]:
    """How many jobs, and GPU-seconds of dedicated runs, each word stands for; of these jobs. declared is
    what scripts asked for beyond what their jobs used, and is in no other sum."""
    found: dict[str, dict[str, float]] = {}
    excess = [job for job in jobs if job.declared_gpus > job.gpus and window.meets(job)]
    for name in CONFIDENCES:
        mine = [job for job in jobs if job.gpus and job.basis.confidence == name]
        if mine:
            held = sum(m[4] for job in mine for m in job.minutes if window.holds(m[0]))
            found[name] = {"jobs": len(mine), "dedicated_gpu_seconds": _s(held)}
    if excess:
        us = sum((job.declared_gpus - job.gpus) * job.replayed_us for job in excess)
        found["declared"] = {"jobs": len(excess), "beyond_use_gpu_seconds": _s(us)}
    return found


def fit_error(jobs: Iterable[Job]) -> float | None:
    """Mean |predicted - seen| / seen per call of the service models behind the baselines."""
    told = [(job.basis.error, job.calls) for job in jobs if job.basis.error is not None]
    calls = sum(count for _, count in told)
    return round(sum(error * count for error, count in told) / calls, 4) if calls else None


def _job(job: Job, window: Window) -> dict[str, object]:
    minutes = [m for m in job.minutes if window.holds(m[0])]
    busy, switch, kept, dedicated, split = (sum(m[i] for m in minutes) for i in range(1, 6))
    charged = busy + switch + kept
    return {
        "slurm_id": job.slurm_id,
        "job": job.job,
        "user": job.user,
        "account": job.account,
        "qos": job.qos,
        "partition": job.partition,
        "models": list(job.models),
        "running": job.running,
        "charged": _s(charged),
        "busy": _s(busy),
        "switch": _s(switch),
        "kept": _s(kept),
        "dedicated": _s(dedicated),
        "dedicated_split": _s(split),
        "saved": _s(dedicated - charged),
        "confidence": job.basis.confidence,
        "fit_error": None if job.basis.error is None else round(job.basis.error, 4),
        "stretch": stretch(job),
        "wall_seconds": _s(job.wall_us),
        "replayed_seconds": _s(job.replayed_us),
        "dedicated_gpus": job.gpus,
        "dedicated_split_gpus": job.gpus_split,
        "declared_gpus": job.declared_gpus,
        "calls": job.calls,
        "wait_seconds": _s(job.wait_us),
    }


def stretch(job: Job) -> float | None:
    """Shared wall over replayed wall; None for a job that called nothing."""
    return round(job.wall_us / job.replayed_us, 3) if job.gpus and job.replayed_us else None


def sacct_gpu_us(rows: Iterable[Row], begin_us: int, until_us: int, window: Window = ALL) -> int:
    """Slurm's GPU-microseconds of the pool's jobs, running ones up to until_us, within the window."""
    held = 0
    for row in rows:
        if row.start is not None:
            start, end = row.start * 1_000_000, until_us if row.end is None else row.end * 1_000_000
            if window.begin_us is not None:
                start = max(start, begin_us)
            if window.end_us is not None:
                end = min(end, until_us)
            held += row.gpus * max(0, end - start)
    return held


def _s(us: int) -> float:
    return us / 1e6
