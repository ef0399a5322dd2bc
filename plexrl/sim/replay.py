"""What the page's player is given of a run: GPUs that do the same thing as one lane, times in seconds."""

from collections.abc import Sequence

import msgspec

from plexrl.sim.result import Bar, Result
from plexrl.types import SpanClass

KINDS = (SpanClass.BUSY, SpanClass.SWITCH, SpanClass.KEPT, SpanClass.STARTUP, SpanClass.DRAIN, SpanClass.IDLE)

_LANES = 64
_BARS = 40_000  # of one run; a page of some megabytes
_MARKS = 20_000


def replay(result: Result) -> dict:
    """A run as the player reads it; lists and numbers only.

    lanes: [name, GPUs]. bars: per lane, [begin, end, kind as an index of KINDS, job as an index of jobs or -1]; idle
    is left out. marks: [time, gang, 1 when the turn ended, reason], both as indices. `left_out`: GPUs beyond the lanes
    that a page holds. A lane with too many bars shows what filled most of each of its columns.
    """
    lanes = _lanes(result.timeline)
    shown = lanes[:_LANES]
    jobs = _Numbers()
    each = _BARS // max(1, len(shown))
    bars = [
        [
            [_seconds(bar.start_us), _seconds(bar.end_us), KINDS.index(bar.kind), jobs(bar.job) if bar.job else -1]
            for bar in _columns(series, each, result.wall_us)
        ]
        for _, series in shown
    ]
    gangs, reasons = _Numbers(), _Numbers()
    stride = -(-len(result.marks) // _MARKS) if result.marks else 1
    marks = [[_seconds(m.at_us), gangs(m.gang), int(m.ended), reasons(m.reason)] for m in result.marks[::stride]]
    return {
        "name": result.policy,
        "end": _seconds(result.wall_us),
        "gpus": sum(len(gpus) for gpus, _ in shown),
        "left_out": result.gpus - sum(len(gpus) for gpus, _ in shown),
        "lanes": [[_span(gpus), len(gpus)] for gpus, _ in shown],
        "jobs": jobs.names,
        "gangs": gangs.names,
        "reasons": reasons.names,
        "bars": bars,
        "marks": marks,
    }


def embedded(runs: Sequence[dict]) -> str:
    """The runs as JSON that may stand inside a <script> element: no `<` of a name can end it."""
    text = msgspec.json.encode({"runs": list(runs)}).decode()
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def duty(timeline: Sequence[Bar], gpus: int, wall_us: int, columns: int = 200) -> list[tuple[float, float]]:
    """(hours, busy share of the GPUs) over a run, a value per column."""
    width = max(1.0, wall_us / columns)
    busy = [0.0] * (columns + 1)
    for bar in timeline:
        if bar.kind == SpanClass.BUSY:
            first, last = int(bar.start_us / width), min(columns - 1, int(bar.end_us / width))
            for column in range(first, last + 1):
                busy[column] += min(bar.end_us, (column + 1) * width) - max(bar.start_us, column * width)
    return [((column + 0.5) * width / 3.6e9, busy[column] / width / gpus) for column in range(columns)]


class _Numbers:
    """Names in the order in which they were first asked for."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._known: dict[str, int] = {}

    def __call__(self, name: str) -> int:
        if name not in self._known:
            self._known[name] = len(self.names)
            self.names.append(name)
        return self._known[name]


def _seconds(us: int) -> float:
    return round(us / 1e6, 3)


def _lanes(timeline: Sequence[Bar]) -> list[tuple[list[str], list[Bar]]]:
    """(GPUs, their bars) of GPUs whose bars are alike, in the order of their first GPU."""
    by_gpu: dict[str, list[Bar]] = {}
    for bar in timeline:
        by_gpu.setdefault(bar.gpu, []).append(bar)
    lanes: dict[tuple, tuple[list[str], list[Bar]]] = {}
    for gpu in sorted(by_gpu, key=_place):
        series = sorted((bar for bar in by_gpu[gpu] if bar.kind != SpanClass.IDLE), key=lambda bar: bar.start_us)
        alike = tuple((bar.start_us, bar.end_us, bar.kind, bar.job) for bar in series)
        lanes.setdefault(alike, ([], series))[0].append(gpu)
    return list(lanes.values())


def _place(gpu: str) -> tuple[str, int]:
    node, _, index = gpu.rpartition(":")
    return node, int(index) if index.isdigit() else 0


def _span(gpus: Sequence[str]) -> str:
    return gpus[0] if len(gpus) == 1 else f"{gpus[0]} .. {gpus[-1]}"


def _columns(series: list[Bar], most: int, wall_us: int) -> list[Bar]:
    """At most about `most` bars: each column of equal width is the bar that fills most of it."""
    if len(series) <= most:
        return series
    width = max(1, wall_us // most)
    best: dict[int, tuple[int, Bar]] = {}
    for bar in series:
        for column in range(bar.start_us // width, (bar.end_us - 1) // width + 1):
            covered = min(bar.end_us, (column + 1) * width) - max(bar.start_us, column * width)
            if covered > best.get(column, (0, bar))[0]:
                best[column] = covered, bar
    out: list[Bar] = []
    for column, (_, bar) in sorted(best.items()):
        begin, end = column * width, (column + 1) * width
        last = out[-1] if out else None
        if last and last.end_us == begin and (last.kind, last.job) == (bar.kind, bar.job):
            begin = out.pop().start_us
        out.append(Bar(bar.gpu, begin, end, bar.kind, bar.gang, bar.job))
    return out
