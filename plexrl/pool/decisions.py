"""Why turns began and ended: the newest decisions of the scheduler, for whoever wants to know afterwards."""

import os
from collections import deque
from pathlib import Path

import msgspec

from plexrl.scheduler import Scheduler, Turn

KEPT = 1000


class Decisions:
    """A ring of the newest decisions, and the file that shows it (the service account's and root's)."""

    def __init__(self) -> None:
        self._ring: deque[dict[str, object]] = deque(maxlen=KEPT)
        self._written = True

    def add(self, now_us: int, turn: Turn, scheduler: Scheduler) -> None:
        """A turn began or ended. waited_us, score: as Turn says; they tell of turns that began."""
        held = scheduler.turns.get(turn.gang)
        entry: dict[str, object] = {
            "now_us": now_us,
            "gang": turn.gang,
            "what": "ended" if turn.ended else "began",
            "reason": turn.reason,
        }
        if not turn.ended:
            entry |= {"job": held.job if held else "", "waited_us": turn.waited_us, "score": turn.score}
        self._ring.append(entry)
        self._written = False

    def write(self, path: Path) -> None:
        """One JSON object per line, oldest first. Nothing is written when nothing is new."""
        if self._written:
            return
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_bytes(b"".join(msgspec.json.encode(entry) + b"\n" for entry in self._ring))
        os.replace(temporary, path)
        self._written = True
