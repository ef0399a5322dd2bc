"""The host arena: one memfd per machine, cut into slabs by the agent; engine hosts map the slabs that they may use."""

from __future__ import annotations

import itertools
import logging
import mmap
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from plexrl.memory import numa, pages, room
from plexrl.memory.checksum import checksum
from plexrl.types import BadInput, DoesNotFit, Slab

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)


class Arena:
    """The allocator, in the agent. First fit with coalescing, slabs start at pages, one slab per name.

    Each NUMA node has its part of the file, whose pages come from that node; a slab lies in the part that is asked
    for, else in another, at last across parts. Free bytes are zero at all times: a slab is cleared when it is freed,
    by writing zeros, because giving the pages back to the kernel would make the next owner's first switch fault on
    every page. A slab's pages are allocated with it, never in a switch, and only while the machine and the cgroup
    have them. Safe to call from several threads; `alloc` and `free` of gigabytes take parts of a second.
    """

    def __init__(self, fd: int, size: int, nodes: Sequence[int] = (0,), lock: bool = False) -> None:
        """fd: a new memfd (all zero) of `size` bytes, a multiple of its granule. Raises BadInput otherwise.

        nodes: NUMA nodes that share it evenly. lock: keep slabs from being swapped out, as far as this process may.
        """
        held = os.fstat(fd).st_size
        self._granule = pages.granule(fd)
        if held != size or size <= 0 or size % self._granule:
            raise BadInput(
                f"the host arena's file has {held} bytes for a size of {size}",
                f"Make it with create_memfd, a multiple of {self._granule} bytes",
            )
        self.size = size
        self._fd = os.dup(fd)
        self._mapping = pages.map_shared(fd, size)
        self._address = pages.address(self._mapping)
        self._huge = self._granule == pages.PAGE and pages.transparent_huge()
        self._lock_pages = lock
        self._slabs: dict[str, Slab] = {}
        self._gaps: list[tuple[int, int]] = [(0, size)]
        self._backed: list[tuple[int, int]] = []  # what the machine has given its memory for; it stays
        self._parts = _parts(size, nodes, self._granule)
        self._lock = threading.Lock()
        if len(nodes) > 1:
            for node, start, end in self._parts:
                if end > start and not numa.prefer(self._address + start, end - start, node):
                    log.warning("the arena's bytes %d to %d are not bound to NUMA node %d", start, end, node)

    def alloc(self, name: str, size: int, owner: int, node: int | None = None) -> Slab:
        """A slab of `size` zero bytes for `owner` (uid, -1 = shared); the existing one when asked for again.

        node: the NUMA node that is preferred. Raises BadInput when the name is taken with another size or owner,
        DoesNotFit (with the figures) when no gap is large enough or the machine has no memory left.
        """
        if not name or size <= 0:
            raise BadInput(f"a slab {name!r} of {size} bytes", "Give it a name and a positive size")
        with self._lock:
            known = self._slabs.get(name)
            if known is not None:
                if (known.size, known.owner) != (size, owner):
                    raise BadInput(
                        f"slab {name!r} has {known.size} bytes of uid {known.owner}, asked for {size} of uid {owner}",
                        "Free it first or take another name",
                    )
                return known
            taken = pages.align_up(size, self._granule)
            offset = self._find(taken, node)
            if offset is None:
                raise DoesNotFit(
                    f"slab {name!r} needs {taken} bytes of the host arena; {self._free()} of {self.size} are free, "
                    f"the largest gap has {max((gap for _, gap in self._gaps), default=0)}",
                    "Raise host.bytes, end a job, or keep fewer versions",
                )
            self._back(name, offset, taken)
            self._gaps = list(_less(self._gaps, offset, taken))
            slab = self._slabs[name] = Slab(name, offset, size, owner, self._node_of(offset))
            return slab

    def free(self, name: str) -> bool:
        """Clear the slab and take it back; False when there is none of this name (it may be freed twice).

        No process may write to it any more: the agent frees only what its engine hosts have let go.
        """
        with self._lock:
            slab = self._slabs.get(name)
            if slab is None:
                return False
            taken = pages.align_up(slab.size, self._granule)
            pages.clear(self._address + slab.offset, taken)
            del self._slabs[name]
            self._gaps = _coalesced([*self._gaps, (slab.offset, taken)])
            return True

    def get(self, name: str) -> Slab | None:
        """The slab of this name."""
        return self._slabs.get(name)

    def slabs(self) -> tuple[Slab, ...]:
        """All slabs, by offset."""
        with self._lock:
            return tuple(sorted(self._slabs.values(), key=lambda slab: slab.offset))

    def bytes_of(self, slab: Slab) -> memoryview:
        """The slab's whole pages, writable: for the tier below, which reads and writes them in place."""
        return memoryview(self._mapping)[slab.offset : slab.offset + pages.align_up(slab.size, pages.PAGE)]

    def free_bytes(self) -> int:
        """Bytes in gaps. A slab takes whole pages, so this falls by its size rounded up."""
        with self._lock:
            return self._free()

    def told(self) -> str:
        """One line about what the arena is made of, for the log."""
        made = (
            "reserved huge pages" if self._granule > pages.PAGE else "huge pages where free" if self._huge else "pages"
        )
        nodes = ", ".join(f"{end - start} bytes on NUMA node {node}" for node, start, end in self._parts)
        return f"{nodes}; of {made}{', locked' if self._lock_pages else ''}"

    def close(self) -> None:
        """Let go of the file and the mapping; it goes with the last of its `bytes_of`."""
        del self._mapping
        os.close(self._fd)

    def _free(self) -> int:
        return sum(gap for _, gap in self._gaps)

    def _find(self, taken: int, node: int | None) -> int | None:
        """Where `taken` bytes fit: in the preferred node's part, in another's, across parts."""
        # A huge page helps only whom it belongs to alone.
        align = pages.HUGE if self._huge and taken >= pages.HUGE else self._granule
        parts = sorted(self._parts, key=lambda part: part[0] != node)
        for (_, low, high), to in itertools.product([*parts, (-1, 0, self.size)], sorted({align, self._granule})[::-1]):
            for offset, gap in self._gaps:
                start = pages.align_up(max(offset, low), to)
                if start + taken <= min(offset + gap, high):
                    return start
        return None

    def _back(self, name: str, offset: int, taken: int) -> None:
        """Have the machine give its memory now, or refuse."""
        missing = taken - sum(_overlap(offset, taken, *piece) for piece in self._backed)
        if missing and self._granule == pages.PAGE:
            room.require(missing, f"slab {name!r}", "Lower host.bytes, or give the pool's job more memory")
        try:
            if missing and self._huge:
                pages.populate(self._mapping, offset, taken)
            elif missing:
                os.posix_fallocate(self._fd, offset, taken)
        except OSError as error:
            raise DoesNotFit(
                f"the node has no memory for slab {name!r} of {taken} bytes ({error.strerror})", "Lower host.bytes"
            ) from error
        if missing:
            self._backed = _coalesced([*_less(self._backed, offset, taken), (offset, taken)])
        if self._lock_pages and not pages.lock(self._address + offset, taken):
            self._lock_pages = False
            log.warning("this process may not lock %d bytes more (ulimit -l): slabs may be swapped out", taken)

    def _node_of(self, offset: int) -> int:
        return next(node for node, start, end in self._parts if start <= offset < end)


