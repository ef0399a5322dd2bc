"""The same numbers added up another way: by user, account, QOS, partition, pool, model, month or job."""

import csv
import io
from collections.abc import Iterable, Sequence

from plexrl.accounting.basis import CONFIDENCES
from plexrl.accounting.figures import stretch, weakest
from plexrl.accounting.published import Job, Published
from plexrl.accounting.window import Window, months
from plexrl.types import BadInput

KEYS = ("user", "account", "qos", "partition", "pool", "model", "month", "job")
_PARTS = ("busy", "switch", "kept", "dedicated", "dedicated_split")
# What a whole pool did, in rows that mean whole pools.
_POOL = ("pool_held", "pool_charged", "pool_overhead", "pool_unattributed", "pool_dedicated", "pool_saved")


def parsed(text: str) -> tuple[str, ...]:
    """`account,month` as keys. Raises BadInput for what is none."""
    keys = tuple(dict.fromkeys(key.strip().lower() for key in text.split(",") if key.strip()))
    wrong = [key for key in keys if key not in KEYS]
    if wrong or not keys:
        raise BadInput(f"--group-by {text!r} is no list of keys", f"Choose from {', '.join(KEYS)}")
    return keys


def rows(
    pools: Iterable[tuple[Published, Sequence[Job]]], window: Window, keys: Sequence[str]
) -> list[dict[str, object]]:
    """One row per value of the keys that was seen, sorted by them; seconds are GPU-seconds unless a key says otherwise.

    pools: what each published, and its jobs that are asked for. A job of several models counts under their names
    together. saved is dedicated less charged, without overhead: that is the pool owner's, and stands, with the rest of
    what whole pools did, in rows by pool or month alone.
    """
    found: dict[tuple[str, ...], _Row] = {}
    whole = set(keys) <= {"pool", "month"}
    for published, jobs in pools:
        for part, name in _parts(published, window, "month" in keys):
            for job in jobs:
                if part.meets(job):
                    key = tuple(_value(each, published, job, name) for each in keys)
                    found.setdefault(key, _Row()).add(job, part)
            if whole:
                key = tuple(name if each == "month" else published.pool for each in keys)
                found.setdefault(key, _Row()).add_pool(published, part)
    return [dict(zip(keys, key, strict=True)) | row.told(whole) for key, row in sorted(found.items())]


def _parts(published: Published, window: Window, by_month: bool) -> Iterable[tuple[Window, str]]:
    """The window, month by month where that is asked for."""
    if not by_month:
        yield window, ""
        return
    begin, end = window.within(published.from_us, published.until_us)
    for month in months(begin, max(begin, end - 1)):
        low = month.begin_us if window.begin_us is None else max(month.begin_us, window.begin_us)
        high = month.end_us if window.end_us is None else min(month.end_us, window.end_us)
        yield Window(low, high), month.name


def _value(key: str, published: Published, job: Job, month: str) -> str:
    match key:
        case "pool":
            return published.pool
        case "model":
            return "+".join(job.models)
        case "month":
            return month
    return str(getattr(job, key))


class _Row:
    def __init__(self) -> None:
        self._parts = dict.fromkeys(_PARTS, 0)
        self._held: dict[str, int] = {}  # confidence -> of dedicated
        self._jobs: dict[str, Job] = {}
        self._pool = dict.fromkeys(_POOL, 0)

    def add(self, job: Job, part: Window) -> None:
        self._jobs[f"{job.attached_us} {job.job}"] = job
        for at, *values in job.minutes:
            if part.holds(at):
                for name, us in zip(_PARTS, values, strict=True):
                    self._parts[name] += us
                if values[3]:
                    self._held[job.basis.confidence] = self._held.get(job.basis.confidence, 0) + values[3]

    def add_pool(self, published: Published, part: Window) -> None:
        for minute in published.minutes:
            if part.holds(minute.start_us):
                self._pool["pool_held"] += minute.pool_us
                self._pool["pool_charged"] += minute.charged_us
                self._pool["pool_overhead"] += minute.overhead_us
                self._pool["pool_unattributed"] += minute.unattributed_us
                self._pool["pool_dedicated"] += minute.dedicated_us
                self._pool["pool_saved"] += minute.dedicated_us - minute.pool_us

    def told(self, whole: bool) -> dict[str, object]:
        charged = sum(self._parts[name] for name in _PARTS[:3])
        stretches = [s for job in self._jobs.values() if (s := stretch(job)) is not None]
        found: dict[str, object] = {"jobs": len(self._jobs), "charged": charged / 1e6}
        found |= {name: us / 1e6 for name, us in self._parts.items()}
        found["saved"] = (self._parts["dedicated"] - charged) / 1e6
        found["confidence"] = weakest(self._held)
        found |= {f"dedicated_{name}": self._held.get(name, 0) / 1e6 for name in CONFIDENCES[1:3]}
        found["stretch_mean"] = round(sum(stretches) / len(stretches), 3) if stretches else None
        return found | ({name: us / 1e6 for name, us in self._pool.items()} if whole else {})


def as_csv(found: Sequence[dict[str, object]]) -> str:
    """Rows as comma-separated values with a header, as RFC 4180 has it; an empty cell for what is not known."""
    out = io.StringIO()
    if found:
        writer = csv.DictWriter(out, fieldnames=list(found[0]), lineterminator="\r\n")
        writer.writeheader()
        for row in found:
            writer.writerow({key: "+".join(value) if isinstance(value, list) else value for key, value in row.items()})
    return out.getvalue()
