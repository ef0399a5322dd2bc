"""KV blocks of live sequences: which they are, and how they leave the device and come back."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from plexrl.engines.vllm.house import House
from plexrl.engines.vllm.sizing import BLOCK
from plexrl.types import Moved

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from plexrl.memory.gate import Seat

_Key = tuple[str, int, int, int]


class Blocks:
    """A crossing's part. Blocks in use move, out only those that host memory does not have as they are.

    copied: bytes and seconds of the last way.
    """

    def __init__(self, house: House) -> None:
        self._device = house.blocks
        self._home = house.parked
        self._scheduler = house.scheduler
        self._manager = house.scheduler.kv_cache_manager
        self._offset = house.spec.extent_offset or 0
        self._parked: dict[int, _Key] = {}
        self._left = 0  # layers that are no longer on the device
        self.size = house.blocks[:, 0].nbytes
        self.copied = (0, 0.0)
        # A block is cleared when it is given: what lies there may be another's after a switch, or no numbers.
        house.scheduler.needs_kv_cache_zeroing = True
        for manager in self._manager.coordinator.single_type_managers:
            manager._record_new_block_ids = True
        house.runner._zero_block_ids = self._clear

    def live(self) -> dict[int, _Key]:
        """Block -> what it holds: whose tokens (request, how often it began anew), from which on, how many."""
        found: dict[int, _Key] = {}
        for request in self._scheduler.running:
            for index, block in enumerate(self._ids(request)):
                filled = min(request.num_computed_tokens - index * BLOCK, BLOCK)
                if filled > 0:
                    found.setdefault(block, (request.request_id, request.num_preemptions, index, filled))
        return found

    def forget_ended(self) -> None:
        """What only the prefix cache remembers does not leave with the rest: it is read again when it is wanted."""
        pool = self._manager.block_pool
        self._manager.evict_blocks({b.block_id for b in pool.blocks if b.ref_cnt == 0 and b.block_hash is not None})

    def read_again(self, request: Request) -> None:
        """Give up a sequence's blocks; it is read again, in its turn, when the group is back."""
        self._scheduler.running.remove(request)
        self._scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
        self._scheduler.prev_step_scheduled_req_ids.discard(request.request_id)

    def leave(self, seat: Seat | None) -> Moved:
        """See Part."""
        begin = time.perf_counter()
        live = self.live()
        new = [block for block, key in live.items() if self._parked.get(block) != key]
        self._left = 0
        for layer in range(len(self._device)):
            for run in _runs(new):
                self._home[layer, run].copy_(self._device[layer, run])
            if seat is not None:
                seat.release(self._span(layer)[1])
            self._left += 1
        self._parked = live
        moved = len(new) * self.size
        self.copied = (moved, time.perf_counter() - begin)
        return Moved(bytes_out=moved, bytes_clean=len(live) * self.size - moved, seconds=self.copied[1])

    def come(self, seat: Seat | None) -> Moved:
        """See Part. A call that was dropped meanwhile has no blocks any more."""
        moved = self._bring(range(self._left), seat)
        self._left = 0
        return moved

    def back(self, seat: Seat | None) -> Moved:
        """See Part."""
        moved = self._bring(range(self._left - 1, -1, -1), seat)
        self._left = 0
        return moved

    def away(self) -> None:
        """See Part. Nothing was written since it came, so host memory has it all."""
        self._left = len(self._device)

    def _bring(self, layers: range, seat: Seat | None) -> Moved:
        begin, waited = time.perf_counter(), 0.0
        live = list(self.live())
        for layer in layers:
            if seat is not None:
                waited += seat.wait(*self._span(layer))
            for run in _runs(live):
                self._device[layer, run].copy_(self._home[layer, run])
            self._device[layer, 0].zero_()  # nobody's block: what vLLM reads where there is nothing
        moved, seconds = len(live) * self._device[0, 0].nbytes * len(layers), time.perf_counter() - begin
        self.copied = (moved, seconds - waited)
        return Moved(bytes_in=moved, seconds=seconds, waited_s=waited)

    def _clear(self, blocks: list[int]) -> None:
        for run in _runs(blocks):
            self._device[:, run].zero_()

    def _span(self, layer: int) -> tuple[int, int]:
        size = self._device[layer].nbytes
        return self._offset + layer * size, self._offset + (layer + 1) * size

    def _ids(self, request: Request) -> list[int]:
        return self._manager.get_block_ids(request.request_id)[0]


def _runs(blocks: list[int]) -> list[slice]:
    """Blocks that lie side by side, together."""
    found: list[slice] = []
    for block in sorted(blocks):
        if found and found[-1].stop == block:
            found[-1] = slice(found[-1].start, block + 1)
        else:
            found.append(slice(block, block + 1))
    return found
