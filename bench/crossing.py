"""`python -m bench.crossing [--json]`: two ways for two processes to hand a device's bytes to each other, on CPUs.

gate: both map the device once and pass chunks by a hand-shake in shared memory. owner: a third process owns the memory
and hands out each chunk as a descriptor, which the receiver maps, and unmaps when it leaves. alone: the same copies in
two processes at once, with nothing handed over, as reference. Same bytes, same chunks. Says nothing about GPUs.
"""

import argparse
import ctypes
import json
import mmap
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from typing import Protocol

from plexrl.memory import pages
from plexrl.memory.gate import GATE_BYTES, Gate, Seat
from plexrl.memory.transfer import CHUNK, ENVIRON
from plexrl.types import Extent

SIZE = 512 << 20
REPEATS = 10
WAYS = ("alone", "gate", "owner")
Say = Callable[[str], None]

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_TIMEOUT_S = 100.0
_MAP_FIXED, _MAP_POPULATE = 0x10, 0x8000


class Way(Protocol):
    """How one of the two processes gets at a chunk of the device, and gives it up."""

    def begin(self, comes: bool) -> None:
        """Before the first chunk."""

    def get(self, start: int) -> None:
        """Returns when the chunk at `start` is mine and mapped."""

    def give(self, start: int) -> None:
        """It is not mine any more."""

    def end(self, comes: bool) -> None:
        """After the last chunk."""


class Alone:
    """Mapped once, and nobody is asked."""

    def __init__(self, me: int, device: int, size: int, more: object) -> None:
        self._mapping = pages.map_shared(device, size)
        pages.populate(self._mapping, 0, size)
        self.address = pages.address(self._mapping)

    def begin(self, comes: bool) -> None:
        """See Way."""

    def get(self, start: int) -> None:
        """See Way."""

    def give(self, start: int) -> None:
        """See Way."""

    def end(self, comes: bool) -> None:
        """See Way."""


class AtGate(Alone):
    """Mapped once; `more` is the gate's descriptor."""

    def __init__(self, me: int, device: int, size: int, more: int) -> None:
        super().__init__(me, device, size, more)
        self._seat: Seat = Gate(more).seat(me, str(me), Extent(0, size))
        if me == 0:
            self._seat.come()
            self._seat.held()

    def begin(self, comes: bool) -> None:
        """See Way."""
        self._seat.come() if comes else self._seat.leave()

    def get(self, start: int) -> None:
        """See Way."""
        self._seat.wait(start, start + CHUNK)

    def give(self, start: int) -> None:
        """See Way."""
        self._seat.release(start + CHUNK)

    def end(self, comes: bool) -> None:
        """See Way."""
        self._seat.held() if comes else self._seat.gone()


