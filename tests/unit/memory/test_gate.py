"""The gate: no byte of a device has two holders, whoever waits gets it or is told why not."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from plexrl.memory.gate import (
    COMING,
    FAILED,
    FREE,
    GATE_BYTES,
    HELD,
    LEAVING,
    SEATS,
    Gate,
    Held,
    Seat,
    Withdrawn,
)
from plexrl.memory.pages import create_memfd
from plexrl.types import BadInput, Extent, PlexrlError

EXTENT = Extent(64, 1000)


@pytest.fixture
def fd():
    fd = create_memfd("gate", GATE_BYTES)
    yield fd
    os.close(fd)


@pytest.fixture
def gate(fd):
    gate = Gate(fd)
    yield gate
    gate.close()


def held(seat: Seat) -> Seat:
    seat.come()
    seat.held()
    return seat


def impatient(seat: Seat) -> Seat:
    seat.patience = 0.02
    return seat


def test_a_seat_takes_its_extent_and_lets_go_of_it_in_ascending_order(gate):
    seat = gate.seat(3, "lora/0", EXTENT)
    assert gate.holders() == () and seat.state is FREE
    steps = [
        (seat.come, (), COMING, 64, 64, 64),
        (seat.wait, (64, 200), COMING, 200, 64, 200),
        (seat.wait, (100, 150), COMING, 200, 64, 200),
        (seat.held, (), HELD, 1064, 64, 1064),
        (seat.wait, (64, 1064), HELD, 1064, 64, 1064),
        (seat.leave, (), LEAVING, 64, 64, 1064),
        (seat.release, (500,), LEAVING, 500, 500, 1064),
        (seat.release, (400,), LEAVING, 500, 500, 1064),
        (seat.release, (5000,), LEAVING, 1064, 1064, 1064),
    ]
    for verb, arguments, state, edge, low, high in steps:
        verb(*arguments)
        (seen,) = gate.holders()
        assert (seen.seat, seen.owner, seen.offset, seen.end) == (3, "lora/0", 64, 1064)
        assert (seen.state, seen.edge, seen.low, seen.high) == (state, edge, low, high), verb
    seat.gone()
    assert gate.holders() == ()


def test_a_failed_leave_is_taken_back_in_descending_order(gate):
    seat = held(gate.seat(0, "a", EXTENT))
    seat.leave()
    seat.release(700)
    seat.fail()
    assert (gate.holders()[0].state, gate.holders()[0].edge) == (FAILED, 700)
    other = gate.seat(1, "b", Extent(64, 100))
    other.come()
    other.wait(64, 100)
    impatient(seat)
    seat.wait(500, 700)
    with pytest.raises(Held, match="'b' has bytes 64 to 100"):
        seat.wait(64, 100)
    assert gate.holders()[0].low == 500
    other.gone()
    seat.held()
    assert gate.holders()[0].state is HELD and gate.holders()[0].low == 64


def test_who_takes_back_what_another_has_for_good_gives_up_soon(gate, monkeypatch):
    """Whatever the patience of those who come: it is not asked of the one that failed."""
    monkeypatch.setattr("plexrl.memory.gate.FAILED_PATIENCE_S", 0.05)
    seat = held(gate.seat(0, "a", EXTENT))
    seat.patience = 600.0
    seat.leave()
    seat.release(700)
    seat.fail()
    held(gate.seat(1, "b", Extent(64, 100)))
    with pytest.raises(Held, match="not free after 0.05 s"):
        seat.held()


def test_what_another_holds_is_waited_for_and_named_in_the_error(gate):
    first = held(gate.seat(0, "first", Extent(0, 512)))
    second = impatient(gate.seat(1, "second", Extent(256, 512)))
    second.come()
    for taken in (0, 100, 256, 320):
        if taken:
            first.leave() if first.state is HELD else None
            first.release(taken)
        with pytest.raises(Held, match=f"'first' has bytes {taken} to 512"):
            second.held()
        assert second.state is COMING
    assert second.wait(256, 320) == 0.0
    with pytest.raises(Held, match="seat 0"):
        second.wait(256, 321)
    first.gone()
    second.held()
    third = impatient(gate.seat(2, "third", Extent(768, 64)))
    assert held(third).state is HELD


def test_a_release_in_another_process_wakes_who_waits(fd, gate):
    seat = held(gate.seat(0, "here", EXTENT))
    there = subprocess.Popen(
        [sys.executable, "-c", WAITING, str(fd)], pass_fds=[fd], stdout=subprocess.PIPE, stdin=subprocess.PIPE
    )
    try:
        assert there.stdout.readline() == b"coming\n"
        seat.leave()
        for upto in range(64, 1064, 100):
            seat.release(upto + 100)
            assert there.stdout.readline() == f"{upto + 100}\n".encode()
        seat.gone()
        assert there.stdout.readline() == b"held\n"
        assert gate.holders()[0].owner == "there"
        there.stdin.close()
        assert there.wait() == 0
        assert gate.holders() == ()
    finally:
        there.kill()
        there.wait()
        there.stdout.close()


WAITING = """
import os, sys
from plexrl.memory.gate import Gate
from plexrl.types import Extent
seat = Gate(int(sys.argv[1])).seat(1, "there", Extent(64, 1000))
seat.come()
print("coming", flush=True)
for end in range(164, 1065, 100):
    seat.wait(end - 100, end)
    print(end, flush=True)
