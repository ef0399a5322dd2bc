"""The device interface and its `cpu` implementation: a pretend GPU whose memory is one memfd."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Protocol

from plexrl.memory import pages
from plexrl.memory.pages import create_memfd
from plexrl.memory.region import NotMapped, Region, check_free, check_place, not_mapped, overlap, piece
from plexrl.memory.transfer import CHUNK, Memcpy, Mover
from plexrl.types import BadInput, Extent

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["CpuDevice", "Device", "NotMapped", "Region", "create_memfd"]


class Device(Protocol):
    """One GPU's memory as one rank sees it.

    mover, chunk: what copies between it and the host, and how many bytes at once; for ResidentState.
    """

    mover: Mover
    chunk: int

    def reserve(self, extent: Extent) -> Region:
        """Reserve addresses for an extent; the region is not mapped yet. Raises DoesNotFit, BadInput."""

    def map(self, region: Region) -> None:
        """Make the region usable. Its contents are undefined. Raises NotMapped over a region that is in use."""

    def unmap(self, region: Region) -> None:
        """Give the memory back; the addresses stay reserved."""

    def copy_in(self, region: Region, offset: int, src: Tensor) -> None:
        """Copy host bytes (uint8, 1-D) to `offset` in the region. Raises NotMapped, BadInput."""

    def copy_out(self, region: Region, offset: int, dst: Tensor) -> None:
        """Fill host bytes (uint8, 1-D) from `offset` in the region. Raises NotMapped, BadInput."""

    def residual_bytes(self) -> int:
        """Device bytes that this process holds now: mapped regions and what its runtime keeps beside them."""


class CpuDevice:
    """The `cpu` device: `fd` is a memfd of exactly `size` bytes, the same one in every process on this GPU.

    It is mapped whole, once, and a region is [offset, offset + size) of it: remapping pages costs 3 to 14 times the
    copy. Unmapping is bookkeeping; with paranoid=True the pages that lie wholly inside an unmapped region are made
    inaccessible, so that a use after unmap ends the process instead of reading another tenant's state.
    """

    def __init__(self, fd: int, size: int, paranoid: bool = False) -> None:
        """Raises BadInput when the file behind fd has another size."""
        import torch

        held = os.fstat(fd).st_size
        if held != size:
            raise BadInput(f"the memory of a cpu device has {held} bytes instead of {size}", "Pass that device's memfd")
        self.size = size
        self.mover: Mover = Memcpy()
        self.chunk = CHUNK
        self.paranoid = paranoid
        self._mapping = pages.map_shared(fd, size)
        self._address = pages.address(self._mapping)
        self._bytes = torch.frombuffer(self._mapping, dtype=torch.uint8)
        self._regions: list[Region] = []

    def reserve(self, extent: Extent) -> Region:
        """Touches every page once; what other ranks have there stays as it is.

        Raises BadInput without a 64-byte-aligned offset and a positive size, DoesNotFit beyond the device's end.
        """
        check_place(extent, self.size, "cpu")
        offset, size = extent.offset, extent.size
        if self.paranoid:
            self._access(offset, size)
        pages.populate(self._mapping, offset, size)
        region = Region(extent, self._bytes[offset : offset + size])
        self._regions.append(region)
        if self.paranoid:
            self._forbid(region)
        return region

    def map(self, region: Region) -> None:
        """Raises NotMapped when a region of this process that overlaps it is in use."""
        if region.mapped:
            return
        check_free(region, (other for other in self._regions if other.mapped))
        if self.paranoid:
            self._access(region.extent.offset, region.extent.size)
        region.mapped = True

    def unmap(self, region: Region) -> None:
        """Unmapping twice is no error."""
        region.mapped = False
        if self.paranoid:
            self._forbid(region)

    def copy_in(self, region: Region, offset: int, src: Tensor) -> None:
        """src: uint8, 1-D. Raises NotMapped, BadInput beyond the region's end."""
        self._piece(region, offset, src).copy_(src)

    def copy_out(self, region: Region, offset: int, dst: Tensor) -> None:
        """dst: uint8, 1-D. Raises NotMapped, BadInput beyond the region's end."""
        dst.copy_(self._piece(region, offset, dst))

    def residual_bytes(self) -> int:
        """Bytes of the mapped regions: a cpu device has no context, graphs or communicator buffers beside them."""
        return sum(region.extent.size for region in self._regions if region.mapped)

    def _piece(self, region: Region, offset: int, host: Tensor) -> Tensor:
        if not region.mapped:
            raise not_mapped(region)
        return piece(region, offset, host)

    def _access(self, offset: int, size: int) -> None:
        # Outwards to whole pages: a neighbour's edge page may have been forbidden.
        start = offset // pages.PAGE * pages.PAGE
        end = pages.align_up(offset + size, pages.PAGE)
        pages.protect(self._address + start, end - start, pages.PROT_READ_WRITE)

    def _forbid(self, region: Region) -> None:
        # Inwards: an edge page belongs to a neighbour too. What a mapped region of this process covers stays usable.
        start = pages.align_up(region.extent.offset, pages.PAGE)
        end = (region.extent.offset + region.extent.size) // pages.PAGE * pages.PAGE
        pages.protect(self._address + start, end - start, pages.PROT_NONE)
        for other in self._regions:
            if other.mapped and overlap(region.extent, other.extent):
                self._access(other.extent.offset, other.extent.size)
