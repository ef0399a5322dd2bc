"""The copying of a switch: pieces between home and device, chunk by chunk, through the gate."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from plexrl.memory.piece import CLEAN, ZERO, Chunk, Piece
from plexrl.memory.transfer import Mover

if TYPE_CHECKING:
    from plexrl.memory.gate import Seat


class Carrier:
    """Moves the pieces of one state. It keeps their `ready` and `left` true at every step, also when a copy raises.

    at: where the state's place begins in the extent of the seats that it is given, in bytes.
    """

    def __init__(self, mover: Mover) -> None:
        self.at = 0
        self._mover = mover

    def bring(self, pieces: Iterable[Piece], seat: Seat | None) -> tuple[int, float]:
        """Have all chunks of these pieces on the device, ascending; bytes copied, seconds waited at the gate.

        When a copy or the gate raises, none of the pieces that were to come counts as there: copies may be under way.
        """
        moved, waited = 0, 0.0
        last: Chunk | None = None
        came = [piece for piece in pieces if not piece.present]
        try:
            for piece in came:
                for i in range(piece.ready, len(piece.chunks)):
                    chunk = piece.chunks[i]
                    waited += self._fill(piece, chunk, seat)
                    if piece.state is not ZERO:
                        last = chunk
                        moved += chunk.end - chunk.start
                    piece.ready = i + 1
            _arrived(last)
        except BaseException:
            for piece in came:
                piece.ready = 0
            raise
        return moved, waited

    def send_home(self, piece: Piece, seat: Seat | None) -> None:
        """Copy a piece out; a chunk is let go of when its copy is done, beside which the next one may be under way."""
        under_way: Chunk | None = None
        for chunk in piece.chunks:
            chunk.arrival = self._mover.copy(chunk.home, chunk.device)
            if under_way is not None:
                self._let_go(piece, under_way, seat)
            under_way = chunk
            if chunk.arrival is None:
                self._let_go(piece, chunk, seat)
                under_way = None
        if under_way is not None:
            self._let_go(piece, under_way, seat)
        piece.state = CLEAN

    def forget(self, piece: Piece, seat: Seat | None) -> None:
        """Let go of a piece without a copy."""
        piece.left = piece.ready
        if seat is not None:
            seat.release(seat.extent.offset + self.at + piece.offset + piece.size)

    def take_back(self, pieces: Iterable[Piece], seat: Seat | None) -> tuple[int, float]:
        """Have the chunks that left on the device again, descending; bytes copied, seconds waited at the gate."""
        moved, waited = 0, 0.0
        last: Chunk | None = None
        for piece in pieces:
            for i in reversed(range(piece.left)):
                chunk = piece.chunks[i]
                waited += self._fill(piece, chunk, seat)
                if piece.state is not ZERO:
                    last = chunk
                    moved += chunk.end - chunk.start
                piece.left = i
        _arrived(last)
        return moved, waited

    def _fill(self, piece: Piece, chunk: Chunk, seat: Seat | None) -> float:
        waited = 0.0
        if seat is not None:
            base = seat.extent.offset + self.at
            waited = seat.wait(base + chunk.start, base + chunk.end)
        if piece.state is ZERO:
            chunk.device.zero_()
        else:
            chunk.arrival = self._mover.copy(chunk.device, chunk.home)
        return waited

    def _let_go(self, piece: Piece, chunk: Chunk, seat: Seat | None) -> None:
        _arrived(chunk)
        piece.left += 1
        if seat is not None:
            seat.release(seat.extent.offset + self.at + chunk.end)


def _arrived(chunk: Chunk | None) -> None:
    if chunk is not None and chunk.arrival is not None:
        chunk.arrival.synchronize()
