"""A reserved piece of a device's memory, and what every device refuses to do with one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from plexrl.memory.pages import ALIGN
from plexrl.types import BadInput, DoesNotFit, Extent, PlexrlError

if TYPE_CHECKING:
    from torch import Tensor


class NotMapped(PlexrlError):
    """A region was used while its memory belongs to somebody else, or mapped over one that is in use."""


class Region:
    """A reserved piece of a device's memory. Its address is the same for life, also while it is not mapped.

    buffer: uint8, 1-D, extent.size bytes. Reading or writing it is only allowed while `mapped`.
    """

    __slots__ = ("buffer", "extent", "mapped")

    def __init__(self, extent: Extent, buffer: Tensor) -> None:
        self.extent = extent
        self.buffer = buffer
        self.mapped = False


def check_place(extent: Extent, size: int, kind: str) -> None:
    """Raises BadInput without a 64-byte-aligned offset and a positive size, DoesNotFit beyond a device's `size`."""
    if extent.offset is None or extent.offset < 0 or extent.offset % ALIGN or extent.size <= 0:
        raise BadInput(
            f"an extent at offset {extent.offset} of {extent.size} bytes cannot be reserved on a {kind} device",
            f"Offsets are fixed at placement, multiples of {ALIGN}; sizes are positive",
        )
    if extent.offset + extent.size > size:
        raise DoesNotFit(
            f"an extent of {extent.size} bytes at offset {extent.offset} ends beyond the device's {size} bytes",
            "Raise device.bytes or place a smaller model",
        )


def check_free(region: Region, in_use: Iterable[Region]) -> None:
    """Raises NotMapped when the region overlaps another one that this process uses."""
    for other in in_use:
        if other is not region and overlap(region.extent, other.extent):
            raise NotMapped(
                f"the region at {region.extent.offset} overlaps the one at {other.extent.offset}, which is mapped",
                "Offload and unmap that one first",
            )


def not_mapped(region: Region) -> NotMapped:
    """What to raise when it is used."""
    return NotMapped(f"the region at {region.extent.offset} is not mapped", "Map it before copying")


def piece(region: Region, offset: int, host: Tensor) -> Tensor:
    """The region's bytes from `offset` on that host bytes (uint8, 1-D) are copied to or from. Raises BadInput."""
    if str(host.dtype) != "torch.uint8" or host.dim() != 1:
        raise BadInput(f"copied bytes are {host.dtype} of shape {tuple(host.shape)}", "Pass a 1-D uint8 tensor")
    end = offset + host.numel()
    if offset < 0 or end > region.extent.size:
        raise BadInput(
            f"{host.numel()} bytes at offset {offset} lie outside a region of {region.extent.size}",
            "Copy within the region",
        )
    return region.buffer[offset:end]


def overlap(a: Extent, b: Extent) -> bool:
    """Whether they share a byte."""
    return a.offset < b.offset + b.size and b.offset < a.offset + a.size
