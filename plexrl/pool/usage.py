"""What users had of the pool's GPUs, by hour, before this head began and since. Fair-share, windows, budgets read it.

What is charged is charged here as the scheduler charges it: a span's time, split among the jobs that it names.
"""

from collections import Counter
from typing import NamedTuple

from plexrl.pool.book import Book
from plexrl.scheduler import Scheduler
from plexrl.types import Span

HOUR_US = 3_600_000_000


class Used(NamedTuple):
    """Whose use it was."""

    account: str
    user: str
    qos: str


class Usage:
    """GPU-microseconds by hour, account, user and QOS; an hour is little against any half-life or window."""

    def __init__(self) -> None:
        self._used: dict[int, Counter[Used]] = {}  # by the hour's begin

    def add(self, span: Span, book: Book) -> None:
        """Split a closed span among its jobs' users, as the scheduler charged it."""
        weight = sum(share for _, share in span.shares)
        for name, share in span.shares:
            job = book.jobs.get(name)
            if job is not None:
                hour = self._used.setdefault(span.end_us - span.end_us % HOUR_US, Counter())
                whose = Used(job.attached.account, job.attached.user, job.attached.qos)
                hour[whose] += (span.end_us - span.start_us) * share // weight

    def charge(self, scheduler: Scheduler) -> None:
        """Book all that was used before the scheduler was there, oldest first."""
        for hour in sorted(self._used):
            for (account, user, _), used_us in sorted(self._used[hour].items()):
                scheduler.shares.charge(hour, account, user, used_us)

    def since(self, start_us: int) -> Counter[Used]:
        """GPU-microseconds of each from the hour on that start_us lies in."""
        total: Counter[Used] = Counter()
        for hour, used in self._used.items():
            if hour + HOUR_US > start_us:
                total.update(used)
        return total

    def hours(self, start_us: int) -> list[tuple[int, Counter[Used]]]:
        """(begin of the hour, who used what in it) from start_us on, oldest first."""
        return sorted((hour, used) for hour, used in self._used.items() if hour + HOUR_US > start_us)
