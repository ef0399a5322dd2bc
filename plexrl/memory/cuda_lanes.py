"""Copies between host and GPU beside the work that runs there: a stream for each direction, an event for each copy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from plexrl.memory.transfer import Arrival, Mover

if TYPE_CHECKING:
    from torch import Tensor


NOWHERE = (0, 0)


class GpuMover(Mover, Protocol):
    """What the cuda device needs of torch: Lanes on a GPU.

    fresh: addresses [start, end) that nothing on the GPU has used yet. The next copy, if it goes there, need not wait
    for work that runs; it is for one copy.
    """

    fresh: tuple[int, int]

    def rest(self) -> None:
        """Wait for all that this process gave the GPU; then give back what torch's allocator keeps for later."""

    def reserved(self) -> int:
        """Bytes that torch's allocator holds on this GPU."""


class Lanes:
    """One GPU's two directions. Copies of one direction run in the order in which they were asked for."""

    def __init__(self, index: int) -> None:
        """index: which GPU of this process."""
        import torch

        self.fresh = NOWHERE
        self._torch = torch.cuda
        self._into, self._out = torch.cuda.Stream(index), torch.cuda.Stream(index)

    def copy(self, target: Tensor, source: Tensor) -> Arrival:
        """Start copying; both are flat bytes of the same size, exactly one of them on the GPU.

        Unless its target is fresh it begins when what the calling thread's stream was given before is done. Host
        memory that is not registered works too, at half the speed or less.
        """
        lane = self._into if target.is_cuda else self._out
        start, fresh = target.data_ptr(), self.fresh
        self.fresh = NOWHERE
        if not fresh[0] <= start <= start + target.numel() <= fresh[1]:
            lane.wait_stream(self._torch.current_stream(lane.device))
        with self._torch.stream(lane):
            target.copy_(source, non_blocking=True)
        return lane.record_event()

    def rest(self) -> None:
        """As GpuMover."""
        self._torch.synchronize(self._into.device)
        self._torch.empty_cache()

    def reserved(self) -> int:
        """As GpuMover."""
        return self._torch.memory_reserved(self._into.device)
