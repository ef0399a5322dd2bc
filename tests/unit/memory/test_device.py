"""The cpu device: one memfd for all ranks, stable addresses, no use of what is not mapped."""

import os
import signal

import pytest
import torch

from plexrl.memory.device import CpuDevice, NotMapped
from plexrl.memory.pages import PAGE
from plexrl.types import BadInput, DoesNotFit, Extent

SIZE = 16 * PAGE


def noise(size: int) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8)


def test_ranks_share_the_bytes_and_reserving_changes_none(memfd):
    fd = memfd(SIZE)
    first, second = CpuDevice(fd, SIZE), CpuDevice(fd, SIZE)
    one = first.reserve(Extent(64, SIZE - 64))
    first.map(one)
    written = noise(SIZE - 64)
    first.copy_in(one, 0, written)
    other = second.reserve(Extent(128, 1000))
    second.map(other)
    assert torch.equal(other.buffer, written[64:1064])


def test_the_address_outlives_unmapping(memfd):
    device = CpuDevice(memfd(SIZE), SIZE, paranoid=True)
    region = device.reserve(Extent(64, 3 * PAGE))
    device.map(region)
    address = region.buffer.data_ptr()
    assert address % 64 == 0
    region.buffer.fill_(7)
    device.unmap(region)
    device.map(region)
    assert region.buffer.data_ptr() == address and (region.buffer == 7).all()


def test_copies_stay_inside_a_mapped_region(memfd):
    device = CpuDevice(memfd(SIZE), SIZE)
    region = device.reserve(Extent(0, 256))
    bytes_ = noise(64)
    with pytest.raises(NotMapped):
        device.copy_in(region, 0, bytes_)
    with pytest.raises(NotMapped):
        device.copy_out(region, 0, bytes_)
    device.map(region)
    device.copy_in(region, 192, bytes_)
    back = torch.zeros(64, dtype=torch.uint8)
    device.copy_out(region, 192, back)
    assert torch.equal(back, bytes_)
    for offset, host in ((193, bytes_), (-1, bytes_), (0, bytes_.view(torch.int32)), (0, bytes_.view(8, 8))):
        with pytest.raises(BadInput):
            device.copy_in(region, offset, host)
    device.unmap(region)
    with pytest.raises(NotMapped):
        device.copy_out(region, 192, back)


def test_overlapping_regions_are_not_mapped_together(memfd):
    device = CpuDevice(memfd(SIZE), SIZE, paranoid=True)
    low, high, apart = (device.reserve(Extent(o, s)) for o, s in ((0, 4096), (4032, 8192), (12288, 64)))
    device.map(low)
    device.map(apart)
    with pytest.raises(NotMapped, match="overlaps"):
        device.map(high)
    assert device.residual_bytes() == 4096 + 64
    device.unmap(low)
    device.map(high)
    high.buffer.fill_(1)
    apart.buffer.fill_(2)
    assert device.residual_bytes() == 8192 + 64
    device.unmap(high)
    device.unmap(apart)
    assert device.residual_bytes() == 0


@pytest.mark.parametrize("extent", [Extent(None, 64), Extent(32, 64), Extent(-64, 64), Extent(0, 0)])
def test_extents_that_make_no_sense_are_refused(memfd, extent):
    with pytest.raises(BadInput):
        CpuDevice(memfd(SIZE), SIZE).reserve(extent)


def test_an_extent_beyond_the_end_does_not_fit(memfd):
    with pytest.raises(DoesNotFit, match=str(SIZE)):
        CpuDevice(memfd(SIZE), SIZE).reserve(Extent(64, SIZE))


def test_a_file_of_another_size_is_refused(memfd):
    with pytest.raises(BadInput, match=str(SIZE)):
        CpuDevice(memfd(SIZE), 2 * SIZE)


def test_nobody_can_shrink_the_memory_of_others(memfd):
    with pytest.raises(PermissionError):
        os.ftruncate(memfd(SIZE), PAGE)


def test_paranoid_ends_a_process_that_uses_an_unmapped_region(memfd, ending):
    device = CpuDevice(memfd(SIZE), SIZE, paranoid=True)
    region = device.reserve(Extent(64, 4 * PAGE))
    neighbour = device.reserve(Extent(64 + 4 * PAGE, 4 * PAGE))
    below = device.reserve(Extent(0, 64))
    device.map(neighbour)
    device.map(below)
    assert ending(lambda: region.buffer[2 * PAGE].item()) == signal.SIGSEGV
    device.map(region)
    assert ending(lambda: region.buffer[2 * PAGE].item()) == 0
    device.unmap(region)
    assert ending(lambda: region.buffer[2 * PAGE].fill_(1)) == signal.SIGSEGV
    assert ending(lambda: (below.buffer.fill_(1), neighbour.buffer.fill_(1))) == 0
    # Reserving another extent over a forbidden one touches it and lets nobody use the first.
    device.reserve(Extent(128, 3 * PAGE))
    assert ending(lambda: region.buffer[2 * PAGE].item()) == signal.SIGSEGV
    assert ending(lambda: neighbour.buffer.fill_(1)) == 0
