"""Seats whose bytes have memory: two processes exchange more than the card could hold of both."""

import os
import signal
import traceback

import pytest
import torch

from plexrl.memory import cuda_tensor
from plexrl.memory.cuda import CudaDevice
from plexrl.memory.cuda_lanes import Pipeline
from plexrl.memory.cuda_seat import BackedSeat
from plexrl.memory.gate import GATE_BYTES, Gate, SeatState
from plexrl.types import DoesNotFit, Extent
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
    return BackedSeat(gate.seat(index, f"gang {index}", extent), device, region), device, region.buffer


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


def test_leaving_waits_for_the_gpu_first(gate, ending):
    seat, device, buffer = seated(gate, 0, Card(SIZE), Extent(0, SIZE))
    take(seat, buffer, 1)
    host = torch.full((SIZE,), 2, dtype=torch.uint8)
    late = device._mover.copy(buffer, host)
    assert (buffer == 1).all() and not late.query()
    seat.leave()
    assert (buffer == 2).all() and device._mover.rests == 1
    device._mover.copy(host, buffer)
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


def test_a_pipeline_tells_in_order_and_only_what_is_done():
    mover, pipeline = LateMover(), Pipeline(depth=2)
    source, target = torch.arange(5, dtype=torch.uint8), torch.zeros(5, dtype=torch.uint8)
    told = []
    for i in range(5):
        told += pipeline.push(mover.copy(target[i : i + 1], source[i : i + 1]), i)
        assert len(mover.under_way) <= 2 and torch.equal(target[: len(told)], source[: len(told)])
    assert told == [0, 1, 2]
    assert told + pipeline.drain() == [0, 1, 2, 3, 4] and torch.equal(target, source)
