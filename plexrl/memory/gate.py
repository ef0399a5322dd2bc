"""The gate: who holds which bytes of one GPU, in shared memory, so that two processes hand them over chunk by chunk.

One small memfd per GPU, all zero when new, made by the agent and inherited by every rank on that GPU. It has 64 seats.

Memory order. Every word of a seat is written by the seat's owner alone (by the agent once that process is gone). All
reads that decide and all writes happen under a POSIX record lock on the file: its system calls order the plain loads
and stores between them, on every architecture, and the kernel drops the lock when its holder dies. So "look whether
the bytes are free, then take them" is one step, and a watcher's snapshot is a state that really was. A process may be
killed between any two stores: each change is decided by one aligned 8-byte store (`low`, `high` or `state`), and what
else it needs is written before it. A copy into bytes comes after the `wait` that took them, a release after the copy
out of them, so the lock orders the copied bytes too. Who waits sleeps in the kernel (futex) until a seat changes: on
a shared core, short sleeps cost the process that copies.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import platform
import threading
import time
from collections.abc import Iterator
from enum import StrEnum

from msgspec import Struct

from plexrl.memory import pages
from plexrl.types import BadInput, Extent, PlexrlError

SEATS = 64
_OWNER_BYTES = 64
_HEADER_BYTES = 64
_COLUMNS = ("state", "offset", "end", "low", "high", "failures")
_OWNERS_AT = _HEADER_BYTES + len(_COLUMNS) * SEATS * 8
GATE_BYTES = 8192
"""Bytes of a gate's memfd."""

PATIENCE_S = 60.0
FAILED_PATIENCE_S = 5.0  # of who takes a failed leave back: who came gives its bytes up at once, or never (ours)
_SLICE_S = 1.0
_FUTEX = {"x86_64": 202, "aarch64": 98, "ppc64le": 221, "s390x": 238, "riscv64": 98}.get(platform.machine())
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_ALL = 2**31 - 1
_POLL_S = 0.0005

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
# A record lock belongs to a process: its threads, and several gates over one file, exclude each other here.
_threads = threading.Lock()


class SeatState(StrEnum):
    """FREE: nothing is held. COMING: [offset, edge). HELD: all. LEAVING: from edge on. FAILED: what it held then."""

    FREE = "free"
    COMING = "coming"
    HELD = "held"
    LEAVING = "leaving"
    FAILED = "failed"


FREE, COMING, HELD, LEAVING, FAILED = SeatState
_STATES = tuple(SeatState)
_NUMBERS = {state: number for number, state in enumerate(_STATES)}


class Held(PlexrlError):
    """Bytes that were waited for are still somebody else's."""


class Withdrawn(PlexrlError):
    """The process that holds the bytes cannot let go of them: the switch is off."""


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Holding(Struct, frozen=True):
    """One seat in use. Bytes of the device: its extent [offset, end), of which it holds [low, high) now.

    edge: `high` of a seat that comes, `low` of one that leaves or failed in leaving.
    """

    seat: int
    owner: str
    offset: int
    end: int
    state: SeatState
    edge: int
    low: int
    high: int


