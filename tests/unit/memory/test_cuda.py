"""The cuda device over virtual memory of the host: order of driver calls, stable addresses, no leak after a failure."""

import ctypes
import os
import re
import signal
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plexrl.memory import cuda_driver, cuda_tensor, pages
from plexrl.memory.arena import Arena
from plexrl.memory.cuda import CudaDevice, cuda_device
from plexrl.memory.cuda_chunks import Chunks, inside, touching
from plexrl.memory.cuda_driver import CudaFailed, LibCuda
from plexrl.memory.cuda_gauge import Gauge
from plexrl.memory.cuda_pins import Pins, writable
from plexrl.memory.device import NotMapped
from plexrl.types import BadInput, DoesNotFit, Extent, PlexrlError, Unavailable
from scripts.cuda_abi import C_PROTOTYPES
from tests.unit.memory.hostvmm import GRAIN, Card, HostVmm, LateMover

CHUNK = 2 * GRAIN
SIZE = 64 * GRAIN


def noise(size: int) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8)


def device(card: int = SIZE, size: int | None = None) -> tuple[CudaDevice, HostVmm]:
    driver = HostVmm(Card(card))
    made = CudaDevice(size or card, driver, LateMover(), kind=cuda_tensor.CPU, context=7, chunk=CHUNK)
    return made, driver


# Chunk arithmetic


