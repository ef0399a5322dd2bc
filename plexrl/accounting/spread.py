"""Drawings over many jobs: savings by account, and how much longer than alone jobs took, as SVG."""

from collections.abc import Sequence
from html import escape

from plexrl.accounting.words import Unit, minus

_WIDTH, _LABEL, _ROW, _BAR, _NUMBER = 1100, 250, 34, 22, 190
# Upper edges of the bins of stretches; a job between two edges is in the bin of the upper one.
_EDGES = (0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0)
_HEIGHT, _FOOT, _HEAD = 206, 44, 40
_ACCOUNTS = 12


def by_account(rows: Sequence[dict], unit: Unit) -> str:
    """Per account what dedicated runs would have held, and how that parts into charge and saving; where the charge is
    larger the rest is drawn beyond it, in the colour of a loss. The largest accounts one by one, the rest together."""
    rows = sorted(rows, key=lambda row: -max(row["dedicated"], row["charged"]))
    shown = [(row["account"] or "-", row["charged"], row["dedicated"]) for row in rows[:_ACCOUNTS]]
    if rest := rows[_ACCOUNTS:]:
        shown.append((f"{len(rest)} others", sum(r["charged"] for r in rest), sum(r["dedicated"] for r in rest)))
    scale = (_WIDTH - _LABEL - _NUMBER) / (max((max(c, d) for _, c, d in shown), default=0.0) or 1.0)
    out = [f'<svg viewBox="0 0 {_WIDTH} {len(shown) * _ROW}" role="img" aria-label="Savings by account">']
    for number, (name, charged, dedicated) in enumerate(shown):
        y = number * _ROW + (_ROW - _BAR) / 2
        middle = y + _BAR / 2 + 4.5
        low, high = sorted((charged, dedicated))
        good = dedicated >= charged
        word = "saved" if good else "more"
        out.append(f'<text x="{_LABEL - 12}" y="{middle}" text-anchor="end">{escape(name)}</text>')
        out.append(_bar(_LABEL, y, low * scale, "ink"))
        out.append(_bar(_LABEL + low * scale, y, (high - low) * scale, "good" if good else "bad"))
        text = f"{unit(abs(dedicated - charged))} {unit.name} {word}"
        out.append(f'<text x="{_LABEL + high * scale + 8:.1f}" y="{middle}">{escape(text)}</text>')
    return "".join(out) + "</svg>"


def _bar(x: float, y: float, width: float, css: str) -> str:
    return f'<rect x="{x:.1f}" y="{y}" width="{max(width, 0.5):.1f}" height="{_BAR}" class="{css}"/>'


def stretches(found: Sequence[float]) -> str:
    """A histogram of jobs by stretch; the dashed line is a job that took as long as alone."""
    counts = [0] * (len(_EDGES) + 1)
    for value in found:
        counts[next((i for i, edge in enumerate(_EDGES) if value <= edge), len(_EDGES))] += 1
    most = max(counts) or 1
    width = (_WIDTH - 40) / len(counts)
    bottom = _HEIGHT - _FOOT
    out = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="Stretch of jobs">']
    out.append(f'<line x1="20" x2="{_WIDTH - 20}" y1="{bottom}" y2="{bottom}" class="tick"/>')
    for i, count in enumerate(counts):
        x = 20 + i * width
        height = (bottom - _HEAD) * count / most
        css = "good" if i < len(_EDGES) and _EDGES[i] <= 1.0 else "soft"
        middle = f'x="{x + width / 2:.1f}" text-anchor="middle"'
        if count:
            top = bottom - height
            out.append(
                f'<rect x="{x + 6:.1f}" y="{top:.1f}" width="{width - 12:.1f}" height="{height:.1f}" class="{css}"/>'
            )
            out.append(f'<text {middle} y="{top - 6:.1f}">{count}</text>')
        out.append(f'<text {middle} y="{bottom + 17}" class="small">{_bin(i)}</text>')
    one = 20 + (_EDGES.index(1.0) + 1) * width
    out.append(f'<line x1="{one:.1f}" x2="{one:.1f}" y1="4" y2="{bottom}" class="alone"/>')
    out.append(f'<text x="{one + 6:.1f}" y="14" class="small">as long as alone</text>')
    foot = "wall time in the pool / wall time alone; height: jobs"
    out.append(f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 6}" text-anchor="middle" class="small">{foot}</text>')
    return "".join(out) + "</svg>"


def _bin(i: int) -> str:
    if i == 0:
        return f"up to {_EDGES[0]:g}"
    if i == len(_EDGES):
        return f"over {_EDGES[-1]:g}"
    return minus(f"{_EDGES[i - 1]:g} to {_EDGES[i]:g}")
