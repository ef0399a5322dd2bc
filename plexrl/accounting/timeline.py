"""The timeline of the GPUs as SVG: one lane per GPU, jobs by colour, classes by texture."""

from collections.abc import Iterable, Sequence
from html import escape

from plexrl.accounting.published import Bar
from plexrl.accounting.words import clock, duration
from plexrl.types import SpanClass

LEFT, WIDTH, LANE, GAP, AXIS = 92, 1100, 34, 10, 26
_COLUMNS = 2 * (WIDTH - LEFT)
_EXACT = 6000  # bars; with more of them each half pixel shows what it mostly was
_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 604800)
_ZOOM_US = 60_000_000
_TEXTURE = {SpanClass.IDLE: "idle", SpanClass.STARTUP: "startup", SpanClass.DRAIN: "drain", None: "unknown"}


def timeline(bars: Sequence[Bar], gpus: Sequence[str], start_us: int, end_us: int, jobs: dict[str, str]) -> str:
    """An <svg>. jobs: job -> class of its colour (c0, c1, ...); jobs that are not in it are drawn as others."""
    span = max(1, end_us - start_us)
    height = len(gpus) * (LANE + GAP) + AXIS
    out = [
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="What each GPU did over time" class="timeline">',
        _ticks(start_us, end_us, height - AXIS),
    ]
    for lane, gpu in enumerate(gpus):
        y = lane * (LANE + GAP)
        mine = [bar for bar in bars if bar.gpu == gpu and bar.end_us > start_us and bar.start_us < end_us]
        out.append(f'<text x="{LEFT - 10}" y="{y + LANE / 2 + 4}" text-anchor="end">{escape(gpu)}</text>')
        out.append(f'<rect x="{LEFT}" y="{y}" width="{WIDTH - LEFT}" height="{LANE}" class="lane"/>')
        if len(mine) > _EXACT:
            mine = coarse(mine, start_us, end_us)
        for bar in mine:
            x = LEFT + (max(bar.start_us, start_us) - start_us) / span * (WIDTH - LEFT)
            to = LEFT + (min(bar.end_us, end_us) - start_us) / span * (WIDTH - LEFT)
            if bar.kind is not None or to - x >= 0.25:  # an outline would show more than there is
                out.append(_bar(bar, x, to - x, y, jobs))
    out.append("</svg>")
    return "".join(out)


def _bar(bar: Bar, x: float, width: float, y: float, jobs: dict[str, str]) -> str:
    shares = [share for share in bar.shares if share[1] > 0]
    what = bar.kind.value if bar.kind else "unattributed"
    length = duration((bar.end_us - bar.start_us) / 1e6)
    whose = ", ".join(job.split(".")[0] or "others" for job, _ in shares)
    title = f"<title>{escape(f'{what} {whose}'.strip())}, {length} from {clock(bar.start_us / 1e6, False)}</title>"
    if not shares or bar.kind in _TEXTURE:
        return f"<g>{title}{_rect(x, width, y, LANE, _TEXTURE.get(bar.kind, 'idle'))}</g>"
    out, total = [], sum(weight for _, weight in shares)
    for job, weight in shares:
        height = LANE * weight / total
        colour = jobs.get(job, "others")
        out.append(_rect(x, width, y, height, f"{colour} {'kept' if bar.kind is SpanClass.KEPT else 'full'}"))
        if bar.kind is SpanClass.SWITCH:
            out.append(_rect(x, width, y, height, "hatch"))
        y += height
    return f"<g>{title}{''.join(out)}</g>"


def _rect(x: float, width: float, y: float, height: float, css: str) -> str:
    return f'<rect x="{x:.2f}" y="{y:.1f}" width="{max(width, 0.25):.2f}" height="{height:.1f}" class="{css}"/>'


def _ticks(start_us: int, end_us: int, height: int) -> str:
    seconds = max(1, end_us - start_us) / 1e6
    step = next((s for s in _STEPS if seconds / s <= 9), _STEPS[-1])
    out, at = [], -(-start_us // (step * 1_000_000)) * step
    while at * 1_000_000 <= end_us:
        x = LEFT + (at * 1_000_000 - start_us) / max(1, end_us - start_us) * (WIDTH - LEFT)
        label = clock(at)[5:16] if step >= 3600 else clock(at, False)
        anchor = "end" if x > WIDTH - 30 else "middle"
        out.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height}" class="tick"/>')
        out.append(f'<text x="{x:.1f}" y="{height + 14}" text-anchor="{anchor}" class="small">{label}</text>')
        at += step
    return "".join(out)


def coarse(bars: Iterable[Bar], start_us: int, end_us: int) -> list[Bar]:
    """Bars of one GPU, in order, as columns of equal width: each is the bar that fills most of it."""
    width = (end_us - start_us) / _COLUMNS
    best: dict[int, tuple[float, Bar]] = {}
    for bar in bars:
        low, high = max(bar.start_us, start_us) - start_us, min(bar.end_us, end_us) - start_us
        for column in range(int(low / width), min(_COLUMNS, int(high / width) + 1)):
            covered = min(high, (column + 1) * width) - max(low, column * width)
            if covered > best.get(column, (0.0, bar))[0]:
                best[column] = covered, bar
    out: list[Bar] = []
    for column, (_, bar) in sorted(best.items()):
        begin, end = start_us + round(column * width), start_us + round((column + 1) * width)
        last = out[-1] if out else None
        if last and last.end_us == begin and (last.kind, last.shares) == (bar.kind, bar.shares):
            out[-1] = Bar(bar.gpu, last.start_us, end, bar.kind, bar.shares)
        else:
            out.append(Bar(bar.gpu, begin, end, bar.kind, bar.shares))
    return out


def liveliest(bars: Sequence[Bar], start_us: int, end_us: int) -> tuple[int, int] | None:
    """The minute in which GPUs change hands most often, to be shown enlarged; None for a run of under three minutes."""
    if end_us - start_us < 3 * _ZOOM_US:
        return None
    hands: dict[int, int] = {}
    last: dict[str, tuple[tuple[str, int], ...]] = {}
    for bar in sorted(bars, key=lambda bar: bar.start_us):
        if bar.kind is SpanClass.BUSY and bar.start_us >= start_us:
            jobs = tuple(share[0] for share in bar.shares)
            if bar.gpu in last and last[bar.gpu] != jobs:
                slot = (bar.start_us - start_us) // (_ZOOM_US // 2)
                for minute in (slot - 1, slot):
                    hands[minute] = hands.get(minute, 0) + 1
            last[bar.gpu] = jobs
    whole = (end_us - start_us - _ZOOM_US) // (_ZOOM_US // 2)
    found = max((m for m in hands if 0 <= m <= whole), key=lambda m: (hands[m], -m), default=None)
    if found is None:
        return None
    begin = start_us + found * (_ZOOM_US // 2)
    return begin, begin + _ZOOM_US
