"""The simulator's page: one HTML file that needs nothing else; it plays runs back, turn by turn."""

from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files

from plexrl.sim.charts import COLOURS, Series, curves
from plexrl.sim.replay import duty, embedded, replay
from plexrl.sim.result import JobResult, Result
from plexrl.sim.table import Column, cell

_SPEEDS = (("0.1", "tenth"), ("0.25", "quarter"), ("1", "whole run in a minute"), ("4", "4 x"), ("16", "16 x"))
_SPANS = (
    ("all", "the whole run"),
    ("day", "a day"),
    ("hours", "4 hours"),
    ("hour", "an hour"),
    ("minutes", "10 minutes"),
    ("minute", "a minute"),
)
_CLASSES = (
    ("busy", "a call ran"),
    ("switch (hatched)", "state moved, or an engine was built"),
    ("kept (pale)", "kept for its job's next call"),
    ("empty", "idle"),
)


def document(title: str, words: str, sections: Sequence[str], runs: Sequence[Result] = ()) -> str:
    """The page. words: below the title. sections: made by `section`. runs: those with a timeline can be played."""
    played = [replay(run) for run in runs if run.timeline]
    here = files("plexrl.sim")
    style = (here / "page.css").read_text(encoding="utf-8")
    style += "".join(
        f".c{i}{{fill:var(--c{i});background:var(--c{i})}}.s{i}{{stroke:var(--c{i})}}" for i in range(COLOURS)
    )
    body = list(sections)
    if played:
        script = (here / "player.js").read_text(encoding="utf-8")
        body.append(section("Play it back", _player(played)))
        body.append(f'<script type="application/json" id="runs">{embedded(played)}</script><script>{script}</script>')
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{style}</style></head><body><main><header><h1>{escape(title)}</h1><p>{escape(words)}</p></header>"
        f"{''.join(body)}</main></body></html>\n"
    )


def section(title: str, body: str, words: str = "") -> str:
    """A heading, what it means in words, and the body, which is HTML already."""
    told = f'<p class="words">{escape(words)}</p>' if words else ""
    return f"<section><h2>{escape(title)}</h2>{told}{body}</section>"


def table(columns: Sequence[Column], rows: Sequence[Mapping[str, object]]) -> str:
    """Rows as an HTML table."""
    head = "".join(f"<th{'' if c.text else ' class=n'}>{escape(c.title)}</th>" for c in columns)
    lines = []
    for row in rows:
        cells = (f"<td{'' if c.text else ' class=n'}>{escape(cell(c, row.get(c.key)))}</td>" for c in columns)
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def pictures(runs: Sequence[Result]) -> list[str]:
    """The curves of several runs of one workload: stretch of their jobs, busy share and jobs over time."""
    out = []
    stretch = [
        Series(run.policy, cumulated([s for job in run.jobs if (s := stretch_of(job)) is not None]), number)
        for number, run in enumerate(runs)
    ]
    if any(one.points for one in stretch):
        words = "Share of the jobs whose time from placement to end was at most so many times their time alone."
        out.append(section("Stretch", curves(stretch, "Stretch of the jobs", "stretch", "share of jobs", 1.0), words))
    busy = [
        Series(run.policy, duty(run.timeline, run.gpus, run.wall_us), number)
        for number, run in enumerate(runs)
        if run.timeline
    ]
    if busy:
        drawn = curves(busy, "Busy share of the GPUs over time", "hours", "busy share", 1.0)
        out.append(section("Duty cycle over time", drawn, "Share of all GPUs that ran a call."))
    waiting = [Series(run.policy, queue(run.jobs), number, steps=True) for number, run in enumerate(runs)]
    drawn = curves(waiting, "Jobs that waited for their placement, over time", "hours", "jobs waiting")
    out.append(section("Queue", drawn, "Jobs that had come and had no GPUs yet."))
    return out


def stretch_of(job: JobResult) -> float | None:
    """Time from placement to end over the same alone; None where the run did not ask for it."""
    return (job.end_us - job.placed_us) / job.alone_us if job.alone_us else None


def cumulated(values: Sequence[float]) -> list[tuple[float, float]]:
    """(value, share of the values at most that large)."""
    return [(value, (place + 1) / len(values)) for place, value in enumerate(sorted(values))]


def queue(jobs: Sequence[JobResult]) -> list[tuple[float, float]]:
    """(hours, jobs that wait for their placement)."""
    changes: dict[int, int] = {0: 0}
    for job in jobs:
        changes[job.arrival_us] = changes.get(job.arrival_us, 0) + 1
        changes[job.placed_us] = changes.get(job.placed_us, 0) - 1
    points, waiting = [], 0
    for at, change in sorted(changes.items()):
        waiting += change
        points.append((at / 3.6e9, float(waiting)))
    return points


def _options(pairs: Sequence[tuple[str, str]], chosen: str) -> str:
    marked = ((value, words, " selected" if value == chosen else "") for value, words in pairs)
    return "".join(f'<option value="{value}"{mark}>{escape(words)}</option>' for value, words, mark in marked)


def _player(played: Sequence[dict]) -> str:
    """The controls, the timeline and the board of GPUs; player.js fills them."""
    runs = _options([(str(number), run["name"]) for number, run in enumerate(played)], "0")
    pick = f'<label>Run <select id="run">{runs}</select></label>' if len(played) > 1 else ""
    left_out = max(run["left_out"] for run in played)
    note = f'<p class="words">{left_out:,} more GPUs are not drawn; the curves hold all.</p>' if left_out else ""
    legend = "".join(f"<span><b>{escape(name)}</b>: {escape(words)}</span>" for name, words in _CLASSES)
    return (
        f'<div class="controls">{pick}<button id="previous" aria-label="Previous turn">&#9664; turn</button>'
        '<button id="play">Play</button><button id="next" aria-label="Next turn">turn &#9654;</button>'
        '<input type="range" id="scrub" min="0" value="0" aria-label="Time of the run">'
        f'<span class="clock" id="clock"></span>'
        f'<label>Speed <select id="speed">{_options(_SPEEDS, "1")}</select></label>'
        f'<label>Show <select id="span">{_options(_SPANS, "all")}</select></label></div>{note}'
        '<canvas id="timeline" role="img" aria-label="What each GPU did over time; a click moves the time there">'
        '</canvas><p class="legend" id="jobs" aria-label="Colours of the jobs"></p>'
        f'<p class="legend">{legend}</p><div class="board"><div><h3>GPUs at this moment</h3>'
        '<canvas id="gpus" role="img" aria-label="One square per GPU, in the colour of its job"></canvas>'
        '<p id="sums" aria-live="polite"></p></div><div><h3>Turns</h3><ul class="turns" id="turns"></ul></div></div>'
    )
