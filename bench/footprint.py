"""Where memory is, seen from outside: what processes have for themselves, shared memory, copies of given bytes."""

import contextlib
import mmap
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import psutil
from msgspec import Struct

from plexrl.types import Unavailable

_PIECE = 64 << 20


class Footprint(Struct, frozen=True):
    """Bytes. private: proportional set sizes of all processes, without shared memory. shared: whole memory files."""

    private: int
    shared: int

    @property
    def total(self) -> int:
        """Every byte once."""
        return self.private + self.shared


def footprint(processes: Iterable[psutil.Process]) -> Footprint:
    """Of these processes and the memory files (memfd) that they have open. Raises Unavailable without the right to."""
    processes = list(processes)
    private = 0
    for process in processes:
        private += sum(_rollup(process, field) for field in ("Pss_Anon", "Pss_File"))
    shared = sum(os.stat(path).st_blocks * 512 for path in memory_files(processes).values())
    return Footprint(private, shared)


def memory_files(processes: Iterable[psutil.Process]) -> dict[str, Path]:
    """Their memfds, each once: `name:inode` -> a path that opens it."""
    found: dict[str, Path] = {}
    for process in processes:
        for link in _readable(Path(f"/proc/{process.pid}/fd")):
            with contextlib.suppress(OSError):
                target = os.readlink(link)
                if target.startswith("/memfd:"):
                    found.setdefault(f"{target[7:].removesuffix(' (deleted)')}:{link.stat().st_ino}", link)
    return found


def copies(pattern: bytes, processes: Iterable[psutil.Process]) -> dict[str, int]:
    """How often the bytes stand in each memory file, and in the processes' own memory ("private"), overlaps apart."""
    processes = list(processes)
    found = {}
    for name, path in memory_files(processes).items():
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            with mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) as memory:
                found[name] = _count(memory.find, pattern)
    found["private"] = sum(_count(_finder(piece), pattern) for p in processes for piece in _own(p, len(pattern)))
    return found


def _count(find: Callable[[bytes, int], int], pattern: bytes) -> int:
    count = at = 0
    while (at := find(pattern, at)) >= 0:
        count += 1
        at += len(pattern)
    return count


def _finder(piece: bytes) -> Callable[[bytes, int], int]:
    return piece.find


def _own(process: psutil.Process, margin: int) -> Iterator[bytes]:
    """A process's anonymous memory piece by piece; neighbours overlap by less than `margin`."""
    with (
        contextlib.suppress(FileNotFoundError, ProcessLookupError),
        Path(f"/proc/{process.pid}/mem").open("rb", 0) as own,
    ):
        for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
            place, rights, _, _, inode, *name = line.split(maxsplit=5)
            if inode != "0" or not rights.startswith("rw") or (name and name[0] in ("[vvar]", "[vsyscall]")):
                continue
            start, end = (int(x, 16) for x in place.split("-"))
            while start < end:
                with contextlib.suppress(OSError):
                    own.seek(start)
                    yield own.read(min(_PIECE, end - start))
                start += _PIECE - margin + 1


def _rollup(process: psutil.Process, field: str) -> int:
    try:
        text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    except PermissionError as error:
        raise Unavailable(
            f"the memory of process {process.pid} may not be looked at ({error})", "Run it as root"
        ) from None
    found = re.search(rf"^{field}:\s+(\d+) kB$", text, re.MULTILINE)
    return int(found.group(1)) * 1024 if found else 0


def _readable(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, ProcessLookupError):
        return []
    except PermissionError as error:
        raise Unavailable(f"{folder} may not be looked at ({error})", "Run it as root") from None
