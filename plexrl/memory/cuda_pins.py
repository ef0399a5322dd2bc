"""Host memory that the GPU may copy to and from by itself: registered once per mapping, not once per copy."""

from __future__ import annotations

import mmap

from plexrl.memory import pages
from plexrl.memory.cuda_driver import Driver
from plexrl.types import BadInput


class Pins:
    """What this process has registered. `register` is the hook that ArenaMap calls once for each mapping."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._sizes: dict[int, int] = {}

    @property
    def bytes(self) -> int:
        """Registered now."""
        return sum(self._sizes.values())

    def register(self, address: int, size: int) -> None:
        """Page-lock a whole mapping of this process. A mapping that is read-only is so again afterwards.

        Raises BadInput when it is none or registered already, DoesNotFit when the host gives no more locked memory.
        """
        if address in self._sizes:
            raise BadInput(f"the mapping at {address:#x} is registered already", "Register once per mapping")
        self._driver.enter()
        if writable(address):
            self._driver.pin(address, size)
        else:
            # The driver locks writable pages only; its flag for read-only ones is refused by many GPUs. Nobody else
            # sees this mapping, and this process copies from it to the GPU, never back.
            pages.protect(address, size, pages.PROT_READ_WRITE)
            try:
                self._driver.pin(address, size)
            finally:
                pages.protect(address, size, mmap.PROT_READ)
        self._sizes[address] = size

    def unregister(self, address: int) -> None:
        """Before the mapping goes: what stays locked would be lost until this process ends. Twice is no error."""
        if self._sizes.pop(address, None) is not None:
            self._driver.enter()
            self._driver.unpin(address)


def writable(address: int) -> bool:
    """Whether this process may write there. Raises BadInput when nothing is mapped."""
    with open("/proc/self/maps", encoding="ascii", errors="replace") as maps:
        for line in maps:
            bounds, access, _ = line.split(" ", 2)
            start, end = (int(bound, 16) for bound in bounds.split("-"))
            if start <= address < end:
                return access[1] == "w"
    raise BadInput(f"nothing is mapped at {address:#x}", "Register mappings of this process")
