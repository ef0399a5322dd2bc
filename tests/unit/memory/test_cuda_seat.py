"""Seats whose bytes have memory: two processes exchange more than the card could hold of both."""

import os
import signal
import traceback

import pytest
import torch

from plexrl.memory import cuda_tensor
from plexrl.memory.cuda import CudaDevice
from plexrl.memory.cuda_lanes import NOWHERE
from plexrl.memory.cuda_seat import BackedSeat
from plexrl.memory.gate import GATE_BYTES, Gate, SeatState, Withdrawn
from plexrl.memory.manifest import Manifest, TensorSpec
from plexrl.memory.resident import DIRTY, ResidentState
from plexrl.types import BadInput, DoesNotFit, Extent, Residency
from tests.unit.memory.hostvmm import GRAIN, Card, HostVmm, LateMover

CHUNK = 2 * GRAIN
SIZE = 16 * CHUNK
STEP = 3 * GRAIN  # what moves at once need not be a chunk of memory


@pytest.fixture
def gate(memfd):
    return Gate(memfd(GATE_BYTES))


def seated(gate: Gate, index: int, card: Card, extent: Extent) -> tuple[BackedSeat, CudaDevice, torch.Tensor]:
    device = CudaDevice(SIZE, HostVmm(card), LateMover(), kind=cuda_tensor.CPU, chunk=CHUNK)
    region = device.reserve(extent)
    return BackedSeat(gate.seat(index, f"gang {index}", extent), device), device, region.buffer


def take(seat: BackedSeat, buffer: torch.Tensor, value: int) -> None:
    seat.come()
    for start in range(0, buffer.numel(), STEP):
        end = min(start + STEP, buffer.numel())
        seat.wait(seat.extent.offset + start, seat.extent.offset + end)
        buffer[start:end] = value
    seat.held()


def let_go(seat: BackedSeat, buffer: torch.Tensor, value: int) -> None:
    seat.leave()
    for start in range(0, buffer.numel(), STEP):
        end = min(start + STEP, buffer.numel())
        assert (buffer[start:end] == value).all()
        seat.release(seat.extent.offset + end)
    seat.gone()


def child(function) -> int:
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)  # it outlives no test, whatever it waits for
        torch.set_num_threads(1)  # the parent's threads are not here
        try:
            function()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return pid


@pytest.mark.parametrize(
    "extents", [(Extent(0, SIZE), Extent(0, SIZE)), (Extent(64, SIZE - 64), Extent(0, SIZE - 128))]
)
def test_an_exchange_takes_one_chunk_for_each_side_beside_the_budget(gate, extents):
    card = Card(SIZE + 2 * CHUNK)

    def rank(index: int) -> None:
        seat, device, buffer = seated(gate, index, card, extents[index])
        for turn in range(3):
            take(seat, buffer, 10 * index + turn)
            let_go(seat, buffer, 10 * index + turn)
        device.close()

    pids = [child(lambda i=i: rank(i)) for i in range(2)]
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0, 0]
    assert card.used == 0 and not gate.holders()
    assert card.peak >= extents[0].size, "it was full"


def test_memory_comes_after_the_grant_and_goes_before_the_word(gate):
    card = Card(2 * SIZE)
    seat, _, buffer = seated(gate, 5, card, Extent(128, SIZE - 128))
    assert (seat.index, seat.owner, seat.state) == (5, "gang 5", SeatState.FREE)
    seat.patience = 0.5
    take(seat, buffer, 9)
    assert seat.patience == 0.5 and seat.state is SeatState.HELD and card.used == SIZE
    seat.leave()
    seat.release(128 + CHUNK - 1)
    assert card.used == SIZE, "a chunk is held as long as one byte of it is"
    seat.release(128 + CHUNK)
    assert card.used == SIZE - CHUNK
    # Taking a leave back gives memory again; what was let go of is to be copied anew.
    seat.wait(128, 128 + CHUNK)
    assert card.used == SIZE and gate.holders()[0].low == 128
    buffer[:CHUNK] = 9
    seat.fail()
    assert seat.state is SeatState.FAILED and card.used == SIZE
    seat.held()
    let_go(seat, buffer, 9)
    assert card.used == 0


def test_mapping_a_gated_region_takes_no_memory_before_the_gate_grants_it(gate):
    card = Card(SIZE)
    seat, device, buffer = seated(gate, 0, card, Extent(64, SIZE - 64))
    region = device.region(seat.extent)
    seat.come()
    device.map(region)
    assert card.used == 0 and not region.mapped
    seat.held()
    assert region.mapped and card.used == SIZE
    with pytest.raises(BadInput, match="no region at 0"):
        device.region(Extent(0, 64))


def test_only_memory_that_is_new_is_called_fresh(gate):
    seat, device, buffer = seated(gate, 0, Card(SIZE), Extent(64, SIZE - 64))
    base, mover = buffer.data_ptr(), device.mover

    def after(start: int, end: int) -> tuple[int, int]:
        mover.fresh = NOWHERE
        seat.wait(64 + start, 64 + end)
        return mover.fresh

    seat.come()
    assert after(0, STEP) == (base, base + STEP)
    assert after(0, STEP) == NOWHERE, "its first copy may still be read"
    assert after(STEP - 64, 2 * STEP) == NOWHERE, "a part of it was there"
    assert after(3 * STEP, 4 * STEP) == (base + 3 * STEP, base + 4 * STEP)
    seat.held()
    assert after(4 * STEP, 5 * STEP) == NOWHERE
    seat.leave()
    seat.release(64 + 2 * STEP)
    assert after(0, STEP) == NOWHERE, "it was used before it was let go of"
    seat.gone()
    seat.come()
    assert after(0, STEP) == (base, base + STEP)


