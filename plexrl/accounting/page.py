"""The report as one HTML file that needs nothing else: no script, no font, no network."""

from collections.abc import Sequence
from html import escape

from plexrl.accounting.drawings import largest, savings, waterfall
from plexrl.accounting.published import Published
from plexrl.accounting.spread import by_account, stretches
from plexrl.accounting.style import STYLE, hatch
from plexrl.accounting.timeline import liveliest, timeline
from plexrl.accounting.words import (
    MEANING,
    Unit,
    clock,
    duration,
    minus,
    moved_words,
    percent,
    sacct_words,
    saved_words,
    seen_words,
    sure_words,
)

_COLOURS = 8


def page(found: dict, published: Published, accounts: Sequence[dict] = ()) -> str:
    """figures() and what it was made from as an HTML document. accounts: rows by account of the jobs that it shows."""
    unit = Unit(max(found["pool_gpu_seconds"], found["dedicated_gpu_seconds"]))
    drawn = [job["job"] for job in largest(found["jobs"])]
    colours = {job["job"]: "others" for job in found["jobs"]}
    colours |= {job: f"c{number % _COLOURS}" for number, job in enumerate(drawn)}
    parts = [_head(found), _cards(found, unit)]
    parts.append(_section("Saved", savings(found, unit), _saving_words(found)))
    parts.append(_section("What each GPU did", _timelines(found, published, colours), ""))
    parts.append(_section("Where the GPU time went", waterfall(found, unit, colours), _where_words(found, unit)))
    if accounts:
        parts.append(_section("Savings by account", by_account(accounts, unit), _account_words(unit)))
    told = [job["stretch"] for job in found["jobs"] if job["stretch"] is not None]
    if told:
        parts.append(_section("How much longer than alone", stretches(told), _stretch_words(found, len(told))))
    if found["jobs"]:
        parts.append(_section("Jobs", _jobs(found["jobs"], unit, colours), _jobs_words(unit)))
    parts += [_section("Notes", "".join(f"<p>{escape(n)}</p>" for n in found["notes"]), "")] if found["notes"] else []
    parts.append(_meaning(found, published))
    title = escape(f"Pool {found['pool']}: GPU time")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style></head><body>{hatch()}<main>{''.join(parts)}</main></body></html>\n"
    )


def _section(title: str, body: str, words: str) -> str:
    after = f'<p class="words">{escape(words)}</p>' if words else ""
    return f"<section><h2>{title}</h2>{body}{after}</section>"


def _head(found: dict) -> str:
    gpus = f"{found['gpus']} GPU" + ("" if found["gpus"] == 1 else "s")
    until = f"{clock(found['until'])}, still running" if found["running"] else clock(found["until"])
    length = duration(found["until"] - found["from"])
    return (
        f"<header><h1>Pool {escape(found['pool'])}</h1>"
        f"<p>{gpus} · {clock(found['from'])} to {until} · {length}</p></header>"
    )


def _cards(found: dict, unit: Unit) -> str:
    good = found["saved_gpu_seconds"] >= 0
    share = "-" if found["saved_percent"] is None else percent(found["saved_percent"] / 100, 1)
    mean = found["stretch_mean"]
    cards = [
        ("saved", share, f"of what dedicated runs would have held ({found['confidence']})", "good" if good else "bad"),
        ("the pool held", unit(found["pool_gpu_seconds"]), unit.name, ""),
        ("dedicated runs", unit(found["dedicated_gpu_seconds"]), f"{unit.name}, colocated", ""),
        ("GPUs busy", percent(found["shares"]["busy"]), "of the time that the pool held them", ""),
        ("stretch", "-" if mean is None else f"{mean:.2f}", "wall time shared / alone, mean", ""),
    ]
    html = "".join(
        f'<div class="card {css}"><h3>{name}</h3><b>{value}</b><span>{escape(words)}</span></div>'
        for name, value, words, css in cards
    )
    return f'<div class="cards">{html}</div>'


def _where_words(found: dict, unit: Unit) -> str:
    sacct = found["sacct_gpu_seconds"]
    words = sacct_words(found) + "." if sacct is None else f"By sacct: {unit(sacct)} {unit.name}, {sacct_words(found)}."
    return f"{words} {moved_words(found, unit)}"


def _saving_words(found: dict) -> str:
    if found["saved_percent"] is None:
        return saved_words(found).capitalize() + "."
    words = "Dedicated: each job's own recorded calls, replayed alone on GPUs of its own. "
    if found["saved_gpu_seconds"] < 0:
        words += (
            "Here the pool held more than that: it waited for jobs, or started and ended, for longer than it shared. "
        )
    return words + sure_words(found, Unit(max(found["pool_gpu_seconds"], found["dedicated_gpu_seconds"])))


