"""When each gang worked and when it switched, out of the closed spans. One GPU stands for a gang: all of them do both
together."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable

from plexrl.types import SpanClass
from plexrl.types import records as r

Intervals = list[tuple[int, int]]


class Busy:
    """busy, switch: by gang, sorted [start, end) in unix microseconds, spans that touch joined."""

    def __init__(self, records: Iterable[r.Record]) -> None:
        self.busy: dict[str, Intervals] = defaultdict(list)
        self.switch: dict[str, Intervals] = defaultdict(list)
        lead: dict[str, str] = {}
        for record in records:
            match record:
                case r.GroupPlaced():
                    lead.update((gang.id, gang.gpus[0]) for gang in record.placement.gangs)
                case r.SpanClosed(span=span) if lead.get(span.gang) == span.gpu:
                    if span.kind is SpanClass.BUSY:
                        _extend(self.busy[span.gang], span.start_us, span.end_us)
                    elif span.kind is SpanClass.SWITCH:
                        _extend(self.switch[span.gang], span.start_us, span.end_us)

    def served(self, gang: str, start: int, end: int) -> int:
        """Of [start, end), what the gang spent on work."""
        pieces = self.busy.get(gang, [])
        total, at = 0, max(0, bisect_right(pieces, (start, 0)) - 1)
        while at < len(pieces) and pieces[at][0] < end:
            total += max(0, min(pieces[at][1], end) - max(pieces[at][0], start))
            at += 1
        return total


def _extend(pieces: Intervals, start: int, end: int) -> None:
    """Spans are cut each minute: what touches the last piece belongs to it."""
    if pieces and pieces[-1][1] == start:
        start = pieces.pop()[0]
    pieces.append((start, end))
