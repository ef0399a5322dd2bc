"""A seat at the gate of a real GPU: what the gate grants gets memory, what is let go of gives it back first."""

from __future__ import annotations

import functools

from plexrl.memory.cuda import CudaDevice
from plexrl.memory.gate import Seat, SeatState
from plexrl.memory.region import Region
from plexrl.types import Extent


class BackedSeat:
    """The verbs of `Seat` over a region of a CudaDevice, so that whoever moves a state need not know of either.

    On the cpu device all ranks' bytes are one file and a seat is enough. Here a rank's bytes cost memory of its own:
    taken after the gate has granted them and given back before it is told, so that all ranks together never hold more
    than the gate says, rounded up to one chunk for each seat that moves.
    """

    def __init__(self, seat: Seat, device: CudaDevice) -> None:
        """The seat's extent is reserved on the device before the first verb."""
        self._seat = seat
        self._device = device
        # Bytes from here on had no memory yet since the last `come`.
        self._new = seat.extent.offset + seat.extent.size
        device.gate(seat.extent)

    @functools.cached_property
    def _region(self) -> Region:
        return self._device.region(self.extent)

    @property
    def index(self) -> int:
        """Which seat."""
        return self._seat.index

    @property
    def owner(self) -> str:
        """Whose."""
        return self._seat.owner

    @property
    def extent(self) -> Extent:
        """Of the device's budget."""
        return self._seat.extent

    @property
    def state(self) -> SeatState:
        """As Seat has it."""
        return self._seat.state

    @property
    def patience(self) -> float:
        """Seconds; see Seat."""
        return self._seat.patience

    @patience.setter
    def patience(self, seconds: float) -> None:
        self._seat.patience = seconds

    def come(self) -> None:
        """As Seat."""
        self._seat.come()
        self._new = self.extent.offset

    def wait(self, start: int, end: int) -> float:
        """As Seat; then the bytes have memory. Raises DoesNotFit too, when the GPU is fuller than the gate knows."""
        waited = self._seat.wait(start, end)
        first, last = start - self.extent.offset, end - self.extent.offset
        self._device.back(self._region, first, last)
        if start >= self._new:
            # Layers that came before may be computing; what is copied now to where nothing was need not wait for them.
            base = self._region.buffer.data_ptr()
            self._device.mover.fresh = (base + first, base + last)
        self._new = max(self._new, end)
        return waited

    def held(self) -> None:
        """As Seat; then all of the region is mapped."""
        self._seat.held()
        self._new = self.extent.offset + self.extent.size
        self._device.back(self._region, 0, self.extent.size)

    def leave(self) -> None:
        """As Seat, after all work on the GPU is done: clean bytes are let go of without a copy that would wait."""
        self._device.rest()
        self._seat.leave()

    def release(self, upto: int) -> None:
        """As Seat; the copies out of the bytes below `upto` are done."""
        self._device.unback(self._region, 0, upto - self.extent.offset)
        self._seat.release(upto)

    def gone(self) -> None:
        """As Seat, when nothing of the region has memory any more and torch's allocator is empty."""
        self._device.unmap(self._region)
        self._seat.gone()

    def fail(self) -> None:
        """As Seat; the memory stays."""
        self._seat.fail()