seat.held()
print("held", flush=True)
sys.stdin.read()
seat.gone()
"""


def test_who_waits_for_one_that_failed_gives_up(gate):
    seat = held(gate.seat(0, "a", EXTENT))
    other = gate.seat(1, "b", EXTENT)
    other.come()
    seat.leave()
    seat.release(300)
    other.wait(64, 300)
    seat.fail()
    with pytest.raises(Withdrawn, match="'a' could not give up bytes 300 to 1064"):
        other.wait(300, 400)
    assert other.state is COMING and gate.holders()[1].high == 300
    # What is free of it may still be taken, and two that failed wait for each other's bytes instead of giving up.
    third = gate.seat(2, "c", Extent(64, 10))
    other.gone()
    assert held(third).state is HELD
    third.leave()
    third.fail()
    with pytest.raises(Held):
        impatient(seat).held()


def test_a_failure_that_was_mended_before_the_waiter_woke_is_seen(gate):
    seat = held(gate.seat(0, "a", EXTENT))
    other = gate.seat(1, "b", EXTENT)
    other.come()
    errors = []

    def wait():
        try:
            other.wait(64, 100)
        except PlexrlError as error:
            errors.append(error)

    waiting = threading.Event()
    sleep = gate._sleep
    gate._sleep = lambda *arguments: (waiting.set(), sleep(*arguments))
    thread = threading.Thread(target=wait)
    thread.start()
    waiting.wait()
    seat.leave()
    with gate.locked():  # nobody can look until it is over
        gate._words["failures"][0] += 1
        gate._words["state"][0] = 2
        gate._changed()
    thread.join()
    assert [type(error) for error in errors] == [Withdrawn] and seat.state is HELD


def test_a_dead_process_is_cleared_and_the_other_goes_on(fd, gate):
    mine = gate.seat(0, "mine", EXTENT)
    there = subprocess.Popen(
        [sys.executable, "-c", WAITING.replace("sys.stdin.read()", "os.kill(os.getpid(), 9)"), str(fd)],
        pass_fds=[fd],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    assert there.wait() == -signal.SIGKILL
    mine.come()
    assert [seen.owner for seen in gate.holders()] == ["mine", "there"]
    with pytest.raises(Held, match="'there'"):
        gate.seat(1, "there again", EXTENT)
    with pytest.raises(Held, match="'there'"):
        impatient(mine).held()
    gate.clear(1)
    mine.held()
    assert gate.seat(1, "there again", EXTENT).state is FREE


def test_the_lock_of_a_process_that_is_killed_with_it_is_free(fd, gate):
    program = (
        "import os, sys\nfrom plexrl.memory.gate import Gate\ngate = Gate(int(sys.argv[1]))\n"
        "with gate.locked():\n    os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", program, str(fd)], pass_fds=[fd]).returncode == -signal.SIGKILL
    assert held(gate.seat(0, "a", EXTENT)).state is HELD


def test_threads_with_gates_of_their_own_exclude_each_other(fd):
    gates = [Gate(fd), Gate(fd)]
    inside, most = [0], [0]

    def work(gate):
        for _ in range(300):
            with gate.locked():
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                inside[0] -= 1

    threads = [threading.Thread(target=work, args=(gate,)) for gate in gates * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]
    for gate in gates:
        gate.close()


def test_a_verb_out_of_turn_is_refused_and_changes_nothing(gate):
    seat = gate.seat(0, "a", EXTENT)
    for verb, arguments in ((seat.wait, (64, 65)), (seat.held, ()), (seat.leave, ()), (seat.release, (100,))):
        with pytest.raises(PlexrlError, match="free"):
            verb(*arguments)
    seat.fail()
    assert gate.holders() == ()
    seat.come()
    with pytest.raises(PlexrlError, match="coming"):
        seat.come()
    with pytest.raises(PlexrlError, match="coming"):
        seat.release(100)
    for start, end in ((0, 100), (64, 1065), (200, 100)):
        with pytest.raises(BadInput):
            seat.wait(start, end)
    assert gate.holders()[0].high == 64


def test_a_partial_comer_leaves_only_what_it_took(gate):
    seat = gate.seat(0, "a", EXTENT)
    seat.come()
    seat.wait(64, 300)
    seat.leave()
    assert (gate.holders()[0].low, gate.holders()[0].high) == (64, 300)
    assert held(gate.seat(1, "b", Extent(300, 100))).state is HELD


def test_of_two_partial_seats_that_take_a_leave_back_none_waits_for_the_other(gate):
    first, second = gate.seat(0, "first", Extent(0, 100)), gate.seat(1, "second", Extent(0, 100))
    held(first).leave()
    first.release(50)
    second.come()
    second.wait(0, 50)
    second.leave()
    second.release(30)
    first.fail()
    second.fail()
    second.held()
    assert second.state is COMING and (gate.holders()[1].low, gate.holders()[1].high) == (0, 50)
    second.gone()
    first.held()
    assert first.state is HELD


def test_files_seats_and_extents_are_checked(gate):
    small = create_memfd("small", 4096)
    with pytest.raises(BadInput, match="4096"):
        Gate(small)
    os.close(small)
    for index, extent in ((SEATS, EXTENT), (-1, EXTENT), (0, Extent(None, 10)), (0, Extent(0, 0))):
        with pytest.raises(BadInput):
            gate.seat(index, "a", extent)
    seat = gate.seat(SEATS - 1, "größer als sechzig Bytes " * 4, EXTENT)
    seat.come()
    assert gate.holders()[0].owner.startswith("größer als") and len(gate.holders()[0].owner.encode()) < 64
