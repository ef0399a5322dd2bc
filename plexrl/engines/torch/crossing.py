"""How a worker group leaves its device and comes back: part by part through the gate, and back again when it fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from msgspec import structs

from plexrl.memory.gate import PATIENCE_S, Withdrawn
from plexrl.memory.resident import ResidentState
from plexrl.types import Moved, Residency

if TYPE_CHECKING:
    from plexrl.memory.device import Device, Region
    from plexrl.memory.gate import Seat


_AGAIN_S = 0.05


class Part(Protocol):
    """Something of a group that moves, at one place of the region."""

    def leave(self, seat: Seat | None) -> Moved:
        """Leave the device, letting go of it chunk by chunk."""

    def come(self, seat: Seat | None) -> Moved:
        """Come to the device as far as is needed at once, waiting for each chunk."""

    def back(self, seat: Seat | None) -> Moved:
        """After a crossing in which somebody could not leave: be on the device as before it."""

    def away(self) -> None:
        """After a crossing in which somebody could not come: be on the host as before it."""


class StatePart:
    """A resident state. first: the buckets that come at once; the calls pull the rest."""

    def __init__(self, state: ResidentState, first: Collection[str]) -> None:
        self._state = state
        self._first = first

    def leave(self, seat: Seat | None) -> Moved:
        """See Part."""
        return self._state.offload(seat)

    def come(self, seat: Seat | None) -> Moved:
        """See Part."""
        return self._state.load(self._first, seat)

    def back(self, seat: Seat | None) -> Moved:
        """See Part."""
        return Moved() if self._state.residency is Residency.DEVICE else self._state.undo(seat)

    def away(self) -> None:
        """See Part. Nothing was written since it came, so nothing is copied."""
        if self._state.residency is not Residency.HOST:
            self._state.undo()


class Crossing:
    """One rank's way off its device and back onto it. Parts are given in ascending device offset."""

    def __init__(self, device: Device, region: Region, seat: Seat | None) -> None:
        """region: mapped; seat: held."""
        self.on_device = True
        self._device = device
        self._region = region
        self._seat = seat
        self._last = ""
        self._parts: Sequence[Part] = ()

    @property
    def left(self) -> bool:
        """Whether what may be undone is a leave that went through."""
        return self._last == "leave" and not self.on_device

    def forget(self) -> None:
        """Another crossing begins: there is nothing to undo."""
        self._last, self._parts = "", ()

    def leave(self, parts: Sequence[Part]) -> Moved:
        """All parts off the device. After an error nobody gets what is still here, until `undo`."""
        self._last, self._parts = "leave", parts
        seat = self._seat
        try:
            if seat is not None:
                seat.leave()
            moved = total(part.leave(seat) for part in parts)
            self._device.unmap(self._region)
        except BaseException:
            if seat is not None:
                seat.fail()
            raise
        if seat is not None:
            seat.gone()
        self.on_device = False
        return structs.replace(moved, residual_bytes=self._device.residual_bytes())

    def come(self, parts: Sequence[Part]) -> Moved:
        """All parts onto the device, as far as they are needed at once."""
        self._last, self._parts = "come", parts
        if self._seat is not None:
            self._seat.come()
        self._device.map(self._region)
        moved = total(part.come(self._seat) for part in parts)
        self.on_device = True
        return moved

    def undo(self) -> Moved:
        """Take back a leave that failed, or a come whether it failed or not."""
        last, parts = self._last, self._parts
        seat = self._seat
        if last == "leave":
            self._device.map(self._region)
            moved = total(part.back(seat) for part in reversed(parts))
            if seat is not None:
                seat.held()
            self.forget()
            return moved
        if last == "come":
            for part in parts:
                part.away()
            self._device.unmap(self._region)
            if seat is not None:
                seat.gone()
            self.on_device = False
            self.forget()
        return Moved()


def insist(pull: Callable[[], Moved], patience: float | None = None) -> Moved:
    """Pull what a call needs, also when the gang that has the bytes failed to let go of them.

    Who has answered that it came can no longer give way. The other one cannot take its leave back then, is lost, and
    its bytes are free when the last of its processes has ended. Raises what the gate raises after `patience` seconds.
    """
    limit = time.monotonic() + (3 * PATIENCE_S if patience is None else patience)
    while True:
        try:
            return pull()
        except Withdrawn:
            if time.monotonic() > limit:
                raise
        time.sleep(_AGAIN_S)


def total(parts: Iterable[Moved]) -> Moved:
    """All that was moved."""
    parts = list(parts)
    return Moved(
        bytes_out=sum(p.bytes_out for p in parts),
        bytes_in=sum(p.bytes_in for p in parts),
        bytes_clean=sum(p.bytes_clean for p in parts),
        seconds=sum(p.seconds for p in parts),
        waited_s=sum(p.waited_s for p in parts),
    )


class Tally:
    """What one call had to move before it could run, out and in."""

    def __init__(self) -> None:
        self.moved = Moved()

    def add(self, moved: Moved) -> None:
        """One movement more."""
        if moved.seconds:
            self.moved = total((self.moved, moved))

    @property
    def bytes(self) -> int:
        """In both directions."""
        return self.moved.bytes_in + self.moved.bytes_out

    @property
    def us(self) -> int:
        """Microseconds, waiting at the gate included."""
        return round(self.moved.seconds * 1e6)
