"""What a comparison or a preset hands back, whoever shows it."""

from collections.abc import Callable
from typing import Any

from msgspec import Struct

from plexrl.sim.result import Result
from plexrl.sim.table import Column

Progress = Callable[[float, str], None]
"""Told of the share of the work that is done, and what is being done."""


class Found(Struct, kw_only=True):
    """rows: one dict per line, all figures. columns: those that people see. notes: said below the table.

    more: what JSON holds beside the rows. sections: HTML of the page, after the table. runs: to be played back.
    """

    title: str
    words: str
    columns: tuple[Column, ...]
    rows: list[dict[str, Any]]
    notes: list[str]
    more: dict[str, Any] = {}
    sections: list[str] = []
    runs: list[Result] = []
