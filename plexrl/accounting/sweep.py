"""One class per GPU-microsecond that the agents held: spans laid over the agents' own intervals."""

from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush

from msgspec import Struct

from plexrl.types import Span, SpanClass
from plexrl.types import records as r

PRECEDENCE = {kind: rank for rank, kind in enumerate(SpanClass)}  # SpanClass is listed by precedence


class Segment(Struct, frozen=True):
    """[start_us, end_us) of a GPU that an agent held. kind None: no span says what it went to (unattributed)."""

    gpu: str
    start_us: int
    end_us: int
    kind: SpanClass | None
    gang: str = ""
    shares: tuple[tuple[str, int], ...] = ()


def held(intervals: Iterable[r.AgentInterval], until_us: int) -> dict[str, list[tuple[int, int]]]:
    """GPU -> disjoint, sorted [start, end) in microseconds that an agent measured, up to until_us.

    Of one agent's reports the longest counts. A GPU cannot be held twice at once: overlaps count once.
    """
    longest: dict[tuple[str, int, int], int] = {}
    for interval in intervals:
        key = interval.gpu, interval.slurm_job, interval.start_us
        longest[key] = max(longest.get(key, 0), min(interval.end_us, until_us))
    out: dict[str, list[tuple[int, int]]] = {}
    for (gpu, _, start), end in sorted(longest.items()):
        if end > start:
            out.setdefault(gpu, []).append((start, end))
    return {gpu: union(pieces) for gpu, pieces in out.items()}


def union(pieces: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Intervals as sorted, disjoint ones; those that touch are joined."""
    out: list[tuple[int, int]] = []
    for start, end in sorted(pieces):
        if out and start <= out[-1][1]:
            out[-1] = out[-1][0], max(out[-1][1], end)
        elif end > start:
            out.append((start, end))
    return out


def spans(records: Iterable[r.Record], until_us: int) -> list[Span]:
    """What the head recorded: the scheduler's spans, and what the epochs' own records say of the time around them.

    From the allocation's StartTime to the first head's start a GPU is in startup; from a head's end in order to the end
    of the allocation in drain. A head that vanished says nothing: the time after it is nobody's.
    """
    out: list[Span] = []
    allocations: set[tuple[int, int]] = set()
    epoch: r.EpochStarted | None = None
    ended: tuple[int, r.EpochStarted] | None = None
    for record in records:
        match record:
            case r.SpanClosed():
                out.append(record.span)
            case r.EpochStarted():
                allocation = record.slurm_job, record.allocated_us
                if ended and (ended[1].slurm_job, ended[1].allocated_us) != allocation:
                    out += _everywhere(ended[1], ended[0], record.allocated_us, SpanClass.DRAIN)
                if allocation not in allocations:
                    out += _everywhere(record, record.allocated_us, record.now_us, SpanClass.STARTUP)
                allocations.add(allocation)
                epoch, ended = record, None
            case r.EpochEnded() if epoch:
                ended = record.now_us, epoch
    if ended:
        out += _everywhere(ended[1], ended[0], until_us, SpanClass.DRAIN)
    return out


def _everywhere(epoch: r.EpochStarted, start: int, end: int, kind: SpanClass) -> list[Span]:
    return [Span(gpu, start, end, kind, "", ()) for gpu in epoch.gpus if end > start]


def segments(spans: Iterable[Span], held: dict[str, list[tuple[int, int]]]) -> list[Segment]:
    """Every held microsecond once, by GPU and time. Where spans overlap, the class that comes first in rule 11 wins,
    among equals the one that began first. What spans say of time that no agent held is left out."""
    by_gpu: dict[str, list[Span]] = {}
    for span in spans:
        if span.end_us > span.start_us:
            by_gpu.setdefault(span.gpu, []).append(span)
    out: list[Segment] = []
    for gpu in sorted(held):
        for segment in _lay(gpu, held[gpu], sorted(by_gpu.get(gpu, ()), key=lambda s: s.start_us)):
            last = out[-1] if out else None
            if last and last.end_us == segment.start_us and _same(last, segment):
                out[-1] = Segment(gpu, last.start_us, segment.end_us, last.kind, last.gang, last.shares)
            else:
                out.append(segment)
    return out


def _same(a: Segment, b: Segment) -> bool:
    return (a.gpu, a.kind, a.gang, a.shares) == (b.gpu, b.kind, b.gang, b.shares)


def _lay(gpu: str, held: Sequence[tuple[int, int]], spans: Sequence[Span]) -> Iterator[Segment]:
    best: list[tuple[int, int, Span]] = []  # open spans, the winning one first
    following = 0
    for at, end in held:
        while at < end:
            while following < len(spans) and spans[following].start_us <= at:
                span = spans[following]
                heappush(best, (PRECEDENCE[span.kind], following, span))
                following += 1
            while best and best[0][2].end_us <= at:
                heappop(best)
            stop = min(end, spans[following].start_us) if following < len(spans) else end
            if best:
                span = best[0][2]
                stop = min(stop, span.end_us)
                yield Segment(gpu, at, stop, span.kind, span.gang, span.shares)
            else:
                yield Segment(gpu, at, stop, None)
            at = stop
