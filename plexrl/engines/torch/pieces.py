"""What a rank holds of the tensors of a saved state, and how the whole ones come together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from msgspec import Struct
from torch import Tensor

from plexrl.engines.torch.gang import Gang


class Piece(Struct, frozen=True):
    """A run of a tensor's elements, all of it on every rank or shared out over the gang.

    values: 1-D, the rank's own elements, of which the first is `start` of the flattened tensor.
    counts: how many each rank has, by rank, in the order of the elements; () when every rank has all of them.
    """

    shape: tuple[int, ...]
    values: Tensor
    start: int = 0
    counts: tuple[int, ...] = ()

    @property
    def dtype(self) -> torch.dtype:
        """Of the tensor."""
        return self.values.dtype

    def take(self, whole: Tensor) -> None:
        """Copy the rank's part of a whole tensor, converting it."""
        self.values.copy_(whole.reshape(-1)[self.start : self.start + self.values.numel()])


Pieces = Mapping[str, Piece]


def whole(tensors: Mapping[str, Tensor]) -> dict[str, Piece]:
    """Of tensors that every rank has."""
    return {name: Piece(tuple(tensor.shape), tensor.reshape(-1)) for name, tensor in tensors.items()}


def assembled(pieces: Pieces, gang: Gang) -> Iterator[Tensor]:
    """The whole tensors in order, one at a time; a collective, if any is shared out: to be run to its end by all."""
    for piece in pieces.values():
        if piece.counts:
            yield torch.cat(gang.gather(piece.values, piece.counts)).view(piece.shape)
        else:
            yield piece.values.view(piece.shape)
