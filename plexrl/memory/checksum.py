"""The checksum of a published version: made when it is packed, compared wherever it is read.

XXH3 over all chunks of what is small. Of more, every sixteenth chunk and the last one are read: which, depends on the
version's name, so that over some versions every place is looked at. Reading all of it would take a third of the time
that the copy itself takes (`python -m bench.publish`).
"""

import os

import xxhash

from plexrl.types import PlexrlError

CHUNK = 1 << 20
"""Bytes that are read at once: they stay in the core's cache until they are summed."""
WHOLE = 16 << 20
"""Bytes up to which nothing is left out."""
EVERY = 16
"""Of so many chunks of anything larger one is read."""


class Damaged(PlexrlError):
    """The bytes are not those that were published."""

    category = "damaged"


def checksum(fd: int, offset: int, size: int, name: str, every: int = EVERY) -> str:
    """Of `size` bytes of a file from `offset` on, read without a mapping. name: of the version.

    Raises PlexrlError when the file is shorter.
    """
    total = xxhash.xxh3_64(f"{name}:{size}".encode())
    buffer = memoryview(bytearray(min(CHUNK, size)))
    for start in _starts(size, name, every):
        piece = buffer[: min(CHUNK, size - start)]
        if os.preadv(fd, [piece], offset + start) != len(piece):
            raise PlexrlError(f"version {name} ends before byte {start + len(piece)}")
        total.update(piece)
    return f"xxh3:{total.hexdigest()}"


def _starts(size: int, name: str, every: int) -> list[int]:
    """Where the chunks begin that are read."""
    if size <= WHOLE:
        return list(range(0, size, CHUNK))
    starts = list(range(xxhash.xxh32_intdigest(name.encode()) % every * CHUNK, size, every * CHUNK))
    last = (size - 1) // CHUNK * CHUNK
    return starts if starts[-1] == last else [*starts, last]
