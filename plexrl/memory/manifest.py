"""The manifest: which tensors a state consists of, and where each lies in a flat buffer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from plexrl.memory.pages import ALIGN, align_up
from plexrl.types import BadInput

if TYPE_CHECKING:
    from torch import Tensor

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "int64": 8, "uint8": 1}
"""The dtypes that a manifest knows, and their sizes in bytes."""


class TensorSpec(Struct, frozen=True):
    """A tensor's name (unique in its bucket), shape and dtype (a key of ITEM_BYTES)."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of its elements, without padding."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class Bucket(Struct, frozen=True):
    """Tensors that change and move together. All offsets are bytes from the buffer's start."""

    name: str
    offset: int
    size: int
    tensors: tuple[tuple[TensorSpec, int], ...]


class Manifest(Struct, frozen=True):
    """A layout of buckets. It depends on the specs and their order only, so every process computes the same one."""

    buckets: tuple[Bucket, ...]

    @classmethod
    def build(cls, specs: Mapping[str, Sequence[TensorSpec]], base_offset: int = 0) -> Manifest:
        """Lay the buckets out one after another from base_offset on; everything starts at a multiple of 64 bytes.

        Raises BadInput for an unknown dtype, a negative dimension, a name used twice in a bucket, or a base_offset
        that is not aligned.
        """
        if base_offset % ALIGN or base_offset < 0:
            raise BadInput(f"base offset {base_offset} is not a multiple of {ALIGN} bytes", "Align it up")
        buckets = []
        at = base_offset
        for name, tensors in specs.items():
            start = at
            placed = []
            seen = set()
            for spec in tensors:
                if spec.dtype not in ITEM_BYTES:
                    raise BadInput(
                        f"tensor {name}/{spec.name} has dtype {spec.dtype!r}", f"Use one of {', '.join(ITEM_BYTES)}"
                    )
                if any(n < 0 for n in spec.shape):
                    raise BadInput(f"tensor {name}/{spec.name} has the shape {spec.shape}", "Dimensions are 0 or more")
                if spec.name in seen:
                    raise BadInput(f"bucket {name} names {spec.name!r} twice", "Give each tensor its own name")
                seen.add(spec.name)
                placed.append((spec, at))
                at = align_up(at + spec.nbytes)
            buckets.append(Bucket(name, start, at - start, tuple(placed)))
        return cls(tuple(buckets))

    @property
    def size(self) -> int:
        """Bytes from base_offset to the end of the last bucket, padding included; a multiple of 64."""
        return self.end - self.buckets[0].offset if self.buckets else 0

    @property
    def end(self) -> int:
        """Bytes that a buffer must have at least: base_offset + size."""
        return self.buckets[-1].offset + self.buckets[-1].size if self.buckets else 0

    def without(self, *names: str) -> Manifest:
        """The same tensors without these buckets, laid out anew from offset 0: the layout of a host slab."""
        return Manifest.build({b.name: [spec for spec, _ in b.tensors] for b in self.buckets if b.name not in names})

    def views(self, buffer: Tensor) -> dict[str, dict[str, Tensor]]:
        """bucket -> name -> tensor, each a view into `buffer` (uint8, 1-D, at least `end` bytes, 64-byte aligned).

        Raises BadInput when the buffer is something else.
        """
        import torch

        check_buffer(buffer, self.end, "the buffer of a manifest")
        return {
            bucket.name: {
                spec.name: buffer[at : at + spec.nbytes].view(getattr(torch, spec.dtype)).view(spec.shape)
                for spec, at in bucket.tensors
            }
            for bucket in self.buckets
        }


def check_buffer(buffer: Tensor, size: int, what: str) -> None:
    """Raise BadInput unless `buffer` is flat bytes, at least `size` of them, starting at a multiple of 64."""
    if str(buffer.dtype) != "torch.uint8" or buffer.dim() != 1 or not buffer.is_contiguous():
        raise BadInput(f"{what} is {buffer.dtype} of shape {tuple(buffer.shape)}", "Pass a contiguous 1-D uint8 tensor")
    if buffer.numel() < size:
        raise BadInput(f"{what} has {buffer.numel()} bytes and needs {size}", "Reserve more")
    if size and buffer.data_ptr() % ALIGN:
        raise BadInput(f"{what} does not start at a multiple of {ALIGN} bytes", "Align its offset up")
