"""The `cuda` device: stable addresses whose memory comes and goes chunk by chunk, by virtual memory management.

Unlike the cpu device, where all ranks share one file, every process has memory of its own here: a region's *addresses*
are its process's for life, its *memory* is taken from the GPU when it is mapped and given back when it is unmapped.
That the processes on one GPU together take no more than there is, is the gate's matter: offsets in an extent are a
budget's, not a place's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from plexrl.memory import cuda_tensor
from plexrl.memory.cuda_chunks import Chunks
from plexrl.memory.cuda_driver import Driver, LibCuda
from plexrl.memory.cuda_gauge import Gauge
from plexrl.memory.cuda_lanes import GpuMover, Lanes
from plexrl.memory.cuda_pins import Pins
from plexrl.memory.region import Region, check_free, check_place, not_mapped, piece
from plexrl.types import BadInput, DoesNotFit, Extent, Unavailable

if TYPE_CHECKING:
    from torch import Tensor

CHUNK = 64 << 20
"""Bytes of physical memory that come and go together. A process may hold this much more than the gate says of it."""


class CudaDevice:
    """One GPU's memory as one rank sees it; see `Device`. Verbs are for one thread at a time.

    pins: its `register` and `unregister` are ArenaMap's hooks. mover and chunk are for ResidentState.
    """

    def __init__(
        self,
        size: int,
        driver: Driver,
        mover: GpuMover,
        kind: int = cuda_tensor.CUDA,
        index: int = 0,
        gauge: Gauge | None = None,
        context: int = 0,
        chunk: int = CHUNK,
    ) -> None:
        """size: bytes of the GPU that the pool may use, residuals excluded. context: bytes the context takes.

        `cuda_device` makes one of a real GPU. Raises DoesNotFit when the GPU is smaller than size.
        """
        total = driver.memory()[1]
        if size > total:
            raise DoesNotFit(f"the pool is to use {size} bytes of a GPU that has {total}", "Lower device.bytes")
        self.size = size
        self.chunk = chunk
        self.pins = Pins(driver)
        self._driver = driver
        self.mover = mover
        self._place = (kind, index)
        self._gauge = gauge
        self._context = context
        self._regions: dict[Region, Chunks] = {}
        self._gated: set[Extent] = set()

    def gate(self, extent: Extent) -> None:
        """From now on the memory of this extent's region follows a BackedSeat: `map` takes none at once."""
        self._gated.add(extent)

    def region(self, extent: Extent) -> Region:
        """The region that was reserved for exactly this extent. Raises BadInput when there is none."""
        for region in self._regions:
            if region.extent == extent:
                return region
        raise BadInput(f"no region at {extent.offset} of {extent.size} bytes", "Reserve the seat's extent first")

    def reserve(self, extent: Extent) -> Region:
        """Addresses for an extent, with nothing behind them. Raises BadInput, DoesNotFit as the cpu device does."""
        check_place(extent, self.size, "cuda")
        self._driver.enter()
        chunks = Chunks(self._driver, extent.size, self.chunk)
        region = Region(extent, cuda_tensor.tensor_at(chunks.address, extent.size, *self._place))
        self._regions[region] = chunks
        return region

    def map(self, region: Region) -> None:
        """Take memory for all of it; for a gated one it comes as the gate grants it.

        Raises NotMapped over a region of this process in use, DoesNotFit.
        """
        if region.extent not in self._gated:
            self.back(region, 0, region.extent.size)

    def unmap(self, region: Region) -> None:
        """Wait for the GPU, then give all of it back, and what torch's allocator keeps. Twice is no error."""
        self.rest()
        self.unback(region, 0, region.extent.size)

    def back(self, region: Region, start: int, end: int) -> None:
        """Take memory for the bytes [start, end) of the region, in whole chunks; all or nothing.

        Raises NotMapped over a region of this process in use, DoesNotFit when the GPU is full.
        """
        check_free(region, (other for other, chunks in self._regions.items() if chunks.backed_bytes))
        self._driver.enter()
        self._regions[region].back(start, end)
        region.mapped = self._regions[region].whole()

    def unback(self, region: Region, start: int, end: int) -> None:
        """Give back the chunks that lie wholly in [start, end); nothing on the GPU may use them any more."""
        self._driver.enter()
        self._regions[region].unback(start, end)
        region.mapped = self._regions[region].whole()

    def rest(self) -> None:
        """Wait for all that this process gave the GPU, and give back what torch's allocator keeps for later."""
        self.mover.rest()

    def copy_in(self, region: Region, offset: int, src: Tensor) -> None:
        """src: uint8, 1-D. Done when it returns. Raises NotMapped, BadInput beyond the region's end."""
        self.mover.copy(self._piece(region, offset, src), src).synchronize()

    def copy_out(self, region: Region, offset: int, dst: Tensor) -> None:
        """dst: uint8, 1-D. Done when it returns. Raises NotMapped, BadInput beyond the region's end."""
        self.mover.copy(dst, self._piece(region, offset, dst)).synchronize()

    def residual_bytes(self) -> int:
        """What the GPU's own books (NVML) say of this process; where they are closed to it, what it knows of itself.

        That is its regions, its allocator and its context, and lacks graphs and communicators.
        """
        held = self._gauge.held() if self._gauge is not None else None
        if held is not None:
            return held
        backed = sum(chunks.backed_bytes for chunks in self._regions.values())
        return self._context + self.mover.reserved() + backed

    def close(self) -> None:
        """Give all memory and addresses back. No tensor over a region may be used afterwards."""
        self.mover.rest()
        self._driver.enter()
        for chunks in self._regions.values():
            chunks.close()
        self._regions.clear()

    def _piece(self, region: Region, offset: int, host: Tensor) -> Tensor:
        found = piece(region, offset, host)
        if not self._regions[region].there(offset, offset + host.numel()):
            raise not_mapped(region)
        return found


def cuda_device(index: int, size: int, chunk: int = CHUNK) -> CudaDevice:
    """The index-th GPU that this process sees. Raises Unavailable without a GPU or driver, DoesNotFit."""
    import torch

    if not torch.cuda.is_available():
        raise Unavailable("torch sees no GPU here", "Use a machine with one and a torch that is built for CUDA")

    gauge = Gauge(str(torch.cuda.get_device_properties(index).uuid))
    before = gauge.used()
    driver = LibCuda(index)
    # torch's own start-up on the GPU belongs to what a process costs, and makes its context the current one.
    torch.cuda.set_device(index)
    torch.cuda.synchronize()
    context = max(gauge.used() - before, 0)
    return CudaDevice(size, driver, Lanes(index), index=index, gauge=gauge, context=context, chunk=chunk)