class Gate:
    """One GPU's seats, in any process. Safe to call from several threads.

    No descriptor of this file may be closed by another thread of the process during a call: the kernel would drop the
    record lock with it.
    """

    def __init__(self, fd: int) -> None:
        """fd: the GPU's gate, a memfd of GATE_BYTES. Raises BadInput for a file of another size."""
        held = os.fstat(fd).st_size
        if held != GATE_BYTES:
            raise BadInput(f"the gate's file has {held} bytes instead of {GATE_BYTES}", "Pass that GPU's gate memfd")
        self._fd = os.dup(fd)
        self._mapping = pages.map_shared(fd, GATE_BYTES)
        self._version_at = pages.address(self._mapping)
        self._bytes = memoryview(self._mapping)
        self._version = self._bytes[:4].cast("I")
        self._words = {
            name: self._bytes[_HEADER_BYTES + i * SEATS * 8 : _HEADER_BYTES + (i + 1) * SEATS * 8].cast("q")
            for i, name in enumerate(_COLUMNS)
        }

    def seat(self, index: int, owner: str, extent: Extent) -> Seat:
        """The seat `index` (0 to 63) for a gang's rank with this extent; only one process may have it.

        Raises BadInput outside the seats or for an extent without an offset, Held while somebody's bytes stand in it.
        """
        if not 0 <= index < SEATS:
            raise BadInput(f"seat {index} of a gate with {SEATS}", f"Take one from 0 to {SEATS - 1}")
        if extent.offset is None or extent.offset < 0 or extent.size <= 0:
            raise BadInput(f"an extent at {extent.offset} of {extent.size} bytes has no seat", "Place the gang first")
        with self.locked():
            if self._words["state"][index] != _NUMBERS[FREE]:
                raise Held(f"seat {index} is {self._told(self._holding(index))}", "Clear it when that process is gone")
            self._words["offset"][index] = extent.offset
            self._words["end"][index] = extent.offset + extent.size
            name = owner.encode()[: _OWNER_BYTES - 1]
            at = _OWNERS_AT + index * _OWNER_BYTES
            self._bytes[at : at + _OWNER_BYTES] = name.ljust(_OWNER_BYTES, b"\0")
        return Seat(self, index, owner, extent)

    def clear(self, index: int) -> None:
        """The process that had this seat is gone, and with it its claim. Only the agent may say so."""
        with self.locked():
            self._words["state"][index] = _NUMBERS[FREE]
            self._changed()

    def holders(self) -> tuple[Holding, ...]:
        """All seats in use at one moment, by number."""
        with self.locked():
            free = _NUMBERS[FREE]
            return tuple(self._holding(i) for i, state in enumerate(self._words["state"]) if state != free)

    def close(self) -> None:
        """Let go of the file and the mapping; seats stay as they are."""
        with _threads:
            for view in (*self._words.values(), self._version, self._bytes):
                view.release()
            os.close(self._fd)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else reads or changes seats in here. For a few loads and stores, never for a copy."""
        with _threads:
            while True:
                try:
                    fcntl.lockf(self._fd, fcntl.LOCK_EX)
                    break
                except OSError as error:
                    # The kernel takes two threads of two processes at two gates for a deadlock; it is none.
                    if error.errno != errno.EDEADLK:
                        raise
            try:
                yield
            finally:
                fcntl.lockf(self._fd, fcntl.LOCK_UN)

    def _blocker(self, index: int, low: int, high: int) -> int | None:
        """The first other seat that holds a byte of [low, high). Locked."""
        lows, highs = self._words["low"], self._words["high"]
        for other, state in enumerate(self._words["state"]):
            if state and other != index and lows[other] < high and low < highs[other] and lows[other] < highs[other]:
                return other
        return None

    def _holding(self, index: int) -> Holding:
        words = self._words
        state, low, high = _STATES[words["state"][index]], words["low"][index], words["high"][index]
        offset, end = words["offset"][index], words["end"][index]
        at = _OWNERS_AT + index * _OWNER_BYTES
        owner = bytes(self._bytes[at : at + _OWNER_BYTES]).rstrip(b"\0").decode(errors="ignore")
        edge = low if state is LEAVING or (state is FAILED and (low > offset or high == end)) else high
        return Holding(index, owner, offset, end, state, edge, low, high)

    def _told(self, holding: Holding) -> str:
        return f"{holding.state}: {holding.owner!r} has bytes {holding.low} to {holding.high} of the device"

    def _changed(self) -> None:
        """A seat changed: wake who waits. Locked; they look again when the lock is free."""
        self._version[0] = (self._version[0] + 1) & 0xFFFFFFFF
        if _FUTEX is not None:
            _libc.syscall(_FUTEX, ctypes.c_void_p(self._version_at), _FUTEX_WAKE, _ALL, None, None, 0)

    def _sleep(self, version: int, seconds: float) -> None:
        """Until a seat changes after `version`, at most so long; may return early."""
        if _FUTEX is None:
            time.sleep(min(seconds, _POLL_S))
            return
        limit = _Timespec(int(seconds), int(seconds % 1 * 1e9))
        word = ctypes.c_void_p(self._version_at)
        _libc.syscall(_FUTEX, word, _FUTEX_WAIT, ctypes.c_uint(version), ctypes.byref(limit), None, 0)


class Seat:
    """One rank's place at its GPU's gate. Only the process that has it may call it.

    A seat that comes takes its extent in ascending device offset, one that leaves lets go of it in the same order;
    one that takes a failed leave back does so in descending order. What it holds is always one range.

    patience: seconds without any movement of who blocks it after which `wait` gives up; a seat that has FAILED, sooner.
    """

    def __init__(self, gate: Gate, index: int, owner: str, extent: Extent) -> None:
        """Made by Gate.seat."""
        self.index = index
        self.owner = owner
        self.extent = extent
        self.patience = PATIENCE_S
        self._gate = gate
        self._words = gate._words

    @property
    def state(self) -> SeatState:
        """As this process last left it, or the agent cleared it."""
        return _STATES[self._words["state"][self.index]]

    def come(self) -> None:
        """I am about to take my extent; nothing of it is mine yet. Raises PlexrlError unless the seat is FREE."""
        self._from(FREE)
        with self._gate.locked():
            self._words["low"][self.index] = self.extent.offset
            self._words["high"][self.index] = self.extent.offset
            self._go(COMING)

    def wait(self, start: int, end: int) -> float:
        """Returns when the device's bytes [start, end) are mine, and how many seconds that took.

        While COMING everything from my edge up to `end` becomes mine, while LEAVING or FAILED everything from `start`
        up to my edge (a leave is taken back). Bytes that are mine already take no time.

        Raises Held (who, which bytes) after `patience`, Withdrawn when the seat that blocks me has FAILED meanwhile
        (never while I am FAILED myself), BadInput outside the extent, PlexrlError while FREE. Nothing is taken then.
        """
        limit = self.extent.offset + self.extent.size
        if not self.extent.offset <= start <= end <= limit:
            raise BadInput(f"bytes {start} to {end} lie outside the extent", f"It is {self.extent.offset} to {limit}")
        begin = since = 0.0
        seen: tuple[int, ...] = ()
        while True:
            with self._gate.locked():
                blocker = self._take(start, end)
                if blocker is None:
                    return time.perf_counter() - begin if begin else 0.0
                version = self._gate._version[0]
                blocking = self._gate._holding(blocker)
                failures = self._words["failures"][blocker]
            now = time.perf_counter()
            begin = begin or now
            # A failed leave may have been taken back before we woke: the counter tells.
            failed = blocking.state is FAILED or (seen and seen[0] == blocker and seen[1] != failures)
            if failed and self.state is not FAILED:
                raise Withdrawn(
                    f"{blocking.owner!r} could not give up bytes {blocking.low} to {blocking.high} of the device",
                    "Undo the switch; it may be tried again",
                )
            if seen != (blocker, failures, blocking.low, blocking.high):
                seen, since = (blocker, failures, blocking.low, blocking.high), now
            patience = min(self.patience, FAILED_PATIENCE_S) if self.state is FAILED else self.patience
            left = since + patience - now
            if left <= 0:
                raise Held(
                    f"bytes {start} to {end} of the device are not free after {patience:g} s; seat {blocker} is "
                    + self._gate._told(blocking),
                    "Undo the switch; if that process hangs, end it",
                )
            self._gate._sleep(version, min(left, _SLICE_S))

    def held(self) -> None:
        """All of the extent is mine. Waits for what is not yet, with the errors of `wait`.

        After a leave that is taken back it waits only for what it let go of: a seat that had not come whole is COMING
        again, because two such seats could wait for each other.
        """
        low, high = self.extent.offset, self.extent.offset + self.extent.size
        if self.state in (LEAVING, FAILED):
            high = self._words["high"][self.index]
        self.wait(low, high)
        with self._gate.locked():
            self._go(HELD if high == low + self.extent.size else COMING)

    def leave(self) -> None:
        """I am about to let go of what I hold. Raises PlexrlError unless I hold or was coming."""
        self._from(HELD, COMING)
        with self._gate.locked():
            self._go(LEAVING)

    def release(self, upto: int) -> None:
        """Bytes below `upto` are no longer mine: I never touch them again. Raises PlexrlError unless LEAVING."""
        self._from(LEAVING)
        with self._gate.locked():
            low, high = self._words["low"], self._words["high"]
            if upto > low[self.index]:
                low[self.index] = min(upto, high[self.index])
                self._gate._changed()

    def gone(self) -> None:
        """FREE: nothing of mine is on the device. From any state."""
        with self._gate.locked():
            self._go(FREE)

    def fail(self) -> None:
        """FAILED: who waits for me gives up; what I hold stays mine until `gone` or `held`. Nothing when FREE."""
        with self._gate.locked():
            if self.state is not FREE and self.state is not FAILED:
                self._words["failures"][self.index] += 1
                self._go(FAILED)

    def _take(self, start: int, end: int) -> int | None:
        """Take the bytes, or return who holds some of them. Locked."""
        low, high = self._words["low"], self._words["high"]
        self._from(COMING, HELD, LEAVING, FAILED)
        mine_low, mine_high = low[self.index], high[self.index]
        if start < mine_low:
            blocker = self._gate._blocker(self.index, start, mine_low)
            if blocker is not None:
                return blocker
            low[self.index] = start
            self._gate._changed()
        if end > mine_high:
            blocker = self._gate._blocker(self.index, mine_high, end)
            if blocker is not None:
                return blocker
            high[self.index] = end
            self._gate._changed()
        return None

    def _from(self, *states: SeatState) -> None:
        state = self.state
        if state not in states:
            raise PlexrlError(f"seat {self.index} of {self.owner!r} is {state}", f"It must be {' or '.join(states)}")

    def _go(self, state: SeatState) -> None:
        self._words["state"][self.index] = _NUMBERS[state]
        self._gate._changed()
