"""Append-only journal: one directory per epoch, group commit, replay that tolerates a torn tail.

On disk a segment is a magic line followed by frames `<u32 length><u32 crc32><msgpack record>`, little-endian. A frame
that is cut or damaged at the very end of the last segment of an epoch is what a crash leaves: it was never acknowledged
and is ignored. Anywhere else it is corruption, and named.
"""

import asyncio
import os
import shutil
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from plexrl.types import BadInput, Epoch, PlexrlError
from plexrl.types.records import AnyRecord, Record

MAGIC = b"plexrl journal 1\n"
SEGMENT_BYTES = 64 << 20
_FRAME = struct.Struct("<II")


def epoch_of(name: str) -> Epoch:
    """The epoch that a directory `<start>-<job>-<restart>` belongs to. Raises BadInput."""
    parts = name.split("-")
    if len(parts) != 3 or not all(p.isdigit() for p in parts):
        raise BadInput(f"journal folder {name!r} is not named <start>-<job>-<restart>", "Move it out of the journal")
    return Epoch(*map(int, parts))


def epochs(root: Path) -> list[Epoch]:
    """All epochs that have a folder under root, oldest first."""
    return sorted(epoch_of(p.name) for p in root.iterdir() if p.is_dir()) if root.is_dir() else []


def replay(root: Path) -> Iterator[Record]:
    """Every record of every epoch in order. Raises PlexrlError naming file and offset of a corrupt frame."""
    decoder = msgspec.msgpack.Decoder(AnyRecord)
    for epoch in epochs(root):
        segments = sorted((root / str(epoch)).glob("*.log"))
        for segment in segments:
            yield from _frames(segment, decoder, last=segment == segments[-1])


def _frames(path: Path, decoder: msgspec.msgpack.Decoder, last: bool) -> Iterator[Record]:
    data = path.read_bytes()
    if not data.startswith(MAGIC):
        if last and MAGIC.startswith(data):
            return  # a crash between creating the file and writing its first line
        raise PlexrlError(f"{path} is no journal of this version", "Restore it, or move the epoch's folder away")
    at = len(MAGIC)
    while at < len(data):
        end = at + _FRAME.size
        size, crc = _FRAME.unpack_from(data, at) if end <= len(data) else (0, 0)
        payload = data[end : end + size]
        if end > len(data) or len(payload) < size or zlib.crc32(payload) != crc or not size:
            if last and not _intact_after(data, end + size):
                return
            raise PlexrlError(f"{path} is damaged at byte {at}", "Restore the file from a copy; nothing was changed")
        yield decoder.decode(payload)
        at = end + size


def _intact_after(data: bytes, at: int) -> bool:
    """Whether a whole frame follows a bad one: then it is corruption and no torn tail."""
    if at + _FRAME.size > len(data):
        return False
    size, crc = _FRAME.unpack_from(data, at)
    payload = data[at + _FRAME.size : at + _FRAME.size + size]
    return bool(size) and len(payload) == size and zlib.crc32(payload) == crc


class Journal:
    """The writing end of one epoch.

    `append` returns at once; the future it returns (when durable) ends after the record is on disk. Commit is at once:
    while one batch syncs, the next gathers; there is no timer.
    """

    def __init__(
        self, root: Path, epoch: Epoch, loop: asyncio.AbstractEventLoop, on_failure: Callable[[OSError], None]
    ):
        self._folder = root / str(epoch)
        self._loop = loop
        self._on_failure = on_failure
        self._encode = msgspec.msgpack.Encoder().encode
        self._waiting: list[tuple[bytes, asyncio.Future | None]] = []
        self._wake = threading.Condition()
        self._closing = False
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=False)
        self._number = 0
        try:
            self._open_segment()
        except OSError:
            shutil.rmtree(self._folder)
            raise
        self.syncs = 0
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    def append(self, record: Record, durable: bool = True) -> asyncio.Future | None:
        """Queue a record. Records reach the disk in the order of the calls."""
        future = self._loop.create_future() if durable else None
        payload = self._encode(record)
        with self._wake:
            self._waiting.append((payload, future))
            if durable:
                self._wake.notify()
        return future

    def close(self) -> None:
        """Write what is queued, sync, and end the thread."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()
        os.close(self._fd)

    def _open_segment(self) -> None:
        self._number += 1
        path = self._folder / f"{self._number:06d}.log"
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._size = _write(self._fd, MAGIC)
        os.fsync(self._fd)
        for folder in (self._folder, self._folder.parent):
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            os.fsync(fd)
            os.close(fd)

    def _run(self) -> None:
        while True:
            with self._wake:
                # Records that nobody waits for ride along with the next durable one, or go once a second.
                if not any(f for _, f in self._waiting) and not self._closing:
                    self._wake.wait(timeout=1.0)
                batch, self._waiting = self._waiting, []
                closing = self._closing
            if batch:
                try:
                    self._commit([payload for payload, _ in batch])
                except OSError as error:
                    self._loop.call_soon_threadsafe(self._on_failure, error)
                    return
                futures = [f for _, f in batch if f is not None]
                if futures and not closing:
                    self._loop.call_soon_threadsafe(_resolve, futures)
            elif closing:
                return

    def _commit(self, payloads: list[bytes]) -> None:
        if self._size > SEGMENT_BYTES:
            os.close(self._fd)
            self._open_segment()
        frames = b"".join(_FRAME.pack(len(p), zlib.crc32(p)) + p for p in payloads)
        self._size += _write(self._fd, frames)
        os.fdatasync(self._fd)
        self.syncs += 1


def _write(fd: int, data: bytes) -> int:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    return len(data)


def _resolve(futures: list[asyncio.Future]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)