def _timelines(found: dict, published: Published, colours: dict[str, str]) -> str:
    start, end = int(found["from"] * 1e6), published.until_us
    bars, gpus = published.timeline, published.gpus
    legend = [
        f'<span><i class="key {colours[j["job"]]}"></i>job {j["slurm_id"]}, {escape(j["user"])}</span>'
        for j in largest(found["jobs"])
    ]
    if published.uid is not None or len(legend) < len(published.jobs):
        legend.append('<span><i class="key others"></i>others</span>')
    for css, words in (("solid", "busy"), ("dark", "switch"), ("light", "kept"), ("idle", "idle")):
        legend.append(f'<span><i class="key {css}"></i>{words}</span>')
    legend.append('<span><i class="key startup"></i>startup, drain</span>')
    html = f'<p class="legend">{"".join(legend)}</p>{timeline(bars, gpus, start, end, colours)}'
    first = min((bar.start_us for bar in bars), default=start)
    if first > start + 60_000_000 and published.uid is None:
        html += f'<p class="words">Drawn from {clock(first / 1e6)} on; the sums hold all of it.</p>'
    zoom = liveliest(bars, start, end)
    if zoom:
        html += f"<h3>The liveliest minute</h3>{timeline(bars, gpus, *zoom, colours)}"
    return html


def _jobs(jobs: list[dict], unit: Unit, colours: dict[str, str]) -> str:
    heads = "job user account charged switch dedicated saved GPUs wall alone stretch wait/call calls".split()
    rows = []
    for job in jobs:
        state = " (running)" if job["running"] else ""
        cells = [
            f'<td><i class="key {colours[job["job"]]}"></i>{job["slurm_id"]}{state}</td>',
            f"<td>{escape(job['user'])}</td><td>{escape(job['account'])}</td>",
        ]
        numbers = [
            unit(job["charged"]),
            unit(job["switch"]),
            unit(job["dedicated"]),
            unit(job["saved"]),
            str(job["dedicated_gpus"]),
            duration(job["wall_seconds"]),
            duration(job["replayed_seconds"]),
            "-" if job["stretch"] is None else minus(f"{job['stretch']:.2f}"),
            duration(job["wait_seconds"]),
            f"{job['calls']:,}",
        ]
        cells += [f'<td class="n">{number}</td>' for number in numbers]
        rows.append(f"<tr>{''.join(cells)}</tr>")
    head = "".join(f"<th{'' if i < 3 else ' class=n'}>{name}</th>" for i, name in enumerate(heads))
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _account_words(unit: Unit) -> str:
    return (
        f"Dark: charged. Green: what dedicated runs would have held beyond that, in {unit.name}; red: charged beyond "
        "what they would have held. The pool owner's overhead is no account's, and is not in it."
    )


def _stretch_words(found: dict, jobs: int) -> str:
    whose = "one job" if jobs == 1 else f"{jobs} jobs"
    return f"Of {whose}: mean {found['stretch_mean']:.2f}, 95 % within {found['stretch_p95']:.2f}."


def _jobs_words(unit: Unit) -> str:
    return (
        f"Charged (switch: a part of it), dedicated and saved in {unit.name}. A job's saved is its dedicated run less "
        "its charge; the pool owner's overhead is in the pool's saved only. GPUs: what its dedicated run would hold."
    )


def _meaning(found: dict, published: Published) -> str:
    rows = [f"<tr><td>{kind.value}</td><td>{words}</td></tr>" for kind, words in MEANING.items()]
    sums = (
        "<p>Charged + overhead + unattributed = what the pool held, by its agents' own clocks; Slurm's accounting is "
        "the second, independent sum. A job pays for busy, switch and what was kept for it; the rest is overhead.</p>"
        "<p>A dedicated run is a job's own recorded calls, replayed alone in the order in which they depended on one "
        "another, with the time that the program thought in between and one build per engine; how long each call takes "
        "there is told by a model fitted to what calls took. Colocated, the headline: trainer and sampler take turns "
        "on the larger of the two. Split: each has its own GPUs. For a program that keeps many calls in flight it is a "
        "bound.</p>"
        "<p>Replayed: the model predicts the recorded calls well. Estimated: it does not, or the cores were contended. "
        "Declared: what a script asked for beyond what its job used; it is in no other sum. "
        "<code>plexrl report --explain JOB</code> prints the arithmetic of one job.</p>"
    )
    seen = escape(seen_words(published.uid, published.accounts))
    own = f"<p>{seen}</p>" if seen else ""
    return f"<section><h2>What the words mean</h2><table class='words'>{''.join(rows)}</table>{sums}{own}</section>"
