"""Who pays: segments to charges, overhead and classes, minute by minute, in whole GPU-microseconds.

charged + overhead + unattributed = pool, where each of the four is counted by itself: the pool from the agents'
intervals, the other three from the segments that were laid over them.
"""

from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct, field

from plexrl.accounting.sweep import Segment
from plexrl.types import SpanClass

MINUTE_US = 60_000_000
CHARGED = (SpanClass.BUSY, SpanClass.SWITCH, SpanClass.KEPT)


class Minute(Struct):
    """GPU-microseconds of the whole pool in [start_us, start_us + 1 min). classes: by class, unattributed left out.

    dedicated_us, split_us: what the baselines of all jobs would have held in this minute.
    """

    start_us: int
    pool_us: int = 0
    charged_us: int = 0
    overhead_us: int = 0
    unattributed_us: int = 0
    classes: dict[SpanClass, int] = field(default_factory=dict)
    dedicated_us: int = 0
    split_us: int = 0


class Charges(Struct):
    """minutes: by start. jobs: job -> minute's start -> GPU-microseconds charged as busy, switch and kept."""

    minutes: dict[int, Minute] = field(default_factory=dict)
    jobs: dict[str, dict[int, list[int]]] = field(default_factory=dict)

    def minute(self, at_us: int) -> Minute:
        """The minute that begins at at_us, made when it is new."""
        return self.minutes.setdefault(at_us, Minute(at_us))


def charge(segments: Iterable[Segment], held: dict[str, list[tuple[int, int]]]) -> Charges:
    """The charges of segments that `sweep.segments` laid over `held`."""
    out = Charges()
    for pieces in held.values():
        for start, end in pieces:
            for minute, low, high in by_minute(start, end):
                out.minute(minute).pool_us += high - low
    for segment in segments:
        for start, low, high in by_minute(segment.start_us, segment.end_us):
            _book(out, out.minute(start), segment, high - low)
    return out


def _book(charges: Charges, minute: Minute, segment: Segment, us: int) -> None:
    if segment.kind is None:
        minute.unattributed_us += us
        return
    minute.classes[segment.kind] = minute.classes.get(segment.kind, 0) + us
    shares = [share for share in segment.shares if share[1] > 0] if segment.kind in CHARGED else []
    if not shares:
        minute.overhead_us += us
    for job, part in split(us, shares):
        minute.charged_us += part
        mine = charges.jobs.setdefault(job, {}).setdefault(minute.start_us, [0, 0, 0])
        mine[CHARGED.index(segment.kind)] += part


def split(us: int, shares: Sequence[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    """us by weight, in whole microseconds that add up to us (each job within one of its exact part)."""
    total = sum(weight for _, weight in shares)
    given = reached = 0
    for job, weight in shares:
        reached += weight
        upto = us * reached // total
        yield job, upto - given
        given = upto


def by_minute(start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """(the minute's start, low, high) for the minutes that [start, end) touches."""
    while start < end:
        minute = start - start % MINUTE_US
        high = min(end, minute + MINUTE_US)
        yield minute, start, high
        start = high
