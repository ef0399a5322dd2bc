"""The report in a terminal."""

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from plexrl.accounting.words import (
    Unit,
    clock,
    duration,
    minus,
    moved_words,
    percent,
    sacct_words,
    saved_words,
    sure_words,
)
from plexrl.types import SpanClass

_STYLE = {
    SpanClass.BUSY: "green",
    SpanClass.SWITCH: "yellow",
    SpanClass.KEPT: "cyan",
    SpanClass.IDLE: "bright_black",
    SpanClass.STARTUP: "blue",
    SpanClass.DRAIN: "magenta",
}
_BAR = 50


def render(found: dict, seen: str) -> RenderableType:
    """figures() as something that rich prints. seen: whose jobs the reader sees, said at the end."""
    unit = Unit(max(found["pool_gpu_seconds"], found["dedicated_gpu_seconds"]))
    parts: list[RenderableType] = [_title(found), Text(), _sums(found, unit), Text(), _classes(found)]
    parts.append(Text(moved_words(found, unit), style="dim"))
    if found["jobs"]:
        parts += [Text(), _jobs(found["jobs"], unit)]
    parts.append(Text(sure_words(found, unit), style="dim"))
    parts += [Text(note, style="yellow") for note in found["notes"]]
    if seen:
        parts.append(Text(seen, style="dim"))
    return Group(*parts)


def _title(found: dict) -> Text:
    until = "now, still running" if found["running"] else clock(found["until"])
    gpus = f"{found['gpus']} GPU" + ("" if found["gpus"] == 1 else "s")
    text = Text.assemble(("Pool ", "bold"), (found["pool"], "bold"), f"   {gpus}   {clock(found['from'])} to {until}")
    style = "bold green" if found["saved_gpu_seconds"] >= 0 else "bold red"
    return text.append("\nSaved: ").append(saved_words(found), style=style)


def _sums(found: dict, unit: Unit) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=True, header_style="dim")
    for column, justify in (("", "left"), (unit.name, "right"), ("", "left")):
        table.add_column(column, justify=justify)
    row = table.add_row
    row("charged to jobs", unit(found["charged_gpu_seconds"]))
    row("overhead of the pool's owner", unit(found["overhead_gpu_seconds"]))
    row("unattributed", unit(found["unattributed_gpu_seconds"]))
    row("[bold]pool, by its agents' clocks[/]", f"[bold]{unit(found['pool_gpu_seconds'])}[/]", "the sum of the above")
    sacct = found["sacct_gpu_seconds"]
    row("pool, by sacct", "-" if sacct is None else unit(sacct), f"[dim]{sacct_words(found)}[/]", end_section=True)
    row()
    row("dedicated runs, colocated", unit(found["dedicated_gpu_seconds"]), "[dim]trainer and sampler take turns[/]")
    row("dedicated runs, split", unit(found["dedicated_split_gpu_seconds"]), "[dim]GPUs of their own for each[/]")
    saved = f"[bold]{unit(found['saved_gpu_seconds'])}[/]"
    ideal = found["ideal_saved_gpu_seconds"]
    best = "" if ideal is None else f"[dim]at most {unit(ideal)} could be saved with these jobs[/]"
    row("[bold]saved: colocated - pool[/]", saved, best)
    return table


def _classes(found: dict) -> Text:
    """One bar of all the GPUs' time by class, and its legend."""
    shares = {kind: found["shares"][kind.value] for kind in SpanClass}
    bar, filled, reached = Text(), 0, 0.0
    for kind, share in shares.items():
        reached += share
        upto = round(_BAR * reached)
        bar.append("\u2588" * (upto - filled), style=_STYLE[kind])
        filled = upto
    legend = Text("\n")
    for kind, share in shares.items():
        legend.append("\u2588 ", style=_STYLE[kind]).append(f"{kind.value} {percent(share)}  ")
    return bar + legend


def _jobs(jobs: list[dict], unit: Unit) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for column in ("job", "user", "account"):
        table.add_column(column, no_wrap=True)
    for column in ("charged", "switch", "dedicated", "saved", "GPUs", "wall", "stretch"):
        table.add_column(column, justify="right", no_wrap=True)
    for job in jobs:
        table.add_row(
            str(job["slurm_id"]) + ("*" if job["running"] else ""),
            job["user"],
            job["account"],
            unit(job["charged"]),
            unit(job["switch"]),
            unit(job["dedicated"]),
            unit(job["saved"]),
            str(job["dedicated_gpus"]),
            duration(job["wall_seconds"]),
            "-" if job["stretch"] is None else minus(f"{job['stretch']:.2f}"),
        )
    caption = f"{unit.name}; switch: a part of charged; a job's saved = its dedicated - its charge, without overhead"
    if any(job["running"] for job in jobs):
        caption += "; * still running"
    table.caption, table.caption_justify = caption, "left"
    return table


def show(found: dict, seen: str, console: Console | None = None) -> None:
    """Print it."""
    (console or Console()).print(render(found, seen))
