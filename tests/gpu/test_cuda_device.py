"""The cuda device on a GPU: what tests/unit/memory/test_cuda.py holds on host memory, and what only a GPU can show."""

import pytest
import torch

from plexrl.memory.arena import Arena, ArenaMap
from plexrl.memory.cuda import cuda_device
from plexrl.memory.cuda_pins import writable
from plexrl.memory.device import NotMapped
from plexrl.memory.pages import create_memfd
from plexrl.types import DoesNotFit, Extent
from tests.gpu.conftest import CHUNK, SIZE

pytestmark = pytest.mark.gpu
GRAIN = 2 << 20


def noise(size: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def free() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info(0)[0]


def test_bytes_come_back_and_the_address_stays(gpu):
    region = gpu.reserve(Extent(0, SIZE - 64))
    address = region.buffer.data_ptr()
    assert region.buffer.is_cuda and address % GRAIN == 0
    data = noise(SIZE - 64).pin_memory()
    back = torch.zeros_like(data).pin_memory()
    for _ in range(3):
        gpu.map(region)
        assert region.buffer.data_ptr() == address
        gpu.copy_in(region, 0, data)
        back.zero_()
        gpu.copy_out(region, 0, back)
        assert torch.equal(back, data)
        gpu.unmap(region)
    with pytest.raises(NotMapped):
        gpu.copy_in(region, 0, data)


def test_memory_goes_back_to_the_gpu_chunk_by_chunk(gpu):
    region = gpu.reserve(Extent(0, 4 * CHUNK))
    before = free()
    gpu.map(region)
    assert before - free() >= 4 * CHUNK
    held = noise(CHUNK)
    gpu.copy_in(region, 3 * CHUNK, held)
    for i in range(3):
        gpu.unback(region, 0, (i + 1) * CHUNK)
        assert abs(before - free() - (3 - i) * CHUNK) < CHUNK
    back = torch.zeros_like(held)
    gpu.copy_out(region, 3 * CHUNK, back)
    assert torch.equal(back, held), "a neighbour's chunk is as it was"
    gpu.unmap(region)
    assert abs(before - free()) < CHUNK


def test_tensors_over_a_region_compute_before_and_after_a_switch(gpu):
    region = gpu.reserve(Extent(0, CHUNK))
    gpu.map(region)
    weight = region.buffer[: 1 << 20].view(torch.float32).view(512, 512)
    torch.nn.init.normal_(weight)
    inputs = torch.randn(8, 512, device="cuda")
    before, host = inputs @ weight, region.buffer.cpu()
    gpu.unmap(region)
    gpu.map(region)
    gpu.copy_in(region, 0, host)
    assert torch.equal(inputs @ weight, before)


def test_a_captured_graph_replays_after_its_memory_went_and_came(gpu):
    region = gpu.reserve(Extent(0, CHUNK))
    gpu.map(region)
    weight = region.buffer[: 1 << 20].view(torch.float32).view(512, 512)
    result = region.buffer[1 << 20 : 2 << 20].view(torch.float32).view(512, 512)
    torch.nn.init.normal_(weight)
    # Warm-up: libraries make their workspaces on first use, which a capture must not.
    torch.mul(weight, 2, out=result)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.mul(weight, 2, out=result)
    host = region.buffer.cpu()
    expected = weight * 2
    for _ in range(3):
        gpu.unmap(region)
        gpu.map(region)
        gpu.copy_in(region, 0, host)
        result.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(result, expected)


def test_what_stays_behind_is_measured(gpu):
    region = gpu.reserve(Extent(0, SIZE))
    asleep = gpu.residual_bytes()
    gpu.map(region)
    assert gpu.residual_bytes() - asleep >= SIZE
    scratch = torch.empty(CHUNK, dtype=torch.uint8, device="cuda")
    del scratch
    gpu.unmap(region)
    assert abs(gpu.residual_bytes() - asleep) < CHUNK, "the allocator's cache went too"


def test_more_than_the_gpu_has_is_refused_and_leaves_nothing():
    total = torch.cuda.mem_get_info(0)[1]
    with pytest.raises(DoesNotFit, match=str(total)):
        cuda_device(0, total + 1)
    device = cuda_device(0, total)
    region = device.reserve(Extent(0, total))
    before = free()
    with pytest.raises(DoesNotFit, match="cuMemCreate"):
        device.map(region)
    assert abs(before - free()) < CHUNK and not region.mapped
    device.close()


@pytest.mark.parametrize("readonly", [False, True])
def test_the_arena_is_registered_and_read_only_slabs_stay_read_only(gpu, readonly):
    size = 64 << 20
    fd = create_memfd("test", size)
    arena = Arena(fd, size)
    slab = arena.alloc("state", size, 0)
    data = noise(size)
    ArenaMap(fd, size).view(slab).copy_(data)
    arena_map = ArenaMap(fd, size, gpu.pins.register, gpu.pins.unregister)
    view = arena_map.view(slab, readonly)
    assert view.is_pinned() and writable(view.data_ptr()) != readonly and gpu.pins.bytes == size
    assert arena_map.registrations.count == 1
    region = gpu.reserve(Extent(0, size))
    gpu.map(region)
    gpu.copy_in(region, 0, view)
    assert torch.equal(region.buffer.cpu(), data)
    arena_map.drop(slab)
    assert gpu.pins.bytes == 0
    arena.close()


def test_a_thousand_switches_leave_no_byte_behind(gpu):
    region = gpu.reserve(Extent(0, 4 * CHUNK))
    gpu.map(region)
    gpu.unmap(region)
    before = free()
    for _ in range(1000):
        gpu.map(region)
        gpu.unmap(region)
    assert abs(before - free()) < CHUNK
