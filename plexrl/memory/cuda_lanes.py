"""Copies between host and GPU beside the work that runs there: a stream for each direction, an event for each copy."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Arrival(Protocol):
    """A copy that is under way (torch.cuda.Event has these verbs)."""

    def synchronize(self) -> None:
        """Wait until it is done, on the host."""

    def wait(self) -> None:
        """Let the calling thread's current stream wait for it, and not the host."""

    def query(self) -> bool:
        """Whether it is done."""


class Lanes:
    """One GPU's two directions. Copies of one direction run in the order in which they were asked for."""

    def __init__(self, index: int) -> None:
        """index: which GPU of this process."""
        import torch

        self._torch = torch.cuda
        self._into, self._out = torch.cuda.Stream(index), torch.cuda.Stream(index)

    def copy(self, target: Tensor, source: Tensor) -> Arrival:
        """Start copying; both are flat bytes of the same size, exactly one of them on the GPU.

        It begins when what the calling thread's stream was given before is done. Host memory that is not registered
        works too, at half the speed or less.
        """
        lane = self._into if target.is_cuda else self._out
        lane.wait_stream(self._torch.current_stream(lane.device))
        with self._torch.stream(lane):
            target.copy_(source, non_blocking=True)
        return lane.record_event()

    def rest(self) -> None:
        """Wait for all that this process gave the GPU; then give back what torch's allocator keeps for later."""
        self._torch.synchronize(self._into.device)
        self._torch.empty_cache()

    def reserved(self) -> int:
        """Bytes that torch's allocator holds on this GPU."""
        return self._torch.memory_reserved(self._into.device)


class Pipeline:
    """Copies that leave: at most `depth` of them are under way, and each is done before what follows it is told."""

    def __init__(self, depth: int = 2) -> None:
        self._depth = depth
        self._under_way: deque[tuple[Arrival, object]] = deque()

    def push(self, arrival: Arrival, then: object) -> list[object]:
        """`then` of every copy that is done now, in order. Waits for the oldest when there are too many."""
        self._under_way.append((arrival, then))
        done = []
        while len(self._under_way) > self._depth:
            done.append(self._pop())
        return done

    def drain(self) -> list[object]:
        """Wait for all of them."""
        return [self._pop() for _ in range(len(self._under_way))]

    def _pop(self) -> object:
        arrival, then = self._under_way.popleft()
        arrival.synchronize()
        return then
