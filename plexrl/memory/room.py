"""How much more memory this process may take: what the machine has free, and what its cgroups allow."""

from collections.abc import Iterator
from pathlib import Path

import psutil
from msgspec import Struct

from plexrl.types import DoesNotFit

_PROC = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")
SPARE = 64 << 20
"""Bytes that are left alone: an allocation up to the last page is an OOM kill, of us or of somebody else."""


class Room(Struct, frozen=True):
    """bytes: what may still be taken. bound: whose limit that is."""

    bytes: int
    bound: str


def room(of: Path = _PROC, cgroups: Path = _CGROUPS) -> Room:
    """The least of the machine's available memory and what is left below each limit of this process's cgroups.

    Pages of files that the kernel can drop count as free. Version 1 and 2 of cgroups. of, cgroups: where to read.
    """
    rooms = [Room(psutil.virtual_memory().available, "this machine's available memory"), *_limits(of, cgroups)]
    return min(rooms, key=lambda room: room.bytes)


def require(size: int, what: str, mend: str) -> None:
    """Raise DoesNotFit, with figures, unless `size` bytes may be taken and a little is left."""
    found = room()
    if size + SPARE > found.bytes:
        raise DoesNotFit(
            f"{what} takes {size} bytes of memory and {SPARE} stay spare; {found.bytes} are left of {found.bound}",
            mend,
        )


def _limits(of: Path, cgroups: Path) -> Iterator[Room]:
    for line in of.read_text().splitlines() if of.exists() else ():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root = cgroups if (cgroups / "cgroup.controllers").exists() else cgroups / "unified"
            names, prefix = ("memory.max", "memory.current"), ""
        elif "memory" in controllers.split(","):
            root = cgroups / "memory"
            names, prefix = ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_"
        else:
            continue
        # A limit of an outer group holds too. Of a container's outer groups nothing is seen here.
        folder = root / path.lstrip("/")
        for group in (folder, *folder.parents):
            if group == root.parent:
                break
            limit, used = (_number(group / name) for name in names)
            if limit is not None and used is not None:
                left = max(0, limit - used + _droppable(group / "memory.stat", prefix))
                name = group.relative_to(root).as_posix().removeprefix(".")
                yield Room(left, f"the limit of cgroup /{name}, {limit} bytes")


def _number(path: Path) -> int | None:
    """None when the group has no such file, or no limit."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _droppable(stat: Path, prefix: str) -> int:
    """Bytes of files' pages. Shared memory is not among them."""
    try:
        lines = stat.read_text().splitlines()
    except OSError:
        return 0
    wanted = {f"{prefix}active_file", f"{prefix}inactive_file"}
    return sum(int(value) for key, _, value in (line.partition(" ") for line in lines) if key in wanted)
