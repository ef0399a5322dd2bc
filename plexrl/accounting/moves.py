"""What moved between GPUs and hosts, minute by minute: beside the sum of the GPUs' time, never in it."""

from collections.abc import Iterable, Sequence

from msgspec import Struct

from plexrl.accounting.charges import MINUTE_US, by_minute
from plexrl.accounting.overlap import common
from plexrl.accounting.sweep import Segment, union
from plexrl.types import SpanClass
from plexrl.types import records as r


class Moves(Struct):
    """Of all GPUs in [start_us, start_us + 1 min).

    bytes_in, bytes_out: by switches; bytes_clean: of what left, what the host had already. bytes_in_calls: what calls
    brought (and took) themselves; in_calls_us: GPU-microseconds that they waited for it: a part of busy. hidden_us:
    GPU-microseconds of switches' copies while the GPU was busy for somebody: those that nobody pays for.
    """

    start_us: int
    bytes_in: int = 0
    bytes_out: int = 0
    bytes_clean: int = 0
    bytes_in_calls: int = 0
    in_calls_us: int = 0
    hidden_us: int = 0


def moves(records: Iterable[r.Record], laid: Sequence[Segment], until_us: int) -> list[Moves]:
    """By minute, oldest first; minutes in which nothing moved are left out. laid: as by `sweep.segments`."""
    found: dict[int, Moves] = {}

    def minute(at_us: int) -> Moves:
        start = at_us - at_us % MINUTE_US
        return found.setdefault(start, Moves(start))

    ranks: dict[str, int] = {}
    copies: dict[str, list[tuple[int, int]]] = {}
    for record in records:
        match record:
            case r.GroupPlaced():
                ranks.update((gang.id, len(gang.gpus)) for gang in record.placement.gangs)
            case r.Switched(moved=moved) if record.now_us <= until_us:
                at = minute(record.now_us)
                at.bytes_in += moved.bytes_in
                at.bytes_out += moved.bytes_out
                at.bytes_clean += moved.bytes_clean
                copying = round((moved.seconds - moved.waited_s) * 1e6)
                if copying > 0:
                    copies.setdefault(record.gpu, []).append((record.now_us - copying, record.now_us))
            case r.CallEnded() if record.moved_us and record.now_us <= until_us:
                at = minute(record.now_us)
                at.bytes_in_calls += record.moved_bytes
                at.in_calls_us += record.moved_us * ranks.get(record.gang, 1)
    for gpu, pieces in copies.items():
        busy = union((s.start_us, s.end_us) for s in laid if s.gpu == gpu and s.kind is SpanClass.BUSY)
        for start, end in common(union(pieces), busy):
            for at, low, high in by_minute(start, end):
                minute(at).hidden_us += high - low
    return [each for _, each in sorted(found.items()) if any(getattr(each, name) for name in _FIGURES)]


_FIGURES = Moves.__struct_fields__[1:]


def total(found: Iterable[Moves]) -> dict[str, int | float]:
    """The sums of some minutes, as a report says them: times in GPU-seconds."""
    sums = dict.fromkeys(_FIGURES, 0)
    for each in found:
        for name in _FIGURES:
            sums[name] += getattr(each, name)
    return {
        "bytes_in": sums["bytes_in"],
        "bytes_out": sums["bytes_out"],
        "bytes_clean": sums["bytes_clean"],
        "bytes_in_calls": sums["bytes_in_calls"],
        "in_calls_gpu_seconds": sums["in_calls_us"] / 1e6,
        "hidden_gpu_seconds": sums["hidden_us"] / 1e6,
    }
