"""The ledger on disk: what accounting needs of the head's records, one append-only file per epoch.

A file is frames `<u32 length><msgpack record>`, little-endian. It is flushed each second and never synced: the journal
is the durable truth, and `repair` takes from it what a killed head had not flushed. A cut last frame is not counted.
"""

import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from plexrl.pool.journal import epoch_of, replay
from plexrl.types import Epoch, PlexrlError
from plexrl.types import records as r

_FRAME = struct.Struct("<I")
_FLUSH_US = 1_000_000
_KEPT = (
    r.EpochStarted,
    r.EpochEnded,
    r.JobAttached,
    r.JobEnded,
    r.SessionOpened,
    r.SessionEnded,
    r.GroupPlaced,
    r.ModelCreated,
    r.CallAccepted,
    r.CallEnded,
    r.Delivered,
    r.SpanClosed,
    r.Switched,
)
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(r.AnyRecord).decode


def slim(record: r.Record) -> r.Record | None:
    """The record without what users sent, got or were told; None where accounting does not need it."""
    match record:
        case r.CallAccepted():
            return msgspec.structs.replace(record, body=b"", work={}, digest="")
        case r.CallEnded():
            return msgspec.structs.replace(record, body=b"", content_type="", error="", headers={})
        case r.SessionOpened():
            return msgspec.structs.replace(record, key="")
        case r.ModelCreated():
            return msgspec.structs.replace(record, init_path="")
    return record if isinstance(record, _KEPT) else None


class Ledger:
    """The writing end, for one life of a head. Only the head's thread calls it. folder: 0700, exists."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._fd: int | None = None
        self._waiting: list[bytes] = []
        self._flushed_us = 0

    def take(self, record: r.Record) -> None:
        """Keep what accounting needs of a record. An EpochStarted begins the epoch's file."""
        kept = slim(record)
        if kept is None:
            return
        if isinstance(kept, r.EpochStarted):
            self.close()
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._fd = os.open(self._folder / f"{kept.epoch}.log", flags, 0o600)
        self._waiting.append(_frame(kept))
        if kept.now_us - self._flushed_us >= _FLUSH_US or isinstance(kept, r.EpochEnded):
            self.flush()
            self._flushed_us = kept.now_us

    def flush(self) -> None:
        """Hand what is gathered to the kernel. Before an epoch has begun it goes on waiting."""
        if self._fd is not None and self._waiting:
            data, self._waiting = b"".join(self._waiting), []
            while data:
                data = data[os.write(self._fd, data) :]

    def close(self) -> None:
        """Flush and close the file."""
        self.flush()
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _frame(record: r.Record) -> bytes:
    payload = _encode(record)
    return _FRAME.pack(len(payload)) + payload


def epochs(folder: Path) -> list[Epoch]:
    """The epochs that have a file, oldest first."""
    return sorted(epoch_of(path.stem) for path in folder.glob("*.log"))


def read(folder: Path) -> list[r.Record]:
    """Every kept record, by epoch and in the order in which it was taken. Raises PlexrlError for a damaged file."""
    return [record for epoch in epochs(folder) for record, _ in records_from(folder / f"{epoch}.log")]


def records_from(path: Path, start: int = 0) -> Iterator[tuple[r.Record, int]]:
    """(record, byte after it) from a byte that a record begins at. Raises PlexrlError for a damaged file."""
    with path.open("rb") as file:
        file.seek(start)
        data = file.read()
    at = 0
    while at + _FRAME.size <= len(data):
        (size,) = _FRAME.unpack_from(data, at)
        payload = data[at + _FRAME.size : at + _FRAME.size + size]
        if len(payload) < size:
            return
        try:
            record = _decode(payload)
        except msgspec.MsgspecError as error:
            raise PlexrlError(
                f"{path} is damaged at byte {start + at}: {error}", "Move it away; it is rebuilt from the journal"
            ) from error
        at += _FRAME.size + size
        yield record, start + at


def repair(folder: Path, journal: Path) -> bool:
    """Complete the newest epoch in the journal if its head ended out of order. True when something was missing.

    Only while no head runs. Both files are beginnings of one stream of records, so the longer one is the better.
    """
    newest: list[r.Record] = []
    for record in replay(journal):
        if isinstance(record, r.EpochStarted):
            newest = []
        kept = slim(record)
        if kept is not None:
            newest.append(kept)
    if not newest or not isinstance(newest[0], r.EpochStarted):
        return False
    path = folder / f"{newest[0].epoch}.log"
    if path.exists() and sum(1 for _ in records_from(path)) >= len(newest):
        return False
    _replace(path, (_frame(record) for record in newest))
    return True


def _replace(path: Path, frames: Iterable[bytes]) -> None:
    fresh = path.with_suffix(".new")
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
        file.writelines(frames)
    fresh.rename(path)