class Registrations(Struct, frozen=True):
    """How many mappings this process has registered with its GPU's driver since its start, and the seconds it took."""

    count: int = 0
    seconds: float = 0.0


class ArenaMap:
    """The arena in an engine host: only the slabs that were asked for are mapped, each by itself.

    registrations: of the hook, so far.
    """

    def __init__(
        self,
        fd: int,
        size: int,
        register: Callable[[int, int], None] | None = None,
        unregister: Callable[[int], None] | None = None,
    ) -> None:
        """fd: the agent's memfd, inherited. Raises BadInput when its size differs.

        register: called once per mapping with its address and bytes. unregister: with its address before it goes.
        """
        held = os.fstat(fd).st_size
        if held != size:
            raise BadInput(f"the host arena's file has {held} bytes instead of {size}", "Pass the agent's memfd")
        self.size = size
        self.registrations = Registrations()
        self._fd = os.dup(fd)
        self._granule = pages.granule(fd)
        self._register = register
        self._unregister = unregister
        self._views: dict[tuple[Slab, bool], Tensor] = {}
        weakref.finalize(self, os.close, self._fd)

    def view(self, slab: Slab, readonly: bool = False) -> Tensor:
        """The slab's bytes: uint8, 1-D, slab.size. Touched here once, so that switches take no page fault.

        The same one when asked for again. readonly: writing to the tensor ends the process; for the base that all
        tenants share. Raises BadInput when the slab does not lie in the arena, DoesNotFit without memory for it.
        """
        if slab.offset < 0 or slab.size <= 0 or slab.offset + slab.size > self.size or slab.offset % self._granule:
            raise BadInput(
                f"slab {slab.name!r} at {slab.offset} of {slab.size} bytes lies outside an arena of {self.size}",
                "Use a slab of this node's arena",
            )
        known = self._views.get((slab, readonly))
        if known is not None:
            return known
        length = pages.align_up(slab.size, self._granule)
        mapping = pages.map_shared(self._fd, length, readonly, slab.offset)
        pages.populate(mapping, 0, length, readonly)
        view = _tensor(mapping, slab.size)
        if self._register is not None:
            begun = time.perf_counter()
            self._register(view.data_ptr(), length)
            done = self.registrations
            self.registrations = Registrations(done.count + 1, done.seconds + time.perf_counter() - begun)
        self._views[slab, readonly] = view
        return view

    def store(self, slab: Slab, content: Tensor) -> None:
        """Fill a slab with bytes (uint8, 1-D, contiguous, slab.size) that this process will not look at again.

        From host memory without mapping the slab: making the pages of a new mapping takes twice as long as copying into
        them. Raises BadInput for another size, OSError.
        """
        if content.numel() != slab.size:
            raise BadInput(f"{content.numel()} bytes for slab {slab.name!r} of {slab.size}", "Store all of it")
        if content.device.type != "cpu":
            self.view(slab).copy_(content)
            self.drop(slab, readonly=False)
            return
        memory, done = memoryview(content.numpy()), 0
        while done < slab.size:
            done += os.pwrite(self._fd, memory[done:], slab.offset + done)

    def checksum(self, slab: Slab, name: str) -> str:
        """Of the bytes of a version's slab, mapped or not; see memory.checksum."""
        return checksum(self._fd, slab.offset, slab.size, name)

    def drop(self, slab: Slab, readonly: bool | None = None) -> None:
        """Unmap the slab: a view of it that somebody kept ends the process when it is used. Twice is no error.

        readonly: only the view of this kind; None: both. No copy may be under way.
        """
        for kind in (False, True) if readonly is None else (readonly,):
            view = self._views.pop((slab, kind), None)
            if view is not None:
                if self._unregister is not None:
                    self._unregister(view.data_ptr())
                pages.forget(view.data_ptr(), pages.align_up(slab.size, self._granule))

    def mapped(self) -> tuple[Slab, ...]:
        """The slabs that this process can see, each once."""
        return tuple(dict.fromkeys(slab for slab, _ in self._views))