class FromOwner:
    """Addresses are reserved once, chunks are mapped there as they come; `more` is the socket to the owner."""

    def __init__(self, me: int, device: int, size: int, more: socket.socket) -> None:
        self._owner = more
        self.address = _libc.mmap(None, size, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        if me == 0:
            for start in range(0, size, CHUNK):
                self.get(start)

    def begin(self, comes: bool) -> None:
        """See Way."""

    def get(self, start: int) -> None:
        """See Way."""
        _, (fd,), _, _ = socket.recv_fds(self._owner, 1, 1)
        flags = mmap.MAP_SHARED | _MAP_FIXED | _MAP_POPULATE
        _libc.mmap(self.address + start, CHUNK, pages.PROT_READ_WRITE, flags, fd, 0)
        os.close(fd)

    def give(self, start: int) -> None:
        """See Way."""
        _libc.munmap(self.address + start, CHUNK)
        self._owner.send(b"g")

    def end(self, comes: bool) -> None:
        """See Way."""


def own(size: int, ends: list[socket.socket], rounds: int) -> None:
    """The owner: a memfd per chunk, all first the process 0's; then each goes to the other one when it is given up."""
    chunks = [pages.create_memfd("chunk", CHUNK) for _ in range(0, size, CHUNK)]
    for fd in chunks:
        pages.populate(pages.map_shared(fd, CHUNK), 0, CHUNK)
        socket.send_fds(ends[0], [b"c"], [fd])
    for count in range(rounds):
        for fd in chunks:
            if ends[count % 2].recv(1):
                socket.send_fds(ends[1 - count % 2], [b"c"], [fd])


def rank(me: int, way: Way, size: int, rounds: int, orders: socket.socket) -> None:
    """Leave and come by turns; tells [begun, ended, CPU seconds] of each round."""
    slab = pages.map_shared(pages.create_memfd("slab", size), size)
    pages.populate(slab, 0, size)
    home, device = pages.address(slab), way.address
    orders.send(b"r")
    for count in range(rounds):
        orders.recv(1)
        comes = count % 2 != me
        begun, cpu = time.monotonic(), time.process_time()
        way.begin(comes)
        for start in range(0, size, CHUNK):
            if comes:
                way.get(start)
                ctypes.memmove(device + start, home + start, CHUNK)
            else:
                ctypes.memmove(home + start, device + start, CHUNK)
                way.give(start)
        way.end(comes)
        orders.send(json.dumps([begun, time.monotonic(), time.process_time() - cpu]).encode())


def measure_way(name: str, size: int, repeats: int) -> dict:
    """One way's exchange: the best wall seconds and the median CPU seconds of both processes together.

    size: bytes, a multiple of CHUNK.
    """
    device, gate = pages.create_memfd("device", size), pages.create_memfd("gate", GATE_BYTES)
    pairs, handed = [socket.socketpair() for _ in range(2)], [socket.socketpair() for _ in range(2)]
    makes = {
        "alone": lambda me: Alone(me, device, size, None),
        "gate": lambda me: AtGate(me, device, size, gate),
        "owner": lambda me: FromOwner(me, device, size, handed[me][1]),
    }
    children = [_fork(rank, me, makes[name], size, repeats, pairs[me][1]) for me in range(2)]
    if name == "owner":
        children.append(_fork(lambda: own(size, [end for end, _ in handed], repeats)))
    orders = [end for end, _ in pairs]
    for end in orders:
        end.settimeout(_TIMEOUT_S)
    seconds, cpu = [], []
    try:
        for end in orders:
            end.recv(1)
        for _ in range(repeats):
            for end in orders:
                end.send(b"g")
            times = [json.loads(end.recv(256)) for end in orders]
            seconds.append(max(t[1] for t in times) - min(t[0] for t in times))
            cpu.append(sum(t[2] for t in times))
    finally:
        for end in (end for both in (*pairs, *handed) for end in both):
            end.close()
        for child in children:
            os.waitpid(child, 0)
        os.close(device)
        os.close(gate)
    return {"way": name, "seconds": round(min(seconds), 4), "cpu_seconds": round(statistics.median(cpu), 4)}


def measure(size: int, repeats: int, say: Say) -> dict:
    """All ways. shares: seconds of the reference by seconds of the way (1 is as fast)."""
    rows = []
    for name in WAYS:
        rows.append(measure_way(name, size, repeats))
        say(f"{name}: {rows[-1]['seconds']} s")
    share = {row["way"]: round(rows[0]["seconds"] / row["seconds"], 3) for row in rows}
    cpu = {row["way"]: round(rows[0]["cpu_seconds"] / row["cpu_seconds"], 3) for row in rows}
    return {"bytes_each_way": size, "chunk": CHUNK, "rows": rows, "share": share, "cpu_share": cpu}


def _fork(work: Callable[..., None], me: int = 0, make: Callable[[int], Way] | None = None, *more: object) -> int:
    child = os.fork()
    if child == 0:
        try:
            work(me, make(me), *more) if make else work()
        except OSError:
            pass  # the parent has gone
        finally:
            os._exit(0)
    return child


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.crossing", description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    args = parser.parse_args(argv)
    figures = measure(SIZE, REPEATS, lambda line: print(f"bench.crossing: {line}", file=sys.stderr))
    if args.json:
        print(json.dumps(figures))
        return 0
    print(f"{SIZE:,} bytes each way at once, in chunks of {CHUNK:,}, between two processes")
    for row in figures["rows"]:
        print(
            f"  {row['way']:<6} {row['seconds']:7.3f} s, {figures['share'][row['way']]:.2f} of the reference's speed; "
            f"{row['cpu_seconds']:.3f} CPU s"
        )
    return 0


if __name__ == "__main__":
    if any(os.environ.get(name) != value for name, value in ENVIRON.items()):
        os.execve(sys.executable, [sys.executable, "-m", "bench.crossing", *sys.argv[1:]], os.environ | ENVIRON)
    sys.exit(main())
