"""How a chunk of bytes moves between host and device."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Protocol

from plexrl.types import BadInput

if TYPE_CHECKING:
    from torch import Tensor

CHUNK = 16 << 20
"""Bytes that are copied, waited for and released together; a multiple of 64.

By measurement (`python -m bench.crossing`, whose CPU seconds tell more than its wall seconds on a busy machine): of the
CPU time of an exchange the hand-shake took about 20 % with chunks of 1 MiB, 4 to 10 % with 2 to 8 MiB and 3 % with 16.
Larger ones gain no more, and who comes would trail who leaves by more.
"""

ENVIRON = {"GLIBC_TUNABLES": "glibc.cpu.x86_non_temporal_threshold=0x100000"}
"""What the environment of a process that switches on the cpu device needs from its start.

glibc copies past the caches only from a size on that it derives from the machine's last-level cache, often far above a
chunk; through the caches a copy of state, which nobody reads soon, runs at little more than half the speed.
"""


class Arrival(Protocol):
    """A copy that is under way."""

    def synchronize(self) -> None:
        """Wait until it and all before it in its direction are done; raises what went wrong."""


class Mover(Protocol):
    """What copies."""

    def copy(self, target: Tensor, source: Tensor) -> Arrival | None:
        """Start copying flat bytes of one size; None when it is done already."""


class Memcpy:
    """The mover of the cpu device: one memcpy in the calling thread, which lets other Python threads run meanwhile."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Raises BadInput for two sizes."""
        size = target.numel()
        if size != source.numel():
            raise BadInput(f"{source.numel()} bytes copied into {size}", "Slice both alike")
        ctypes.memmove(target.data_ptr(), source.data_ptr(), size)
