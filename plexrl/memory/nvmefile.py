"""One slab in one file: written and read past the page cache, in chunks, each with its checksum.

    header    magic, version, chunk and data bytes, token, then a checksum per chunk, its own last; padded to 4096
    data      chunk after chunk; the last may be shorter

The header is written last, then the file gets its name: a file with a name is whole. Several chunks are under way at
once, so that the disk is never idle while a checksum is made. XXH3 (64 bits) because it is the one at hand that costs
less than a tenth of a fast disk's time; zlib.crc32 takes half of it.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Executor, wait
from pathlib import Path

import xxhash

from plexrl.memory import pages
from plexrl.types import PlexrlError

CHUNK = 4 << 20
"""Bytes of a chunk."""

BLOCK = 4096
"""Bytes to which offsets, sizes and addresses are aligned: no disk asks for more."""

_HEAD = struct.Struct("<8sIIQ16s")
_SUM = struct.Struct("<Q")
_MAGIC, _VERSION = b"plexrl\x00s", 1


class Damaged(PlexrlError):
    """What is on the disk is not what was written. chunk: its number, -1 for the header. Sums are 64 bits."""

    def __init__(self, file: Path, chunk: int, expected: str, found: str) -> None:
        self.file, self.chunk, self.expected, self.found = file, chunk, expected, found
        where = "the header" if chunk < 0 else f"chunk {chunk} (from byte {chunk * CHUNK})"
        super().__init__(
            f"{where} of {file} is damaged: expected {expected}, found {found}",
            "Take the last checkpoint; see what the kernel says of the disk",
        )


def header_bytes(size: int) -> int:
    """Bytes of the header in front of `size` bytes of data."""
    return pages.align_up(_HEAD.size + (-(-size // CHUNK) + 1) * _SUM.size, BLOCK)


def supports_direct(folder: Path) -> bool:
    """Whether the file system in `folder` reads and writes past the page cache. Raises OSError when it does neither."""
    path = folder / "probe"
    with mmap.mmap(-1, BLOCK) as block:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            path.unlink(missing_ok=True)
            return False
        try:
            return os.pwrite(fd, block, 0) == BLOCK == os.preadv(fd, [block], 0)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return False
        finally:
            os.close(fd)
            path.unlink()


def write(path: Path, data: memoryview, token: bytes, direct: bool, workers: Executor, ended: threading.Event) -> None:
    """Make the file `path` (0600) of `data`, whole pages of shared memory that nobody changes meanwhile.

    token: 16 bytes that tell this file from every other. ended: gives up when set. Raises OSError, also when the disk
    is full; then no file is left.
    """
    start = header_bytes(len(data))
    sums = [0] * -(-len(data) // CHUNK)
    temporary = path.with_name(f"{path.name}.part")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if direct else 0), 0o600)
    try:

        def put(number: int, piece: memoryview) -> None:
            sums[number] = xxhash.xxh3_64_intdigest(piece)
            _write_all(fd, piece, start + number * CHUNK)

        _each(put, data, workers, ended)
        with mmap.mmap(-1, start) as block:
            block[:] = _header(len(data), token, sums)
            _write_all(fd, memoryview(block), 0)
        os.fsync(fd)
        if not direct:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.rename(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)


def read(path: Path, data: memoryview, token: bytes, direct: bool, workers: Executor, ended: threading.Event) -> None:
    """Fill `data`, whole pages, with what was written. Raises Damaged; then `data` holds anything. OSError when it
    cannot be opened.
    """
    start = header_bytes(len(data))
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | (os.O_DIRECT if direct else 0))
    try:
        held = os.fstat(fd).st_size
        if held != start + len(data):
            raise Damaged(path, -1, f"a file of {start + len(data)} bytes", f"one of {held}")
        with mmap.mmap(-1, start) as block:
            _read_all(path, fd, memoryview(block), 0, -1)
            sums = _sums(path, bytes(block), len(data), token)

        def get(number: int, piece: memoryview) -> None:
            _read_all(path, fd, piece, start + number * CHUNK, number)
            found = xxhash.xxh3_64_intdigest(piece)
            if found != sums[number]:
                raise Damaged(path, number, f"checksum {sums[number]:016x}", f"{found:016x}")

        _each(get, data, workers, ended)
        if not direct:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def _each(do: Callable[[int, memoryview], None], data: memoryview, workers: Executor, ended: threading.Event) -> None:
    """do(number, chunk) for all chunks, several at a time. Nothing is under way when this returns or raises."""

    def one(number: int, piece: memoryview) -> None:
        if ended.is_set():
            raise InterruptedError(errno.EINTR, "the agent ends")
        do(number, piece)

    started = [workers.submit(one, number, piece) for number, piece in enumerate(_chunks(data))]
    done, left = wait(started, return_when=FIRST_EXCEPTION)
    for future in left:
        future.cancel()
    wait(left)
    # The first damaged chunk by number, whichever was found first.
    for future in started:
        if not future.cancelled():
            future.result()


def _chunks(data: memoryview) -> Iterator[memoryview]:
    return (data[at : at + CHUNK] for at in range(0, len(data), CHUNK))


def _write_all(fd: int, piece: memoryview, offset: int) -> None:
    """A write may be a short one; past the page cache the next must begin at a block."""
    at = 0
    while at < len(piece):
        written = os.pwrite(fd, piece[at:], offset + at)
        if not written // BLOCK and at + written < len(piece):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        at = at + written if at + written == len(piece) else (at + written) // BLOCK * BLOCK


def _read_all(path: Path, fd: int, piece: memoryview, offset: int, number: int) -> None:
    at = 0
    while at < len(piece):
        try:
            read = os.preadv(fd, [piece[at:]], offset + at)
        except OSError as error:
            raise Damaged(path, number, f"{len(piece)} bytes", f"{error.strerror} after {at}") from error
        if not read:
            raise Damaged(path, number, f"{len(piece)} bytes", f"the end of the file after {at}")
        at = at + read if at + read == len(piece) else (at + read) // BLOCK * BLOCK


def _header(size: int, token: bytes, sums: list[int]) -> bytes:
    body = _HEAD.pack(_MAGIC, _VERSION, CHUNK, size, token) + b"".join(map(_SUM.pack, sums))
    return (body + _SUM.pack(xxhash.xxh3_64_intdigest(body))).ljust(header_bytes(size), b"\0")


def _sums(path: Path, header: bytes, size: int, token: bytes) -> list[int]:
    """The chunks' checksums. Raises Damaged when the header is not this file's."""
    count = -(-size // CHUNK)
    end = _HEAD.size + count * _SUM.size
    (expected,), found = _SUM.unpack_from(header, end), xxhash.xxh3_64_intdigest(header[:end])
    if found != expected:
        raise Damaged(path, -1, f"checksum {expected:016x}", f"{found:016x}")
    if _HEAD.unpack_from(header) != (_MAGIC, _VERSION, CHUNK, size, token):
        raise Damaged(path, -1, f"the file with token {token.hex()}", "another one")
    return [_SUM.unpack_from(header, _HEAD.size + i * _SUM.size)[0] for i in range(count)]
