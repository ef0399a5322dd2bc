"""Virtual memory management on host memory, with the verbs of a CUDA driver: what is not mapped cannot be touched."""

import contextlib
import ctypes
import fcntl
import mmap
import os
import threading

from plexrl.memory import pages
from plexrl.memory.cuda_driver import CudaFailed
from plexrl.memory.cuda_lanes import NOWHERE
from plexrl.memory.cuda_pins import writable
from plexrl.memory.pages import create_memfd
from plexrl.types import DoesNotFit

GRAIN = 4 * pages.PAGE

_FIXED = 0x10
_NORESERVE = 0x4000
_threads = threading.Lock()  # a record lock excludes processes, not threads
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


class Card:
    """The physical memory of one pretend GPU, counted for all processes together. `peak`: the most that was taken."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._fd = create_memfd("card", pages.PAGE)
        self._mapping = pages.map_shared(self._fd, pages.PAGE)
        self._words = memoryview(self._mapping).cast("q")

    def take(self, size: int) -> None:
        """Raises DoesNotFit."""
        with self._locked():
            if self._words[0] + size > self.size:
                raise DoesNotFit(f"{size} bytes on a card with {self._words[0]} of {self.size} taken")
            self._words[0] += size
            self._words[1] = max(self._words[1], self._words[0])

    def give(self, size: int) -> None:
        """Back again."""
        with self._locked():
            self._words[0] -= size

    @property
    def used(self) -> int:
        """Bytes taken now."""
        return self._words[0]

    @property
    def peak(self) -> int:
        """The most bytes that were ever taken at once."""
        return self._words[1]

    def __del__(self) -> None:
        os.close(self._fd)

    @contextlib.contextmanager
    def _locked(self):
        with _threads:
            fcntl.lockf(self._fd, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.lockf(self._fd, fcntl.LOCK_UN)


class HostVmm:
    """A `Driver`. calls: the names of those made. fail: name -> how many of its calls succeed before one fails."""

    def __init__(self, card: Card) -> None:
        self.card = card
        self.calls: list[str] = []
        self.fail: dict[str, int] = {}
        self.reserved: dict[int, int] = {}
        self.handles: dict[int, int] = {}
        self.mapped: dict[int, tuple[int, int]] = {}
        self.pinned: dict[int, int] = {}

    def enter(self) -> None:
        pass

    def granularity(self) -> int:
        return GRAIN

    def memory(self) -> tuple[int, int]:
        return self.card.size - self.card.used, self.card.size

    def reserve(self, size: int) -> int:
        self._called("reserve")
        assert size % GRAIN == 0
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        start = self._map(None, size + GRAIN, pages.PROT_NONE, flags, -1)
        address = pages.align_up(start, GRAIN)
        self.reserved[address] = size
        return address

    def free(self, address: int, size: int) -> None:
        self._called("free")
        assert self.reserved.pop(address) == size, "freed other addresses than were reserved"
        assert not any(address <= at < address + size for at in self.mapped), "freed addresses that are mapped"
        # The slack of aligning stays: addresses cost nothing.
        assert _libc.munmap(address, size) == 0

    def create(self, size: int) -> int:
        self._called("create")
        assert size % GRAIN == 0
        self.card.take(size)
        handle = create_memfd("chunk", size)
        self.handles[handle] = size
        return handle

    def release(self, handle: int) -> None:
        self._called("release")
        size = self.handles.pop(handle)
        os.close(handle)
        if not any(held == handle for held, _ in self.mapped.values()):
            self.card.give(size)
        else:
            # The kernel may use the number again: what is mapped keeps its memory without it.
            self.mapped = {at: (-1 if held == handle else held, n) for at, (held, n) in self.mapped.items()}

    def map(self, address: int, size: int, handle: int) -> None:
        self._called("map")
        assert address % GRAIN == 0 and self.handles[handle] == size, "maps the whole of a handle"
        assert any(at <= address and address + size <= at + n for at, n in self.reserved.items()), "not reserved"
        assert not any(at < address + size and address < at + n for at, (_, n) in self.mapped.items()), "mapped over"
        self._map(address, size, pages.PROT_NONE, mmap.MAP_SHARED | _FIXED, handle)
        self.mapped[address] = (handle, size)

    def access(self, address: int, size: int) -> None:
        self._called("access")
        assert self.mapped[address][1] == size
        pages.protect(address, size, pages.PROT_READ_WRITE)

    def unmap(self, address: int, size: int) -> None:
        self._called("unmap")
        handle, held = self.mapped.pop(address)
        assert held == size, "unmaps exactly what was mapped"
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE | _FIXED
        self._map(address, size, pages.PROT_NONE, flags, -1)
        if handle == -1:
            self.card.give(size)

    def pin(self, address: int, size: int) -> None:
        self._called("pin")
        assert writable(address), "a driver locks writable pages only"
        assert address not in self.pinned
        self.pinned[address] = size

    def unpin(self, address: int) -> None:
        self._called("unpin")
        del self.pinned[address]

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if name in self.fail:
            self.fail[name] -= 1
            if self.fail[name] < 0:
                del self.fail[name]
                raise CudaFailed(f"{name} was told to fail")

    def _map(self, address, size, protection, flags, fd) -> int:
        at = _libc.mmap(address, size, protection, flags, fd, 0)
        assert at not in (None, ctypes.c_void_p(-1).value), os.strerror(ctypes.get_errno())
        return at


class LateMover:
    """Copies that happen when somebody waits for them, no sooner."""

    def __init__(self) -> None:
        self.fresh = NOWHERE
        self.under_way: list[LateCopy] = []
        self.rests = 0

    def copy(self, target, source):
        self.under_way.append(LateCopy(self, target, source))
        return self.under_way[-1]

    def rest(self) -> None:
        self.rests += 1
        while self.under_way:
            self.under_way[0].synchronize()

    def reserved(self) -> int:
        return 0


class LateCopy:
    """An `Arrival`."""

    def __init__(self, mover: LateMover, target, source) -> None:
        self._mover, self._target, self._source = mover, target, source

    def synchronize(self) -> None:
        """It, and all that was asked for before it."""
        while self in self._mover.under_way:
            first = self._mover.under_way.pop(0)
            first._target.copy_(first._source)
