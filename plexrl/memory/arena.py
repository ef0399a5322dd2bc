"""The host arena: one memfd per node, cut into slabs by the agent and mapped by every engine host."""

from __future__ import annotations

import mmap
import os
import threading
import warnings
from typing import TYPE_CHECKING

from plexrl.memory import pages
from plexrl.types import BadInput, DoesNotFit, Slab

if TYPE_CHECKING:
    from torch import Tensor


class Arena:
    """The allocator, in the agent. First fit with coalescing, slabs start at pages, one slab per name.

    Free bytes are zero at all times: a slab is cleared when it is freed, by writing zeros, because giving the pages
    back to the kernel would make the next owner's first switch fault on every page. A slab's pages are allocated with
    it, never in a switch. Safe to call from several threads; `alloc` and `free` of gigabytes take parts of a second.
    """

    def __init__(self, fd: int, size: int) -> None:
        """fd: a new memfd (all zero) of `size` bytes, a multiple of the page size. Raises BadInput otherwise."""
        held = os.fstat(fd).st_size
        if held != size or size <= 0 or size % pages.PAGE:
            raise BadInput(
                f"the host arena's file has {held} bytes for a size of {size}",
                f"Make it with create_memfd, a multiple of {pages.PAGE} bytes",
            )
        self.size = size
        self._fd = os.dup(fd)
        self._mapping = pages.map_shared(fd, size)
        self._address = pages.address(self._mapping)
        self._slabs: dict[str, Slab] = {}
        self._gaps: list[tuple[int, int]] = [(0, size)]
        self._lock = threading.Lock()

    def alloc(self, name: str, size: int, owner: int) -> Slab:
        """A slab of `size` zero bytes for `owner` (uid, -1 = shared); the existing one when asked for again.

        Raises BadInput when the name is taken with another size or owner, DoesNotFit (with the figures) when no gap
        is large enough or the machine has no memory left.
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
            taken = pages.align_up(size, pages.PAGE)
            index = next((i for i, (_, gap) in enumerate(self._gaps) if gap >= taken), None)
            if index is None:
                raise DoesNotFit(
                    f"slab {name!r} needs {taken} bytes of the host arena; {self._free()} of {self.size} are free, "
                    f"the largest gap has {max((gap for _, gap in self._gaps), default=0)}",
                    "Raise host.bytes, end a job, or keep fewer versions",
                )
            offset, gap = self._gaps[index]
            try:
                os.posix_fallocate(self._fd, offset, taken)
            except OSError as error:
                raise DoesNotFit(
                    f"the node has no memory for slab {name!r} of {taken} bytes ({error.strerror})", "Lower host.bytes"
                ) from error
            self._gaps[index : index + 1] = [(offset + taken, gap - taken)] if gap > taken else []
            slab = self._slabs[name] = Slab(name, offset, size, owner)
            return slab

    def free(self, name: str) -> bool:
        """Clear the slab and take it back; False when there is none of this name (it may be freed twice).

        No process may write to it any more: the agent frees only what its engine hosts have let go.
        """
        with self._lock:
            slab = self._slabs.get(name)
            if slab is None:
                return False
            taken = pages.align_up(slab.size, pages.PAGE)
            pages.clear(self._address + slab.offset, taken)
            del self._slabs[name]
            self._gaps = _coalesced([*self._gaps, (slab.offset, taken)])
            return True

    def slabs(self) -> tuple[Slab, ...]:
        """All slabs, by offset."""
        with self._lock:
            return tuple(sorted(self._slabs.values(), key=lambda slab: slab.offset))

    def free_bytes(self) -> int:
        """Bytes in gaps. A slab takes whole pages, so this falls by its size rounded up."""
        with self._lock:
            return self._free()

    def close(self) -> None:
        """Let go of the file and the mapping."""
        self._mapping.close()
        os.close(self._fd)

    def _free(self) -> int:
        return sum(gap for _, gap in self._gaps)


class ArenaMap:
    """The arena in an engine host: mapped whole, slabs are views of it."""

    def __init__(self, fd: int, size: int) -> None:
        """fd: the agent's memfd, inherited. Raises BadInput when its size differs."""
        held = os.fstat(fd).st_size
        if held != size:
            raise BadInput(f"the host arena's file has {held} bytes instead of {size}", "Pass the agent's memfd")
        self.size = size
        self._shared = pages.map_shared(fd, size)
        self._fixed = pages.map_shared(fd, size, readonly=True)
        self._shared_bytes = _tensor(self._shared)
        self._fixed_bytes = _tensor(self._fixed)

    def view(self, slab: Slab, readonly: bool = False) -> Tensor:
        """The slab's bytes: uint8, 1-D, slab.size. Touched here once, so that switches take no page fault.

        readonly: writing to the tensor ends the process; for the base that all tenants share. Raises BadInput when
        the slab does not lie in the arena.
        """
        if slab.offset < 0 or slab.size <= 0 or slab.offset + slab.size > self.size:
            raise BadInput(
                f"slab {slab.name!r} at {slab.offset} of {slab.size} bytes lies outside an arena of {self.size}",
                "Use a slab of this node's arena",
            )
        pages.populate(self._fixed if readonly else self._shared, slab.offset, slab.size, readonly)
        return (self._fixed_bytes if readonly else self._shared_bytes)[slab.offset : slab.offset + slab.size]


def _coalesced(gaps: list[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for offset, size in sorted(gaps):
        if joined and joined[-1][0] + joined[-1][1] == offset:
            joined[-1] = (joined[-1][0], joined[-1][1] + size)
        else:
            joined.append((offset, size))
    return joined


def _tensor(mapping: mmap.mmap) -> Tensor:
    import torch

    with warnings.catch_warnings():
        # torch warns that a read-only buffer must not be written to; that is what it is for.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(mapping, dtype=torch.uint8)
