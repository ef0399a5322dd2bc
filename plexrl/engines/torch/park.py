"""The host slab in which the rows of live sequences wait while their sampler is off its device."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from torch import Tensor

from plexrl.engines.torch.kv import KvTable
from plexrl.memory.manifest import Bucket
from plexrl.types import Moved

if TYPE_CHECKING:
    from plexrl.memory.gate import Seat


class Park:
    """Rows between the KV table and its mirror in host memory: only tokens in use move, out only those that are new.

    Layers leave and come in ascending device offset, each at the gate. copied: bytes and seconds of the last way.
    """

    def __init__(self, table: KvTable, bucket: Bucket, homes: list[Tensor], offset: int) -> None:
        """bucket: where the table's layers lie in the region. homes: their mirrors. offset: of the region."""
        self._table = table
        self._homes = homes
        starts = [offset + at for _, at in bucket.tensors]
        self._spans = list(zip(starts, [*starts[1:], offset + bucket.offset + bucket.size], strict=True))
        self.copied = (0, 0.0)
        self._left = 0  # layers that are no longer on the device

    def leave(self, seat: Seat | None) -> Moved:
        """Park every row. What fails is mended by `undo`."""
        begin = time.perf_counter()
        table = self._table
        rows = [(table.place(s.row), s.parked, s.cached) for s in table.rows]
        self._left = 0
        moved = clean = 0
        for layer, home, (_, end) in zip(table.layers, self._homes, self._spans, strict=True):
            for start, parked, cached in rows:
                piece = layer[:, start + parked : start + cached]
                home[:, start + parked : start + cached].copy_(piece)
                moved += piece.nbytes
                clean += layer[:, start : start + parked].nbytes
            if seat is not None:
                seat.release(end)
            self._left += 1
        for sequence in table.rows:
            sequence.parked = sequence.cached
        self.copied = (moved, time.perf_counter() - begin)
        return Moved(bytes_out=moved, bytes_clean=clean, seconds=self.copied[1])

    def come(self, seat: Seat | None) -> Moved:
        """Bring every row back; the rest of its place is cleared, whoever's bytes were there."""
        moved = self._bring(range(self._left), seat)
        self._left = 0
        return moved

    def back(self, seat: Seat | None) -> Moved:
        """After a `leave` that failed: the layers that had left are as they were."""
        moved = self._bring(range(self._left - 1, -1, -1), seat)
        self._left = 0
        return moved

    def away(self) -> None:
        """After a `come`: nothing was written since, so host memory has it all."""
        self._left = len(self._spans)

    def _bring(self, layers: range, seat: Seat | None) -> Moved:
        begin, waited, moved = time.perf_counter(), 0.0, 0
        table = self._table
        rows = [(table.place(s.row), s.cached) for s in table.rows]
        for index in layers:
            if seat is not None:
                waited += seat.wait(*self._spans[index])
            layer, home = table.layers[index], self._homes[index]
            for start, cached in rows:
                piece = layer[:, start : start + cached]
                piece.copy_(home[:, start : start + cached])
                layer[:, start + cached : start + table.length].zero_()
                moved += piece.nbytes
        seconds = time.perf_counter() - begin
        self.copied = (moved, seconds - waited)
        return Moved(bytes_in=moved, seconds=seconds, waited_s=waited)
