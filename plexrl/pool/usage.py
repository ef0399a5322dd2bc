"""What users had of the pool's GPUs before this head, so that fair-share does not begin anew with every head."""

from collections import Counter

from plexrl.pool.book import Book
from plexrl.scheduler import Scheduler
from plexrl.types import Span

_HOUR_US = 3_600_000_000


class Usage:
    """GPU-microseconds by hour, account and user; an hour is little against any half-life."""

    def __init__(self) -> None:
        self._used: Counter[tuple[int, str, str]] = Counter()

    def add(self, span: Span, book: Book) -> None:
        """Split a closed span among its jobs' users, as the scheduler charged it."""
        weight = sum(share for _, share in span.shares)
        for name, share in span.shares:
            job = book.jobs.get(name)
            if job is not None:
                hour = span.end_us - span.end_us % _HOUR_US
                used_us = (span.end_us - span.start_us) * share // weight
                self._used[hour, job.attached.account, job.attached.user] += used_us

    def charge(self, scheduler: Scheduler) -> None:
        """Book it all, oldest first."""
        for (hour, account, user), used_us in sorted(self._used.items()):
            scheduler.shares.charge(hour, account, user, used_us)
        self._used.clear()
