"""Why agents held GPUs of which no span tells: the words beside `unattributed`."""

from collections.abc import Iterable, Sequence

from plexrl.accounting.sweep import Segment
from plexrl.types import records as r

TOLERANCE_US = 2_000_000  # per GPU; below it nothing needs to be said


def causes(records: Iterable[r.Record], laid: Iterable[Segment], held: dict[str, list[tuple[int, int]]]) -> list[str]:
    """One sentence per cause, with its GPU-seconds, when more than 2 s per GPU is unattributed; else none. Also how
    much of the spans lies where no agent was (an agent that was lost, or clocks that differ)."""
    epochs = _epochs(records)
    seconds: dict[str, int] = {}
    total = 0
    for segment in laid:
        if segment.kind is None:
            why = _why(segment, epochs)
            seconds[why] = seconds.get(why, 0) + segment.end_us - segment.start_us
            total += segment.end_us - segment.start_us
    if total <= TOLERANCE_US * len(held):
        return []
    return [f"{us / 1e6:.1f} GPU-s unattributed: {why}" for why, us in sorted(seconds.items(), key=lambda p: -p[1])]


def _epochs(records: Iterable[r.Record]) -> list[tuple[r.EpochStarted, int, bool]]:
    """(start, time of the last record, ended in order)."""
    out: list[tuple[r.EpochStarted, int, bool]] = []
    for record in records:
        if isinstance(record, r.EpochStarted):
            out.append((record, record.now_us, False))
        elif out:
            out[-1] = out[-1][0], max(out[-1][1], record.now_us), isinstance(record, r.EpochEnded)
    return out


def _why(segment: Segment, epochs: Sequence[tuple[r.EpochStarted, int, bool]]) -> str:
    before = [epoch for epoch in epochs if epoch[0].now_us <= segment.start_us]
    if not before:
        return "no head had started yet"
    started, last_us, in_order = before[-1]
    if segment.gpu not in started.gpus:
        return f"the head of epoch {started.epoch} did not know GPU {segment.gpu}"
    if in_order and segment.start_us >= last_us:
        return f"no head was there after epoch {started.epoch} had ended in order"
    if in_order:
        return f"the spans of epoch {started.epoch} leave it out"
    if segment.start_us >= last_us:
        return f"no head was there after that of epoch {started.epoch} had vanished"
    return f"open spans were lost with the head of epoch {started.epoch}"
