"""What a run shows beside its ledger: how well one job's stalls were filled by another, and what switches moved."""

from collections.abc import Iterable, Iterator, Sequence

from plexrl.accounting.sweep import union
from plexrl.types import SpanClass
from plexrl.types import records as r


def stall_overlap(
    records: Iterable[r.Record], stalls: Sequence[tuple[float, float]], stalled_job: str, other_job: str
) -> float:
    """Share of a job's tool-stall seconds during which the other job was busy on a GPU that both of them used.

    stalls: [start, end) in unix seconds; overlapping ones count once. Jobs as in the ledger, `<job id>.<restart>`.
    0.0 when there was no stall.
    """
    busy: dict[str, dict[str, list[tuple[int, int]]]] = {stalled_job: {}, other_job: {}}
    for record in records:
        if isinstance(record, r.SpanClosed) and record.span.kind is SpanClass.BUSY:
            span = record.span
            for job, weight in span.shares:
                if job in busy and weight > 0:
                    busy[job].setdefault(span.gpu, []).append((span.start_us, span.end_us))
    both = busy[stalled_job].keys() & busy[other_job].keys()
    filled = union(piece for gpu in both for piece in busy[other_job][gpu])
    idle = union((round(start * 1e6), round(end * 1e6)) for start, end in stalls)
    total = sum(end - start for start, end in idle)
    return common_us(idle, filled) / total if total else 0.0


def common_us(a: Sequence[tuple[int, int]], b: Sequence[tuple[int, int]]) -> int:
    """Length of the intersection of two lists of sorted, disjoint intervals."""
    return sum(end - start for start, end in common(a, b))


def common(a: Sequence[tuple[int, int]], b: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The intersection of two lists of sorted, disjoint intervals."""
    i = j = 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            yield start, end
        if a[i][1] <= b[j][1]:
            i += 1
        else:
            j += 1


def switch_totals(records: Iterable[r.Record]) -> tuple[int, int]:
    """(switches that brought a worker group's state onto its gang, bytes moved in both directions on all GPUs, by them
    and by calls that brought what a switch had left for later).

    A gang of several GPUs has one record per GPU and switch; it counts once, on the GPU that moved most often.
    """
    counts: dict[tuple[str, str], int] = {}
    moved = 0
    for record in records:
        if isinstance(record, r.Switched):
            moved += record.moved.bytes_in + record.moved.bytes_out
            if record.incoming and record.moved.bytes_in:
                key = record.gang, record.gpu
                counts[key] = counts.get(key, 0) + 1
        elif isinstance(record, r.CallEnded):
            moved += record.moved_bytes
    gangs: dict[str, int] = {}
    for (gang, _), count in counts.items():
        gangs[gang] = max(gangs.get(gang, 0), count)
    return sum(gangs.values()), moved