def _parts(size: int, nodes: Sequence[int], granule: int) -> list[tuple[int, int, int]]:
    """(node, start, end): even parts of the file."""
    cuts = [size // granule * i // len(nodes) * granule for i in range(len(nodes))] + [size]
    return [(node, *bounds) for node, bounds in zip(nodes, itertools.pairwise(cuts), strict=True)]


def _less(pieces: list[tuple[int, int]], start: int, size: int) -> Iterator[tuple[int, int]]:
    """The pieces (offset, size) without what they have of [start, start + size)."""
    for offset, length in pieces:
        if offset < start:
            yield offset, min(length, start - offset)
        after = max(offset, start + size)
        if offset + length > after:
            yield after, offset + length - after


def _overlap(start: int, size: int, offset: int, length: int) -> int:
    return max(0, min(start + size, offset + length) - max(start, offset))


def _coalesced(gaps: list[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for offset, size in sorted(gaps):
        if joined and joined[-1][0] + joined[-1][1] == offset:
            joined[-1] = (joined[-1][0], joined[-1][1] + size)
        else:
            joined.append((offset, size))
    return joined


def _tensor(mapping: mmap.mmap, size: int) -> Tensor:
    """The mapping's first bytes. It is unmapped when the last such tensor goes."""
    import torch

    with warnings.catch_warnings():
        # torch warns that a read-only buffer must not be written to; that is what it is for.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(mapping, dtype=torch.uint8, count=size)
