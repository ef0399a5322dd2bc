"""Curves, bars and grids of the simulator's pages, as SVG."""

import math
from collections.abc import Sequence
from html import escape

from msgspec import Struct

Points = Sequence[tuple[float, float]]

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 1100, 310, 64, 190, 30, 44
_MOST = 600  # points of one curve
COLOURS = 8


class Series(Struct, frozen=True):
    """One curve. number: of its colour. steps: constant between its points."""

    name: str
    points: Points
    number: int
    steps: bool = False


class Measure(Struct, frozen=True):
    """One bar. marks: (value, what it is) drawn as ticks across the bar."""

    name: str
    value: float
    words: str
    number: int = 0
    marks: tuple[tuple[float, str], ...] = ()


def curves(series: Sequence[Series], label: str, x_name: str, y_name: str, y_top: float | None = None) -> str:
    """Curves over a common x from 0 on, and from 0 to y_top (default: the largest y)."""
    right = _nice(max((x for one in series for x, _ in one.points), default=1.0))
    top = y_top or _nice(max((y for one in series for _, y in one.points), default=1.0))
    wide, high = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        return _LEFT + min(x, right) / right * wide, _TOP + (1 - min(y, top) / top) * high

    out = [_svg(_HEIGHT, label)]
    for tick in range(6):
        x, y = _LEFT + wide * tick / 5, _TOP + high * (1 - tick / 5)
        out.append(f'<line x1="{_LEFT}" x2="{_LEFT + wide}" y1="{y:.1f}" y2="{y:.1f}" class="tick"/>')
        out.append(_text(_LEFT - 8, y + 4, _number(top * tick / 5), "end", "small"))
        out.append(_text(x, _HEIGHT - _BOTTOM + 18, _number(right * tick / 5), "middle", "small"))
    out.append(_text(_LEFT + wide / 2, _HEIGHT - 6, x_name, "middle", "small"))
    out.append(_text(_LEFT - 8, 12, y_name, "start", "small"))
    for row, one in enumerate(series):
        path, last = [], None
        for x, y in _thin(one.points):
            if one.steps and last is not None:
                path.append(place(x, last))
            path.append(place(x, y))
            last = y
        dots = " ".join(f"{x:.1f},{y:.1f}" for x, y in path)
        name = escape(one.name)
        out.append(f'<polyline points="{dots}" class="curve s{one.number % COLOURS}"><title>{name}</title></polyline>')
        y = _TOP + 10 + row * 20
        x = _WIDTH - _RIGHT + 18
        out.append(f'<line x1="{x}" x2="{x + 22}" y1="{y}" y2="{y}" class="curve s{one.number % COLOURS}"/>')
        out.append(_text(x + 28, y + 4, one.name, "start", ""))
    return "".join(out) + "</svg>"


def bars(measures: Sequence[Measure], label: str, top: float | None = None) -> str:
    """Horizontal bars from 0; a negative value is drawn to the left of it."""
    row, left = 28, 230
    low = min(0.0, min((one.value for one in measures), default=0.0))
    high = top or max([0.0, *(v for one in measures for v in (one.value, *(m for m, _ in one.marks)))]) or 1.0
    scale = (_WIDTH - left - 210) / (high - low)
    zero = left - low * scale
    out = [_svg(row * len(measures), label)]
    for number, one in enumerate(measures):
        y = number * row
        begin, end = sorted((zero, zero + one.value * scale))
        out.append(_text(left - 12, y + 18, one.name, "end", ""))
        out.append(
            f'<rect x="{begin:.1f}" y="{y + 4}" width="{max(0.5, end - begin):.1f}" height="{row - 8}" '
            f'class="c{one.number % COLOURS}"/>'
        )
        edge = end
        for value, what in one.marks:
            x = zero + value * scale
            edge = max(edge, x)
            out.append(
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y + 1}" y2="{y + row - 1}" class="mark">'
                f"<title>{escape(what)}</title></line>"
            )
        out.append(_text(edge + 8, y + 18, one.words, "start", "small"))
    return "".join(out) + "</svg>"


def grid(
    columns: Sequence[str], rows: Sequence[str], cells: Sequence[Sequence[float]], x_name: str, y_name: str
) -> str:
    """A shaded table: cells[row][column] from 0 to 1, as per cent; the darker the more."""
    wide, high, left, top = 120, 34, 210, 34
    low = min(value for row in cells for value in row)
    high_value = max(value for row in cells for value in row)
    span = high_value - low or 1.0
    out = [
        f'<svg viewBox="0 0 {left + wide * len(columns) + 10} {top + high * len(rows) + 24}" role="img" class="grid" '
    ]
    out.append(f'aria-label="{escape(y_name)} by {escape(x_name)}">')
    for number, name in enumerate(columns):
        out.append(_text(left + wide * (number + 0.5), top - 10, name, "middle", "small"))
    for number, name in enumerate(rows):
        y = top + high * number
        out.append(_text(left - 12, y + 22, name, "end", "small"))
        for column, value in enumerate(cells[number]):
            x = left + wide * column
            shade = 0.08 + 0.62 * (value - low) / span
            out.append(
                f'<rect x="{x}" y="{y}" width="{wide - 2}" height="{high - 2}" class="c0" opacity="{shade:.2f}"/>'
            )
            out.append(_text(x + wide / 2, y + 22, f"{100 * value:.1f} %", "middle", "strong"))
    out.append(_text(left + wide * len(columns) / 2, top + high * len(rows) + 18, x_name, "middle", "small"))
    out.append(_text(left - 12, top - 10, y_name, "end", "small"))
    return "".join(out) + "</svg>"


def _svg(height: float, label: str) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(label)}">'


def _text(x: float, y: float, words: str, anchor: str, css: str) -> str:
    kind = f' class="{css}"' if css else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{kind}>{escape(words)}</text>'


def _thin(points: Points) -> Points:
    """At most _MOST of the points, the first and the last among them."""
    if len(points) <= _MOST:
        return points
    stride = (len(points) - 1) / (_MOST - 1)
    return [points[round(number * stride)] for number in range(_MOST)]


def _nice(value: float) -> float:
    """The next round number that is not below the value."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(factor * power for factor in (1, 1.5, 2, 3, 4, 5, 6, 8, 10) if factor * power >= value * 0.999999)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.2g}"
