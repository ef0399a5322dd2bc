"""One bucket of a resident state: its two places, cut into chunks, and which of them are on the device."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from plexrl.memory.manifest import check_buffer
from plexrl.types import BadInput

if TYPE_CHECKING:
    from torch import Tensor

    from plexrl.memory.transfer import Arrival


class BucketState(StrEnum):
    """CLEAN: the host copy is current. DIRTY: only the device copy is. ZERO: all bytes are zero, no copy is needed."""

    CLEAN = "clean"
    DIRTY = "dirty"
    ZERO = "zero"


CLEAN, DIRTY, ZERO = BucketState.CLEAN, BucketState.DIRTY, BucketState.ZERO


class Chunk:
    """Bytes [start, end) of a state's place on the device, sliced there and at home. arrival: its last copy."""

    __slots__ = ("arrival", "device", "end", "home", "start")

    def __init__(self, start: int, end: int) -> None:
        self.start = start
        self.end = end
        self.device: Tensor
        self.home: Tensor | None = None
        self.arrival: Arrival | None = None


class Piece:
    """Sliced once, so that a switch makes no tensor. Chunks come and leave in ascending order.

    fixed: its home is another's (a shared base, a published version): always CLEAN.
    Of its chunks, [left, ready) are on the device: `ready` have come, `left` have left again. stayed: how many there
    were before the last whole leave.
    """

    __slots__ = ("chunks", "fixed", "left", "name", "offset", "ready", "size", "state", "stayed")

    def __init__(self, name: str, offset: int, size: int, fixed: bool, chunk: int) -> None:
        """offset: of the bucket in the state's place on the device. chunk: bytes."""
        self.name = name
        self.offset = offset
        self.size = size
        self.fixed = fixed
        self.state = CLEAN if fixed else ZERO
        self.ready = self.left = self.stayed = 0
        end = offset + size
        self.chunks = tuple(Chunk(at, min(at + chunk, end)) for at in range(offset, end, chunk))

    @property
    def present(self) -> bool:
        """Whether all of it is on the device."""
        return self.left == 0 and self.ready == len(self.chunks)

    @property
    def there(self) -> int:
        """Bytes of it that have come to the device and were not whole gone since."""
        return self.chunks[self.ready - 1].end - self.offset if self.ready else 0

    def place(self, device: Tensor) -> None:
        """device: the state's place, of which this bucket's bytes are a part."""
        for chunk in self.chunks:
            chunk.device = device[chunk.start : chunk.end]

    def settle(self, home: Tensor | None) -> None:
        """home: exactly the bucket's bytes on the host; None while they are elsewhere. Raises BadInput."""
        if home is not None:
            check_buffer(home, self.size, f"the source of bucket {self.name!r}")
            if home.numel() != self.size:
                raise BadInput(
                    f"the source of bucket {self.name!r} has {home.numel()} bytes", f"Slice exactly {self.size}"
                )
        for chunk in self.chunks:
            chunk.home = None if home is None else home[chunk.start - self.offset : chunk.end - self.offset]