@given(start=st.integers(0, 100), length=st.integers(0, 100), chunk=st.integers(1, 30), rest=st.integers(0, 40))
def test_touching_and_inside_are_what_they_say(start, length, chunk, rest):
    end, size = start + length, start + length + rest
    bytes_of = {i: range(i * chunk, min((i + 1) * chunk, size)) for i in range(-(-size // chunk))}
    held = set(range(start, end))
    assert list(touching(start, end, chunk)) == [i for i, chunk_ in bytes_of.items() if held & set(chunk_)]
    if size:
        assert list(inside(start, end, chunk, size)) == [i for i, chunk_ in bytes_of.items() if held >= set(chunk_)]


@given(data=st.data())
def test_memory_follows_what_is_asked_for_and_none_is_lost(data):
    driver = HostVmm(Card(SIZE))
    size = data.draw(st.integers(1, 10 * CHUNK))
    chunks = Chunks(driver, size, CHUNK)
    address, there = chunks.address, set()
    numbers = range(-(-size // CHUNK))
    for _ in range(data.draw(st.integers(0, 8))):
        start, end = sorted((data.draw(st.integers(0, size)), data.draw(st.integers(0, size))))
        failing = data.draw(st.sampled_from(["", "create", "map", "access"]))
        if data.draw(st.booleans()):
            if failing:
                driver.fail = {failing: data.draw(st.integers(0, 3))}
            try:
                chunks.back(start, end)
                there |= set(touching(start, end, CHUNK))
            except CudaFailed:
                pass
            driver.fail = {}
        else:
            chunks.unback(start, end)
            there -= set(inside(start, end, CHUNK, size))
        assert {(at - address) // CHUNK for at in driver.mapped} == there
        assert not driver.handles and driver.card.used == chunks.backed_bytes
        assert chunks.whole() == (there == set(numbers)) and chunks.address == address
        assert chunks.there(start, end) == (set(touching(start, end, CHUNK)) <= there)
    chunks.close()
    assert driver.card.used == 0 and not driver.mapped and not driver.reserved


def test_the_order_of_the_driver_s_calls():
    driver = HostVmm(Card(SIZE))
    chunks = Chunks(driver, CHUNK + 1, CHUNK)
    chunks.back(0, CHUNK + 1)
    chunks.back(0, 1)
    chunks.unback(0, CHUNK)
    chunks.close()
    chunk = ["create", "map", "release", "access"]
    assert driver.calls == ["reserve", *chunk, *chunk, "unmap", "unmap", "free"]


def test_a_chunk_is_a_multiple_of_the_granularity():
    for size, chunk in ((GRAIN, GRAIN + 1), (GRAIN, 0), (0, GRAIN)):
        with pytest.raises(BadInput, match=str(GRAIN)):
            Chunks(HostVmm(Card(SIZE)), size, chunk)


# The device


def test_the_address_and_not_the_memory_outlives_unmapping(ending):
    made, driver = device()
    region = made.reserve(Extent(64, 5 * CHUNK))
    assert driver.card.used == 0 and not region.mapped
    made.map(region)
    address = region.buffer.data_ptr()
    region.buffer.fill_(7)
    view = region.buffer[CHUNK : CHUNK + 8].view(torch.float32)
    made.unmap(region)
    assert driver.card.used == 0 and not region.mapped
    assert ending(lambda: view.sum()) == signal.SIGSEGV
    made.map(region)
    assert region.mapped and region.buffer.data_ptr() == address
    assert (region.buffer != 7).all(), "new memory"
    view.fill_(1.0)
    assert region.buffer[CHUNK : CHUNK + 8].view(torch.float32).sum() == 2


def test_a_region_is_usable_where_it_has_memory(ending):
    made, driver = device()
    region = made.reserve(Extent(0, 4 * CHUNK - 100))
    data = noise(CHUNK)
    made.back(region, CHUNK, CHUNK + 1)
    made.copy_in(region, CHUNK, data)
    back = torch.zeros_like(data)
    made.copy_out(region, CHUNK, back)
    assert torch.equal(back, data)
    assert driver.card.used == CHUNK and not region.mapped
    for offset in (0, CHUNK + 1):
        with pytest.raises(NotMapped):
            made.copy_in(region, offset, data)
    made.back(region, 0, region.extent.size)
    assert region.mapped and torch.equal(region.buffer[CHUNK : 2 * CHUNK], data)
    made.unback(region, 0, 2 * CHUNK - 1)
    assert driver.card.used == 3 * CHUNK, "a chunk of which one byte is still held stays"
    assert ending(lambda: region.buffer[:1].sum()) == signal.SIGSEGV
    assert torch.equal(region.buffer[CHUNK : 2 * CHUNK], data)


def test_copies_stay_inside_a_mapped_region():
    made, _ = device()
    region = made.reserve(Extent(0, 256))
    bytes_ = noise(64)
    with pytest.raises(NotMapped):
        made.copy_out(region, 0, bytes_)
    made.map(region)
    for offset, host in ((193, bytes_), (-1, bytes_), (0, bytes_.view(torch.int32)), (0, bytes_.view(8, 8))):
        with pytest.raises(BadInput):
            made.copy_in(region, offset, host)
    made.unmap(region)
    made.unmap(region)
    with pytest.raises(NotMapped):
        made.copy_in(region, 0, bytes_)


def test_extents_that_cannot_be_reserved():
    made, driver = device()
    for extent in (Extent(None, 64), Extent(-64, 64), Extent(32, 64), Extent(0, 0)):
        with pytest.raises(BadInput):
            made.reserve(extent)
    with pytest.raises(DoesNotFit, match=str(SIZE)):
        made.reserve(Extent(SIZE - 64, 128))
    with pytest.raises(DoesNotFit, match=str(SIZE + 1)):
        CudaDevice(SIZE + 1, driver, LateMover())


def test_regions_over_the_same_budget_are_mapped_one_after_the_other():
    made, _ = device()
    one, other = made.reserve(Extent(0, 1024)), made.reserve(Extent(960, 1024))
    made.map(one)
    with pytest.raises(NotMapped, match="960 overlaps the one at 0"):
        made.map(other)
    made.unmap(one)
    made.map(other)
    aside = made.reserve(Extent(2048, 64))
    made.map(aside)


def test_a_full_gpu_leaves_the_region_as_it_was():
    made, driver = device(4 * CHUNK)
    driver.card.take(CHUNK + GRAIN)
    region = made.reserve(Extent(0, 3 * CHUNK))
    made.back(region, 0, 1)
    region.buffer[:CHUNK].fill_(3)
    with pytest.raises(DoesNotFit):
        made.map(region)
    assert driver.card.used == 2 * CHUNK + GRAIN and (region.buffer[:CHUNK] == 3).all()


def test_what_stays_behind_is_told_and_closing_gives_all_back():
    made, driver = device()
    region = made.reserve(Extent(0, CHUNK + 1))
    assert made.residual_bytes() == 7
    made.map(region)
    assert made.residual_bytes() == 7 + CHUNK + GRAIN
    made.unmap(region)
    assert made.residual_bytes() == 7
    made.map(region)
    made.close()
    assert driver.card.used == 0 and not driver.reserved


def test_the_gpu_s_own_books_are_asked_first(monkeypatch):
    assert Gauge("GPU-of-nobody").held() is None and Gauge("of-nobody").used() == 0
    mine, other = SimpleNamespace(pid=os.getpid(), usedGpuMemory=70), SimpleNamespace(pid=1, usedGpuMemory=5)
    running = [other, mine]
    books = SimpleNamespace(
        NVMLError=OSError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda name: name,
        nvmlDeviceGetComputeRunningProcesses=lambda handle: running if handle == "GPU-abc" else [],
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=99),
    )
    monkeypatch.setitem(sys.modules, "pynvml", books)
    gauge = Gauge("abc")
    assert gauge.held() == 70 and gauge.used() == 99
    made = CudaDevice(SIZE, HostVmm(Card(SIZE)), LateMover(), kind=cuda_tensor.CPU, gauge=gauge, context=7, chunk=CHUNK)
    assert made.residual_bytes() == 70
    running.remove(mine)
    assert gauge.held() is None and made.residual_bytes() == 7, "what it knows of itself"


# Registered host memory


def test_every_mapping_is_registered_once_and_read_only_ones_stay_so(memfd, ending):
    fd = memfd(SIZE)
    arena = Arena(fd, SIZE)
    slab = arena.alloc("base", SIZE, -1)
    assert slab.size == SIZE
    driver = HostVmm(Card(SIZE))
    pins = Pins(driver)
    mappings = [pages.map_shared(fd, SIZE), pages.map_shared(fd, SIZE, readonly=True)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about the read-only one
        addresses = [torch.frombuffer(mapping, dtype=torch.uint8).data_ptr() for mapping in mappings]
    for address in addresses:
        pins.register(address, SIZE)
    assert driver.pinned == dict.fromkeys(addresses, SIZE) and pins.bytes == 2 * SIZE
    assert [writable(address) for address in addresses] == [True, False]
    assert ending(lambda: ctypes.memset(addresses[1], 1, 1)) == signal.SIGSEGV
    with pytest.raises(BadInput, match="already"):
        pins.register(addresses[0], SIZE)
    pins.unregister(addresses[0])
    pins.unregister(addresses[0])
    assert driver.pinned == {addresses[1]: SIZE} and pins.bytes == SIZE
    driver.fail = {"pin": 0}
    with pytest.raises(CudaFailed):
        pins.register(addresses[0], SIZE)
    assert pins.bytes == SIZE
    arena.close()


def test_nothing_is_registered_where_nothing_is_mapped():
    with pytest.raises(BadInput, match="nothing is mapped"):
        Pins(HostVmm(Card(SIZE))).register(16, 4096)


# The driver's interface


def test_calls_have_the_parameters_of_cuda_h():
    """scripts/cuda_abi.py holds the C side against a real cuda.h; this holds ctypes against the C side."""
    kinds = {
        "unsigned int": ctypes.c_uint,
        "int": ctypes.c_int,
        "CUresult": ctypes.c_int,
        "CUdevice": ctypes.c_int,
        "CUmemAllocationGranularity_flags": ctypes.c_int,
        "size_t": ctypes.c_size_t,
        "unsigned long long": ctypes.c_ulonglong,
        "CUdeviceptr": ctypes.c_ulonglong,
        "CUmemGenericAllocationHandle": ctypes.c_ulonglong,
        "CUcontext": ctypes.c_void_p,
        "void *": ctypes.c_void_p,
        "const char *": ctypes.c_char_p,
        **cuda_driver.STRUCTURES,
    }
    assert C_PROTOTYPES.keys() == cuda_driver.PROTOTYPES.keys()
    for name, text in C_PROTOTYPES.items():
        wanted = []
        for parameter in text.split(", "):
            if parameter in kinds:
                wanted.append(kinds[parameter])
                continue
            pointed = re.fullmatch(r"(?:const (?!char))?(.*?) ?\*", parameter).group(1)
            wanted.append(ctypes.POINTER(kinds[pointed]))
        assert list(cuda_driver.PROTOTYPES[name]) == wanted, name


def test_structures_have_the_sizes_of_cuda_h():
    sizes = {name: ctypes.sizeof(structure) for name, structure in cuda_driver.STRUCTURES.items()}
    assert sizes == {"CUmemLocation": 8, "CUmemAllocationProp": 32, "CUmemAccessDesc": 12}


def test_the_recording_driver_has_every_call_of_the_real_one():
    verbs = {name for name in vars(cuda_driver.Driver) if not name.startswith("_")}
    for kind in (LibCuda, HostVmm):
        assert verbs <= set(vars(kind)), kind


def test_a_machine_without_gpu_is_told_so(monkeypatch):
    monkeypatch.setattr(cuda_driver, "LIBRARY", "libcuda-that-nobody-has.so.1")
    with pytest.raises(Unavailable, match="libcuda-that-nobody-has"):
        LibCuda(0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(Unavailable, match="no GPU"):
        cuda_device(0, 1)


def test_a_failing_call_is_named_with_its_figures_and_the_driver_s_words():
    driver = object.__new__(LibCuda)
    driver.index = 3
    said = ctypes.c_char_p(b"said")

    def words(code, place):
        place._obj.value = said.value
        return 0

    codes = iter((0, 2, 999))
    driver._calls = {"cuGetErrorName": words, "cuGetErrorString": words, "cuMemUnmap": lambda *_: next(codes)}
    driver.unmap(4096, 8192)
    with pytest.raises(DoesNotFit, match=r"cuMemUnmap\(4096, 8192\) failed on GPU 3: said: said"):
        driver.unmap(4096, 8192)
    with pytest.raises(CudaFailed) as caught:
        driver.unmap(4096, 8192)
    assert isinstance(caught.value, PlexrlError)
