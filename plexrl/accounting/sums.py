"""Sums by user, account, month and so on, in a terminal."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from plexrl.accounting.words import Unit, minus

_WIDTH = 170  # of what is written to a file or a pipe
_COLUMNS = ("charged", "switch", "dedicated", "dedicated_split", "saved")
_HEADS = ("charged", "switch", "dedicated", "split", "saved")
_POOL = ("pool_held", "pool_overhead", "pool_unattributed", "pool_dedicated", "pool_saved")
_POOL_HEADS = ("held", "overhead", "unattributed", "dedicated, all", "saved, all")


def show(rows: Sequence[dict], keys: Sequence[str], own_only: bool, console: Console | None = None) -> None:
    """Print rows of `groups.rows`. own_only: the reader sees some of the jobs only; said at the end."""
    console = console or Console()
    if not console.is_terminal:
        console.width = max(console.width, _WIDTH)
    if not rows:
        console.print("No job was there in that time.")
        return
    whole = "pool_held" in rows[0]
    unit = Unit(max(row[name] for row in rows for name in ("charged", "dedicated", *(_POOL[:1] if whole else ()))))
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for key in keys:
        table.add_column(key, no_wrap=True)
    for head in ("jobs", *_HEADS, "stretch", *(_POOL_HEADS if whole else ())):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("sure", no_wrap=True)
    for row in rows:
        mean = row["stretch_mean"]
        cells = [row[key] or "-" for key in keys] + [str(row["jobs"])]
        cells += [unit(row[name]) for name in _COLUMNS]
        cells.append("-" if mean is None else minus(f"{mean:.2f}"))
        cells += [unit(row[name]) for name in _POOL] if whole else []
        table.add_row(*(Text(cell) for cell in cells), Text(sure(row), style="dim"))
    console.print(table)
    words = f"{unit.name}; switch: a part of charged; saved: dedicated (colocated) - charged, without overhead"
    if whole:
        words += "; saved, all: what all dedicated runs would have held - what the pool held"
    console.print(Text(words, style="dim"))
    if own_only:
        console.print(Text("Of jobs that you may see; what whole pools did is of all jobs.", style="dim"))


def sure(row: dict) -> str:
    """How sure a row's dedicated runs are; where jobs differ, how much of it each word stands for."""
    parts = {name: row[f"dedicated_{name}"] for name in ("replayed", "estimated") if row[f"dedicated_{name}"]}
    if len(parts) < 2:
        return row["confidence"]
    total = sum(parts.values())
    return ", ".join(f"{100 * part / total:.0f} % {name}" for name, part in parts.items())
