"""The waterfall of the pool's GPU-seconds and the bars of the saving, as SVG."""

from html import escape

from plexrl.accounting.words import Unit, percent
from plexrl.types import SpanClass

_WIDTH, _LABEL, _ROW, _BAR = 1100, 250, 34, 22
_NUMBER = 150
_JOBS = 16


def _scale(largest: float) -> float:
    return (_WIDTH - _LABEL - _NUMBER) / largest if largest > 0 else 0.0


def _open(rows: int, label: str) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {rows * _ROW}" role="img" aria-label="{label}">'


def _row(row: int, name: str, bars: list[tuple[float, float, str]], number: str, strong: bool = False) -> str:
    """A label, bars of (x, width, css) side by side, and the number behind them."""
    y = row * _ROW + (_ROW - _BAR) / 2
    weight = ' class="strong"' if strong else ""
    middle = y + _BAR / 2 + 4.5
    out = [f'<text x="{_LABEL - 12}" y="{middle}" text-anchor="end"{weight}>{escape(name)}</text>']
    for x, width, css in bars:
        for part in (css.replace("hatched", "full"), "hatch") if "hatched" in css else (css,):
            out.append(f'<rect x="{x:.1f}" y="{y}" width="{max(width, 0.5):.1f}" height="{_BAR}" class="{part}"/>')
    end = max(x + width for x, width, _ in bars)
    out.append(f'<text x="{end + 8:.1f}" y="{middle}"{weight}>{escape(number)}</text>')
    return "".join(out)


def largest(jobs: list[dict]) -> list[dict]:
    """Those that were charged most, as many as a drawing has room for, in the order given."""
    least = sorted((job["charged"] for job in jobs), reverse=True)[:_JOBS]
    return [job for job in jobs if job["charged"] >= least[-1]][:_JOBS] if least else []


def waterfall(found: dict, unit: Unit, colours: dict[str, str]) -> str:
    """What the pool's GPU-seconds went to, step by step: each job's charge (busy, switch, kept), then the overhead."""
    pool = found["pool_gpu_seconds"]
    scale = _scale(pool)
    steps: list[tuple[str, list[tuple[float, str]]]] = []
    shown = largest(found["jobs"])
    for job in shown:
        colour = colours[job["job"]]
        pieces = [
            (job["busy"], f"{colour} full"),
            (job["switch"], f"{colour} hatched"),
            (job["kept"], f"{colour} kept"),
        ]
        steps.append((f"job {job['slurm_id']}, {job['user']}", pieces))
    others = found["charged_gpu_seconds"] - sum(job["charged"] for job in shown)
    if others > 0.05:
        steps.append(("other jobs", [(others, "others full")]))
    idle = [(kind, found["shares"][kind.value] * pool) for kind in (SpanClass.IDLE, SpanClass.STARTUP, SpanClass.DRAIN)]
    steps += [(kind.value, [(seconds, kind.value)]) for kind, seconds in idle]
    nobody = found["overhead_gpu_seconds"] - sum(seconds for _, seconds in idle)
    if nobody > 0.05:
        steps.append(("work that no job pays for", [(nobody, "others full")]))
    if found["unattributed_gpu_seconds"] > 0.05:
        steps.append(("unattributed", [(found["unattributed_gpu_seconds"], "unknown")]))
    rows = [_row(0, "the pool held", [(_LABEL, pool * scale, "ink")], f"{unit(pool)} {unit.name}", strong=True)]
    x = float(_LABEL)
    for number, (name, pieces) in enumerate(steps, start=1):
        y = number * _ROW
        line = f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y - _ROW / 2}" y2="{y + _ROW / 2}" class="tick"/>'
        bars = []
        for seconds, css in pieces:
            bars.append((x, seconds * scale, css))
            x += seconds * scale
        value = sum(seconds for seconds, _ in pieces)
        rows.append(line + _row(number, name, bars, f"{unit(value)}  ({percent(value / pool) if pool else '-'})"))
    return _open(len(rows), "Where the GPU time went") + "".join(rows) + "</svg>"


def savings(found: dict, unit: Unit) -> str:
    """Dedicated runs beside the pool; the bracket is what sharing saved or cost."""
    pool, dedicated = found["pool_gpu_seconds"], found["dedicated_gpu_seconds"]
    split, ideal = found["dedicated_split_gpu_seconds"], found["ideal_saved_gpu_seconds"]
    scale = _scale(max(pool, dedicated, split))
    rows = [
        _row(0, "dedicated, split GPUs", [(_LABEL, split * scale, "faint")], unit(split)),
        _row(1, "dedicated, colocated", [(_LABEL, dedicated * scale, "soft")], unit(dedicated), strong=True),
        _row(2, "this pool", [(_LABEL, pool * scale, "ink")], unit(pool), strong=True),
    ]
    low, high = sorted((pool, dedicated))
    good = dedicated >= pool
    word = "saved" if good else "more"
    number = f"{unit(abs(dedicated - pool))} {unit.name} {word}"
    rows.append(
        _row(3, "", [(_LABEL + low * scale, (high - low) * scale, "good" if good else "bad")], number, strong=True)
    )
    if ideal is not None and dedicated:
        least = max(0.0, dedicated - ideal)
        rows.append(_row(4, "least possible with these jobs", [(_LABEL, least * scale, "faint")], unit(least)))
    return _open(len(rows), "Dedicated runs beside the pool") + "".join(rows) + "</svg>"
