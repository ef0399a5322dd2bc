"""Two real processes hand one device's bytes to each other, and one of them is killed in the middle."""

import contextlib
import os
import signal

import pytest

from plexrl.memory.arena import Arena
from plexrl.memory.device import create_memfd
from plexrl.memory.gate import GATE_BYTES, Gate
from plexrl.memory.pages import PAGE, align_up
from tests.unit.memory.exchanging import CHUNK, MANIFEST, serve

SIZE = align_up(MANIFEST.size, PAGE)
CHUNKS = -(-MANIFEST.size // CHUNK)


class Peer:
    """One rank, forked because its imports would take longer than the test."""

    def __init__(self, settings: dict) -> None:
        (orders, mine), (its, answers) = os.pipe(), os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(mine)
            os.close(its)
            try:
                serve(settings, open(orders), open(answers, "w"))
            finally:
                os._exit(0)
        os.close(orders)
        os.close(answers)
        self._orders, self._answers = open(mine, "w"), open(its)

    def tell(self, *words: object) -> None:
        self._orders.write(" ".join(map(str, words)) + "\n")
        self._orders.flush()

    def answer(self) -> str:
        """One line; empty when the process is gone."""
        return self._answers.readline().strip()

    def ask(self, *words: object) -> str:
        self.tell(*words)
        return self.answer()

    def close(self) -> int:
        """End it; its exit status, negative for the signal that had ended it already."""
        pid, self.pid = self.pid, 0
        if not pid:
            return 0
        with contextlib.suppress(BrokenPipeError):
            self._orders.close()
        self._answers.close()
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class Node:
    """A device, a gate and an arena as an agent has them, and ranks over them."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self.fds = {}
        for name, size in (("device", SIZE), ("gate", GATE_BYTES), ("arena", 4 * SIZE)):
            self.fds[name] = create_memfd(name, size)
            stack.callback(os.close, self.fds[name])
        self.arena = Arena(self.fds["arena"], 4 * SIZE)
        stack.callback(self.arena.close)
        self.gate = Gate(self.fds["gate"])
        stack.callback(self.gate.close)
        self.count = 0

    def rank(self, seat: int) -> Peer:
        self.count += 1
        slab = self.arena.alloc(f"rank {self.count}", MANIFEST.size, 0).offset
        settings = {**self.fds, "device_bytes": SIZE, "arena_bytes": 4 * SIZE, "seat": seat, "slab": slab}
        peer = Peer(settings)
        self._stack.callback(peer.close)
        assert peer.answer() == "ready"
        return peer


@pytest.fixture
def node():
    with contextlib.ExitStack() as stack:
        yield Node(stack)


@pytest.fixture
def pair(node):
    """Two ranks with contents of their own; the first is on the device."""
    one, other = node.rank(0), node.rank(1)
    for seed, rank in enumerate((other, one)):
        assert rank.ask("come") == "came"
        assert rank.ask("write", seed) == "written"
        if rank is other:
            assert rank.ask("leave") == "left"
    return one, other


def test_states_change_places_bit_for_bit(pair):
    one, other = pair
    for _ in range(20):
        one.tell("leave")
        other.tell("come")
        assert (one.answer(), other.answer()) == ("left", "came")
        assert other.ask("check") == "right" and one.ask("check") == "right"
        one, other = other, one


@pytest.mark.parametrize("after", [0, 1, CHUNKS // 2, CHUNKS - 1])
def test_who_leaves_is_killed_and_who_comes_goes_on_when_its_seat_is_cleared(node, pair, after):
    one, other = pair
    one.tell("die", after)
    assert one.ask("leave") == "" and one.close() == -signal.SIGKILL
    dead = next(holding for holding in node.gate.holders() if holding.owner == "rank 0")
    assert dead.high == MANIFEST.size and dead.low <= after * CHUNK
    other.tell("come")
    node.gate.clear(dead.seat)
    assert other.answer() == "came" and other.ask("check") == "right"
    # A new life of the gang takes the seat and the bytes after it.
    again = node.rank(0)
    other.tell("leave")
    assert again.ask("come") == "came" and other.answer() == "left"
    assert again.ask("write", 7) == "written" and again.ask("leave") == "left"
    assert other.ask("come") == "came" and other.ask("check") == "right"


@pytest.mark.parametrize("after", [0, 1, CHUNKS // 2, CHUNKS - 1])
def test_who_comes_is_killed_and_who_left_has_all_it_had(node, pair, after):
    one, other = pair
    other.tell("die", after)
    other.tell("come")
    assert one.ask("leave") == "left" and other.answer() == ""
    assert other.close() == -signal.SIGKILL
    one.tell("come")
    node.gate.clear(1)
    assert one.answer() == "came" and one.ask("check") == "right"


def test_an_offload_that_fails_half_way_is_taken_back_from_the_newcomer(pair):
    one, other = pair
    other.tell("come")
    one.tell("fail", CHUNKS // 2)
    one.tell("leave")
    assert other.answer() == "undone Withdrawn" and one.answer() == "undone LinkDown"
    assert one.ask("check") == "right" and other.ask("check") == "right"
    one.tell("leave")
    assert other.ask("come") == "came" and one.answer() == "left"
    assert one.ask("check") == "right" and other.ask("check") == "right"
