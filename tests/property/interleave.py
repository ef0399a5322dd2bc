"""Several ranks on one GPU, as threads of which one runs: who goes on is drawn, and a judge looks in between."""

import itertools
import os
import struct
import threading
from collections.abc import Callable

import torch

from plexrl.memory.gate import GATE_BYTES, Gate, Held, Seat
from plexrl.memory.transfer import Memcpy


class Killed(BaseException):
    """The process of this rank has ended: nothing of it runs any more."""


class LinkDown(Exception):
    """An injected failure of a copy."""


class Judge:
    """Reads the gate's file by itself, and writes noise wherever nobody holds a byte."""

    def __init__(self, fd: int, device: torch.Tensor, generator: torch.Generator) -> None:
        self.fd = fd
        self.device = device
        self.generator = generator
        self.steps = 0

    def held(self) -> dict[int, tuple[int, int]]:
        """Seat -> the bytes that it holds."""
        raw = os.pread(self.fd, GATE_BYTES, 0)
        state, _, _, low, high, _ = (struct.unpack_from("64q", raw, 64 + i * 512) for i in range(6))
        return {i: (low[i], high[i]) for i in range(64) if state[i] and low[i] < high[i]}

    def look(self) -> None:
        """No byte has two holders, none lies outside the device, and what nobody holds is overwritten."""
        self.steps += 1
        at = 0
        for low, high in sorted(self.held().values()):
            assert at <= low, "two seats hold one byte"
            self.device[at:low].random_(generator=self.generator)
            at = high
        assert at <= self.device.numel(), "more is held than the device has"
        self.device[at:].random_(generator=self.generator)


class Rank:
    """A thread, its seat, and the step after which it is killed (None: never)."""

    def __init__(self, stage: "Stage", index: int, work: Callable[["Rank"], None], dies_after: int | None) -> None:
        self.index = index
        self.dead = False
        self.blocked = False
        self.ended = False
        self.error: BaseException | None = None
        self._stage = stage
        self._left = dies_after
        self._go = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self._thread.start()

    def pause(self, blocked: bool = False) -> None:
        """Let another one run. Raises Killed when this one's end has come."""
        if not self.dead:
            self.blocked = blocked
            self._stage.turn.release()
            self._go.acquire()
            if self._left is not None:
                self._left -= 1
                self.dead = self._left < 0
        if self.dead:
            raise Killed

    def resume(self) -> None:
        """Run until it pauses or ends."""
        self._go.release()
        self._stage.turn.acquire()
        if self.ended:
            self._thread.join()

    def _run(self, work: Callable[["Rank"], None]) -> None:
        self._go.acquire()
        try:
            work(self)
        except Killed:
            pass
        except BaseException as error:
            self.error = error
        self.ended = True
        self._stage.turn.release()


class Stage:
    """All ranks of a GPU. order: who goes on at each step, over and over."""

    def __init__(self, judge: Judge, gate: Gate, order: list[int]) -> None:
        self.turn = threading.Semaphore(0)
        self._judge = judge
        self._gate = gate
        self._order = itertools.cycle(order or [0])

    def play(self, works: list[tuple[Callable[[Rank], None], int | None]]) -> None:
        """Run all to their ends. Raises what one of them raised; AssertionError when all wait for each other."""
        ranks = [Rank(self, i, work, dies_after) for i, (work, dies_after) in enumerate(works)]
        stuck = 0
        try:
            while live := [rank for rank in ranks if not rank.ended]:
                rank = live[(stuck or next(self._order)) % len(live)]
                rank.resume()
                if rank.dead and rank.ended:
                    self._gate.clear(rank.index)
                if rank.error is not None:
                    raise rank.error
                self._judge.look()
                # Who was tried in vain lets the next one try.
                stuck = stuck + 1 if rank.blocked and not rank.ended else 0
                if stuck > 5 * len(live):
                    raise AssertionError("all wait for each other")
        finally:
            for rank in ranks:
                rank.dead = True
                while not rank.ended:
                    rank.resume()


class SteppedSeat(Seat):
    """A seat whose verbs are steps, and whose waiting is done by letting others run."""

    rank: Rank

    def wait(self, start: int, end: int) -> float:
        """As Seat."""
        self.patience = 0.0
        self.rank.pause()
        while True:
            try:
                return super().wait(start, end)
            except Held:
                self.rank.pause(blocked=True)

    def release(self, upto: int) -> None:
        """As Seat."""
        self.rank.pause()
        super().release(upto)

    def fail(self) -> None:
        """As Seat; the dead say nothing."""
        if not self.rank.dead:
            super().fail()


class SteppedMover(Memcpy):
    """A copy is two steps of half a chunk each. It checks that the seat holds the device's bytes at both of them."""

    def __init__(self, rank: Rank, judge: Judge) -> None:
        self._rank = rank
        self._judge = judge
        self._start = judge.device.data_ptr()
        self._good, self._bad = 0, 0

    def arm(self, good: int, bad: int) -> None:
        """After `good` more copies `bad` ones raise, half done."""
        self._good, self._bad = good, bad

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """As Mover."""
        self._check(target, source)
        half = target.numel() // 2
        super().copy(target[:half], source[:half])
        self._rank.pause()
        if self._good == 0 and self._bad:
            self._bad -= 1
            raise LinkDown
        self._good = max(self._good - 1, 0)
        self._check(target, source)
        super().copy(target[half:], source[half:])

    def _check(self, *tensors: torch.Tensor) -> None:
        low, high = self._judge.held()[self._rank.index]
        on_device = [
            at for at in (tensor.data_ptr() - self._start for tensor in tensors) if 0 <= at < self._judge.device.numel()
        ]
        (at,) = on_device
        assert low <= at and at + tensors[0].numel() <= high, "bytes are touched that the seat does not hold"