def test_leaving_waits_for_the_gpu_first(gate, ending):
    seat, device, buffer = seated(gate, 0, Card(SIZE), Extent(0, SIZE))
    take(seat, buffer, 1)
    host = torch.full((SIZE,), 2, dtype=torch.uint8)
    late = device.mover.copy(buffer, host)
    assert (buffer == 1).all() and late in device.mover.under_way
    seat.leave()
    assert (buffer == 2).all() and device.mover.rests == 1
    device.mover.copy(host, buffer)
    seat.gone()
    assert ending(lambda: buffer.sum()) == signal.SIGSEGV, "the copy was done before the memory went"


def test_a_card_that_is_fuller_than_the_gate_knows_is_an_error_that_can_be_undone(gate):
    card = Card(SIZE)
    card.take(3 * CHUNK)
    seat, _, buffer = seated(gate, 0, card, Extent(0, SIZE))
    with pytest.raises(DoesNotFit):
        take(seat, buffer, 1)
    seat.gone()
    assert card.used == 3 * CHUNK and not gate.holders()


SPECS = {name: [TensorSpec("t", (SIZE // 16 - 8,), "float32")] for name in ("frozen", "weights", "moment1", "moment2")}


def resident(gate: Gate, index: int, card: Card) -> tuple[BackedSeat, CudaDevice, ResidentState, torch.Tensor]:
    seat, device, buffer = seated(gate, index, card, Extent(0, SIZE))
    manifest = Manifest.build(SPECS)
    base = torch.full((manifest.buckets[0].size,), 77, dtype=torch.uint8)
    slab = torch.zeros(manifest.without("frozen").size + 64, dtype=torch.uint8)
    slab = slab[-slab.data_ptr() % 64 :]
    state = ResidentState(manifest, buffer, slab, {"frozen": base}, mover=device.mover, chunk=STEP)
    return seat, device, state, buffer[: manifest.end]


def write(state: ResidentState, buffer: torch.Tensor, seed: int) -> torch.Tensor:
    """Noise in every bucket of its own; returns all bytes."""
    start = state.manifest.buckets[1].offset
    torch.manual_seed(seed)
    buffer[start:] = torch.randint(0, 256, (buffer.numel() - start,), dtype=torch.uint8)
    for name in ("weights", "moment1", "moment2"):
        state.mark(name, DIRTY)
    return buffer.clone()


def enter(seat: BackedSeat, state: ResidentState) -> None:
    seat.come()
    state.load(seat=seat)
    seat.held()


def exit_(seat: BackedSeat, state: ResidentState) -> None:
    seat.leave()
    state.offload(seat)
    seat.gone()


def test_states_of_two_processes_cross_bit_for_bit(gate):
    card = Card(SIZE + 2 * CHUNK)

    def rank(index: int) -> None:
        seat, device, state, buffer = resident(gate, index, card)
        kept = None
        for turn in range(3):
            enter(seat, state)
            assert kept is None or torch.equal(buffer, kept)
            assert (buffer[: state.manifest.buckets[0].size] == 77).all()
            kept = write(state, buffer, 10 * index + turn)
            exit_(seat, state)
        device.close()

    pids = [child(lambda i=i: rank(i)) for i in range(2)]
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0, 0]
    assert card.used == 0 and not gate.holders()


def test_a_load_that_finds_the_gpu_full_is_undone_and_done_again(gate):
    card = Card(SIZE)
    seat, device, state, buffer = resident(gate, 0, card)
    enter(seat, state)
    kept = write(state, buffer, 1)
    exit_(seat, state)
    card.take(4 * CHUNK)
    with pytest.raises(DoesNotFit):
        enter(seat, state)
    state.undo(seat)
    seat.gone()
    assert state.residency is Residency.HOST and card.used == 4 * CHUNK
    card.give(4 * CHUNK)
    enter(seat, state)
    assert torch.equal(buffer, kept)


@pytest.mark.parametrize("after", [0, 1, 7])
def test_an_offload_that_fails_is_undone_bit_for_bit(gate, after):
    card = Card(SIZE)
    seat, device, state, buffer = resident(gate, 0, card)
    enter(seat, state)
    kept = write(state, buffer, 1)
    other, _, _, _ = resident(gate, 1, card)
    copy, left = device.mover.copy, iter([True] * after)

    def failing(target, source):
        if not next(left, False):
            raise RuntimeError("the link is down")
        return copy(target, source)

    device.mover.copy = failing
    with pytest.raises(RuntimeError, match="link"):
        exit_(seat, state)
    device.mover.copy = copy
    other.come()
    with pytest.raises(Withdrawn):
        other.wait(0, SIZE)
    state.undo(seat)
    seat.held()
    assert state.residency is Residency.DEVICE and torch.equal(buffer, kept) and card.used == SIZE
