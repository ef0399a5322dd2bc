"""Rows of figures as tables in a terminal; `page` writes the same columns as HTML."""

from collections.abc import Mapping, Sequence

from msgspec import Struct
from rich.console import Console
from rich.table import Table
from rich.text import Text

_WIDTH = 140  # of what is written to a file or a pipe


class Column(Struct, frozen=True):
    """A column. key: of the row. form: a format, or `%` or `1%` for a share of 1 in per cent."""

    key: str
    title: str
    form: str = ""
    text: bool = False


def cell(column: Column, value: object) -> str:
    """One value as people read it; None is a dash."""
    if value is None:
        return "-"
    if isinstance(value, list | tuple):
        return " to ".join(cell(column, part) for part in value)
    if column.form.endswith("%"):
        assert isinstance(value, int | float)
        return f"{100 * value:.{column.form[:-1] or 2}f} %"
    return format(value, column.form)


def show(
    title: str, columns: Sequence[Column], rows: Sequence[Mapping[str, object]], notes: Sequence[str] = ()
) -> None:
    """Print a table to stdout."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        table.add_column(column.title, justify="left" if column.text else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(cell(column, row.get(column.key))) for column in columns))
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, _WIDTH)
    console.print(Text(title, style="bold"))
    console.print(table)
    for note in notes:
        console.print(Text(note, style="dim"))
