"""What engine hosts told of samples while they draw them; only of those whose client asked for it.

In memory alone: a new head hears it anew, and what counts is the call's end.
"""

import asyncio

from plexrl.pool.book import Entry
from plexrl.pool.core import Core

_PURGE = 1024


class Progress:
    """The newest SampleResponse of each call that is being drawn."""

    def __init__(self, core: Core):
        self._core = core
        self._told: dict[str, tuple[int, bytes]] = {}
        self._waiting: dict[str, list[asyncio.Future]] = {}
        self._purge_at = _PURGE

    def note(self, call: str, tokens: int, body: bytes) -> None:
        """An engine host has drawn so many tokens of a call's sequences."""
        if self._over(call):
            return
        self._told[call] = tokens, body
        for future in self._waiting.get(call, ()):
            if not future.done():
                future.set_result(None)
        if len(self._told) > self._purge_at:
            self._told = {name: told for name, told in self._told.items() if not self._over(name)}
            self._purge_at = max(_PURGE, 2 * len(self._told))

    def tokens(self, call: str) -> int:
        """How many were drawn, as far as was told."""
        return self._told.get(call, (0, b""))[0]

    def body(self, call: str) -> bytes:
        """The newest SampleResponse, b"" when nothing was told."""
        return self._told.get(call, (0, b""))[1]

    async def wait(self, entry: Entry, have: int, timeout: float) -> bool:
        """Wait until more than `have` tokens were told of, or the call has ended. False after timeout seconds."""
        if entry.ended is None and self.tokens(entry.id) > have:
            return True
        moved = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault(entry.id, [])
        waiting.append(moved)
        ended = asyncio.ensure_future(self._core.wait(entry, timeout))
        try:
            await asyncio.wait({moved, ended}, return_when=asyncio.FIRST_COMPLETED)
            return moved.done() or ended.result()
        finally:
            ended.cancel()
            waiting.remove(moved)
            if not waiting:
                self._waiting.pop(entry.id, None)
            if entry.ended is not None:
                self._told.pop(entry.id, None)

    def _over(self, call: str) -> bool:
        entry = self._core.book.entries.get(call)
        return entry is None or entry.ended is not None
