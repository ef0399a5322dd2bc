"""A reserved range of device addresses, backed by physical memory chunk by chunk."""

from __future__ import annotations

from plexrl.memory.cuda_driver import Driver
from plexrl.memory.pages import align_up
from plexrl.types import BadInput, PlexrlError


def touching(start: int, end: int, chunk: int) -> range:
    """Numbers of the chunks that hold a byte of [start, end)."""
    return range(start // chunk, -(-end // chunk)) if end > start else range(0)


def inside(start: int, end: int, chunk: int, size: int) -> range:
    """Numbers of the chunks whose bytes all lie in [start, end); of the last one only those below `size` count."""
    last = -(-end // chunk) if end >= size else end // chunk
    return range(-(-start // chunk), max(last, -(-start // chunk)))


class Chunks:
    """`size` bytes at `address`, the same for life. A chunk is all there or not at all."""

    def __init__(self, driver: Driver, size: int, chunk: int) -> None:
        """chunk: bytes, a multiple of the driver's granularity. Raises BadInput, DoesNotFit."""
        grain = driver.granularity()
        if size <= 0 or chunk <= 0 or chunk % grain:
            raise BadInput(
                f"{size} bytes in chunks of {chunk} cannot be reserved",
                f"Sizes are positive, chunks multiples of {grain}, the GPU's granularity",
            )
        self.size = size
        self.chunk = chunk
        self.reserved = align_up(size, grain)
        self._driver = driver
        self._backed = bytearray(-(-size // chunk))
        self.address = driver.reserve(self.reserved)

    @property
    def backed_bytes(self) -> int:
        """Physical bytes that are mapped now."""
        return sum(self._length(i) for i, there in enumerate(self._backed) if there)

    def whole(self) -> bool:
        """Whether every chunk is there."""
        return all(self._backed)

    def there(self, start: int, end: int) -> bool:
        """Whether every byte of [start, end) has memory."""
        return all(self._backed[i] for i in touching(start, end, self.chunk))

    def back(self, start: int, end: int) -> None:
        """Have memory under every byte of [start, end). What was there stays; new memory's contents are undefined.

        All or nothing: after an error the same chunks are there as before. Raises DoesNotFit when the GPU is full.
        """
        new: list[int] = []
        try:
            for i in touching(start, end, self.chunk):
                if not self._backed[i]:
                    self._take(i)
                    new.append(i)
        except PlexrlError:
            for i in new:
                self._drop(i)
            raise

    def unback(self, start: int, end: int) -> None:
        """Give back the memory of every chunk that lies wholly in [start, end); the addresses stay reserved.

        The caller has waited for all work on the GPU that uses it.
        """
        for i in inside(start, end, self.chunk, self.size):
            if self._backed[i]:
                self._drop(i)

    def close(self) -> None:
        """Give back memory and addresses."""
        self.unback(0, self.size)
        self._driver.free(self.address, self.reserved)

    def _length(self, i: int) -> int:
        return min(self.chunk, self.reserved - i * self.chunk)

    def _take(self, i: int) -> None:
        at, length = self.address + i * self.chunk, self._length(i)
        handle = self._driver.create(length)
        try:
            self._driver.map(at, length, handle)
        except PlexrlError:
            self._driver.release(handle)
            raise
        try:
            # The mapping keeps the memory from here on: unmapping is then all that it takes to give it back.
            self._driver.release(handle)
            self._driver.access(at, length)
        except PlexrlError:
            self._driver.unmap(at, length)
            raise
        self._backed[i] = 1

    def _drop(self, i: int) -> None:
        self._driver.unmap(self.address + i * self.chunk, self._length(i))
        self._backed[i] = 0
