"""What all parts of a head share: book, journal, ledger, scheduler, clock, and who waits for a future."""

import asyncio
import logging
import time
from collections.abc import Callable

from plexrl.config import PoolConfig
from plexrl.pool.book import Book, Entry
from plexrl.pool.faults import Faults
from plexrl.pool.journal import Journal
from plexrl.pool.layout import Layout
from plexrl.pool.links import Links
from plexrl.scheduler import Scheduler
from plexrl.types import CallKind, PlexrlError, records

log = logging.getLogger("plexrl.head")


class Core:
    """The state of a running head. `commit` is the only way in which the book changes."""

    def __init__(self, config: PoolConfig, book: Book, layout: Layout, ledger: Callable[[records.Record], None]):
        self.config = config
        self.book = book
        self.layout = layout
        self.faults = Faults(layout.run)
        self.journal: Journal
        self.scheduler: Scheduler
        self.links: Links
        self.on_failure: Callable[[OSError], None]
        self._ledger = ledger
        self._wall_us = time.time_ns() // 1000
        self._monotonic_ns = time.monotonic_ns()
        self._waiters: dict[str, list[asyncio.Future]] = {}
        self._unsynced: dict[str, asyncio.Future] = {}  # by future: its newest record, until that is on disk
        self._tasks: set[asyncio.Task] = set()

    def now_us(self) -> int:
        """Unix time in microseconds that never goes back while this head lives, whatever the node's clock does."""
        return self._wall_us + (time.monotonic_ns() - self._monotonic_ns) // 1000

    def commit(self, record: records.Record, durable: bool = True) -> asyncio.Future | None:
        """Take the record into the book, the journal and the ledger. The future ends when it is on disk."""
        self.book.apply(record)
        written = self.journal.append(record, durable)
        try:
            self._ledger(records.strip(record))
        except OSError as error:
            # The next head completes the ledger from the journal.
            self.on_failure(error)
        return written

    def keep(self, id: str, record: records.Record) -> asyncio.Future:
        """Commit a record of the future `id`; until it is on disk nobody is told (`wait`, `settled`)."""
        future = self._unsynced[id] = self.commit(record)
        future.add_done_callback(lambda done: self._unsynced.pop(id) if self._unsynced.get(id) is done else None)
        return future

    async def settled(self, id: str) -> None:
        """Wait until what the book knows of the future `id` is on disk."""
        if (future := self._unsynced.get(id)) is not None:
            await asyncio.shield(future)

    def when_settled(self, id: str, then: Callable[[], None]) -> None:
        """Call then() when what the book knows of the future `id` is on disk."""
        if (future := self._unsynced.get(id)) is not None:
            future.add_done_callback(lambda _: then())
        else:
            then()

    def spawn(self, coroutine) -> asyncio.Task:
        """A task that the head keeps and whose failure it logs."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a task of the head failed", exc_info=task.exception())

    async def close(self) -> None:
        """Cancel what still runs."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def wait(self, entry: Entry, timeout: float) -> bool:
        """Wait until a future has ended and is on disk. False after timeout seconds."""
        if entry.ended is not None and entry.id not in self._unsynced:
            return True
        future = asyncio.get_running_loop().create_future()
        waiters = self._waiters.setdefault(entry.id, [])
        waiters.append(future)
        try:
            async with asyncio.timeout(timeout):
                await future
        except TimeoutError:
            return False
        finally:
            waiters.remove(future)
            if not waiters:
                self._waiters.pop(entry.id, None)
        return True

    def end(self, record: records.CallEnded, then: Callable[[], None] | None = None) -> None:
        """End a future once; its waiters wake when the record is on disk. then() is called at that moment too."""
        entry = self.book.entries.get(record.id)
        if entry is None or entry.ended is not None:
            if then is not None:
                self.when_settled(record.id, then)
            return

        def told(_: asyncio.Future) -> None:
            for waiter in self._waiters.get(record.id, []):
                if not waiter.done():
                    waiter.set_result(None)
            if then is not None:
                then()

        self.keep(record.id, record).add_done_callback(told)

    def fail(self, id: str, error: str, category: str) -> None:
        """End a future with an error."""
        self.end(records.CallEnded(now_us=self.now_us(), id=id, ok=False, error=error, category=category))


def category_of(error: PlexrlError) -> str:
    """Whose fault an error is, as futures say it: `user` when asking for something else or less helps."""
    return "user" if error.exit_code in (2, 3) or getattr(error, "category", "") == "user" else "server"


def prior_cost_us(kind: CallKind, units: int) -> int:
    """Expected service time of a call before anything was measured: 1 ms per token trained, 50 us per token sampled,
    at least 1 ms. Ours, from one core of the machines that this was written on; a fitted model replaces it later."""
    return max(1000, units * (50 if kind is CallKind.SAMPLE else 1000))
