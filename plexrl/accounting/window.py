"""The time that a report counts: whole minutes, because charges are closed minute by minute."""

import re
import time
from collections.abc import Iterator
from datetime import datetime

from msgspec import Struct

from plexrl.accounting.charges import MINUTE_US
from plexrl.accounting.published import Job
from plexrl.types import BadInput

_AGO = {"m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


class Window(Struct, frozen=True):
    """[begin_us, end_us), unix microseconds at a minute's start; None: without bound. name: of a month."""

    begin_us: int | None = None
    end_us: int | None = None
    name: str = ""

    def holds(self, minute_us: int) -> bool:
        """Whether a minute is in it, by its start."""
        return (self.begin_us is None or minute_us >= self.begin_us) and (
            self.end_us is None or minute_us < self.end_us
        )

    def meets(self, job: Job) -> bool:
        """Whether any of a job's life is in it."""
        return (self.begin_us is None or job.ended_us >= self.begin_us) and (
            self.end_us is None or job.attached_us < self.end_us
        )

    def within(self, from_us: int, until_us: int) -> tuple[int, int]:
        """Its bounds where there are some, else those of what was published."""
        begin = from_us if self.begin_us is None else max(from_us, self.begin_us)
        return begin, until_us if self.end_us is None else min(until_us, self.end_us)


ALL = Window()


def window(since: str | None = None, until: str | None = None, month: str | None = None) -> Window:
    """Out of what was typed: times as `moment` reads them, or a month as 2026-12. Raises BadInput."""
    if month is not None:
        if since is not None or until is not None:
            raise BadInput("--month beside --since or --until", "Give one or the other")
        return month_of(month)
    begin, end = (None if text is None else moment(text) for text in (since, until))
    if begin is not None and end is not None and end <= begin:
        raise BadInput("--until is not after --since", "Give the earlier time to --since")
    floor = None if begin is None else begin - begin % MINUTE_US
    return Window(floor, None if end is None else -(-end // MINUTE_US) * MINUTE_US)


def month_of(text: str) -> Window:
    """The local month 2026-12. Raises BadInput."""
    try:
        first = datetime.strptime(text, "%Y-%m")
    except ValueError as error:
        raise BadInput(f"--month {text!r} is no month", "Write it as 2026-12") from error
    after = first.replace(year=first.year + first.month // 12, month=first.month % 12 + 1)
    return Window(*(round(at.timestamp()) * 1_000_000 for at in (first, after)), name=text)


def months(from_us: int, until_us: int) -> Iterator[Window]:
    """Every local month that [from_us, until_us] touches, oldest first."""
    while True:
        one = month_of(datetime.fromtimestamp(from_us / 1e6).strftime("%Y-%m"))
        yield one
        if one.end_us > until_us:
            return
        from_us = one.end_us


def moment(text: str) -> int:
    """Unix microseconds of 2026-11-01, 2026-11-01T08:30, or 90m, 24h, 7d, 2w ago. Raises BadInput."""
    ago = re.fullmatch(r"(\d+)([mhdw])", text)
    if ago:
        return (int(time.time()) - int(ago[1]) * _AGO[ago[2]]) * 1_000_000
    try:
        return round(datetime.fromisoformat(text).timestamp() * 1e6)
    except ValueError as error:
        raise BadInput(f"{text!r} is no time", "Write 2026-11-01, 2026-11-01T08:30, or 90m, 24h, 7d") from error
