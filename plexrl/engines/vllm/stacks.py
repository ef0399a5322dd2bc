"""The adapters' place between KV and model: it is let go without a copy, because every adapter is in its slab."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plexrl.engines.vllm.house import House
from plexrl.types import Moved

if TYPE_CHECKING:
    from plexrl.memory.gate import Seat


class Stacks:
    """A crossing's part. vLLM clears a slot before it fills it, and reads none that it has not filled."""

    def __init__(self, house: House) -> None:
        offset = house.spec.extent_offset or 0
        self._start, self._end = offset + house.scratch_at, offset + house.model_at

    def leave(self, seat: Seat | None) -> Moved:
        """See Part."""
        if seat is not None:
            seat.release(self._end)
        return Moved()

    def come(self, seat: Seat | None) -> Moved:
        """See Part."""
        return Moved(waited_s=seat.wait(self._start, self._end) if seat is not None else 0.0)

    def back(self, seat: Seat | None) -> Moved:
        """See Part. Adapters that were here are brought again when they are used."""
        return self.come(seat)

    def away(self) -> None:
        """See Part."""
