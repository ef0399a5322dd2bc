"""The tier below the host arena: slabs as files on the node's own disk, by name, within a budget.

Files live no longer than their agent. Each agent has a folder of its own that it holds a lock on; what an agent that is
gone left behind, the next one on the node removes. Names of files are random: they tell nobody whose state it is.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import shutil
import stat
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from msgspec import Struct

from plexrl.memory import nvmefile
from plexrl.memory.arena import Arena
from plexrl.memory.nvmefile import Damaged
from plexrl.types import BadInput, DoesNotFit, PlexrlError, Slab

__all__ = ["Damaged", "Tier"]

log = logging.getLogger(__name__)

# Enough chunks under way to keep a disk busy while others are checksummed.
WORKERS = 4
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_PREFIX = "agent-"


class _Spilled(Struct, frozen=True):
    slab: Slab
    token: bytes
    bytes: int


class Tier:
    """The spilled slabs of one agent's arena. Safe to call from several threads, but one call per name at a time."""

    def __init__(self, arena: Arena, path: str | Path, budget: int) -> None:
        """path: a directory on a disk of this node, made if it is missing. budget: bytes of all files at most.

        Raises BadInput when others could reach into it or it cannot be written, DoesNotFit when the disk has not so
        many bytes free.
        """
        self.budget = budget
        self._arena = arena
        self._known: dict[str, _Spilled] = {}
        self._used = 0
        self._removing: set[Future[None]] = set()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._workers = ThreadPoolExecutor(WORKERS, "nvme")
        mend = "Give a directory of the service account on this node's own disk"
        try:
            self._folder, self._lock_fd = _move_in(Path(path))
        except OSError as error:
            raise BadInput(f"nvme.path {path} cannot be used: {error.strerror}", mend) from error
        try:
            self.direct = nvmefile.supports_direct(self._folder)
        except OSError as error:
            self.close()
            raise BadInput(f"nvme.path {path} cannot be written: {error.strerror}", mend) from error
        if not self.direct:
            log.warning("nvme.path %s does not allow direct I/O: spilled state goes through the page cache", path)
        free = self._free_on_disk()
        if budget > free:
            self.close()
            raise DoesNotFit(
                f"nvme.bytes is {budget}, the disk of {path} has {free} bytes free", "Lower it, or clear the disk"
            )

    def spill(self, name: str) -> tuple[int, float]:
        """Move the slab of this name out of the arena: bytes, seconds. (0, 0.0) when it is out already.

        No process may map it. Whatever fails leaves it in the arena as it was. Raises BadInput when there is no such
        slab, DoesNotFit when budget or disk are full, PlexrlError when the disk fails.
        """
        begun = time.perf_counter()
        if name in self._known:
            return 0, 0.0
        slab = self._arena.get(name)
        if slab is None:
            raise BadInput(f"no slab {name!r} to spill", "Spill what was allocated")
        with self._arena.bytes_of(slab) as data:
            spilled = _Spilled(slab, secrets.token_bytes(16), nvmefile.header_bytes(len(data)) + len(data))
            self._reserve(name, spilled.bytes)
            try:
                path = self._path(spilled)
                nvmefile.write(path, data, spilled.token, self.direct, self._workers, self._ended)
            except OSError as error:
                self._used_less(spilled.bytes)
                if error.errno in _FULL:
                    raise self._full(name, spilled.bytes, f" ({error.strerror})") from error
                raise PlexrlError(
                    f"slab {name!r} was not spilled to {path}: {error.strerror}", "See to the disk"
                ) from error
        self._known[name] = spilled
        self._arena.free(name)
        return slab.size, time.perf_counter() - begun

    def refill(self, name: str, node: int | None = None) -> tuple[Slab, int, float]:
        """Move a slab back into the arena: slab, bytes, seconds. One that is there already takes none.

        node: the NUMA node that is preferred. Raises BadInput when there is none, DoesNotFit when the arena is full,
        Damaged when its bytes are lost (it stays known until `free`); then the arena is as it was.
        """
        begun = time.perf_counter()
        spilled = self._known.get(name)
        if spilled is None:
            slab = self._arena.get(name)
            if slab is None:
                raise BadInput(f"no slab {name!r} to refill", "Refill what was spilled")
            return slab, 0, 0.0
        slab = self._arena.alloc(name, spilled.slab.size, spilled.slab.owner, node)
        path = self._path(spilled)
        try:
            with self._arena.bytes_of(slab) as data:
                nvmefile.read(path, data, spilled.token, self.direct, self._workers, self._ended)
        except InterruptedError as error:
            self._arena.free(name)
            raise PlexrlError(f"slab {name!r} was not refilled: {error.strerror}") from error
        except OSError as error:
            self._arena.free(name)
            raise Damaged(path, -1, f"a file of {spilled.bytes} bytes", error.strerror) from error
        except BaseException:
            self._arena.free(name)
            raise
        del self._known[name]
        # A file system may take as long to forget gigabytes as the disk took to read them.
        removing = self._workers.submit(self._remove, spilled)
        self._removing.add(removing)
        removing.add_done_callback(self._removing.discard)
        return slab, slab.size, time.perf_counter() - begun

    def free(self, name: str) -> bool:
        """Remove the file of this name; False when there is none."""
        spilled = self._known.pop(name, None)
        if spilled is not None:
            self._remove(spilled)
        return spilled is not None

    def names(self) -> tuple[str, ...]:
        """Slabs whose bytes are here."""
        return tuple(self._known)

    def free_bytes(self) -> int:
        """Bytes of the budget that no file takes, which is a little larger than its slab. Waits for files that go."""
        wait(set(self._removing))
        with self._lock:
            return self.budget - self._used

    def close(self) -> None:
        """Break off what is under way, wait for it, and remove everything."""
        self._ended.set()
        self._workers.shutdown()
        shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._lock_fd)

    def _path(self, spilled: _Spilled) -> Path:
        return self._folder / spilled.token.hex()

    def _remove(self, spilled: _Spilled) -> None:
        try:
            self._path(spilled).unlink(missing_ok=True)
        except OSError as error:
            # Its bytes stay taken, as they are.
            log.error("%s was not removed: %s", self._path(spilled), error.strerror)
        else:
            self._used_less(spilled.bytes)

    def _reserve(self, name: str, size: int) -> None:
        if size > self.budget - self._used:
            wait(set(self._removing))
        with self._lock:
            if size > self.budget - self._used or size > self._free_on_disk():
                raise self._full(name, size, "")
            self._used += size

    def _used_less(self, size: int) -> None:
        with self._lock:
            self._used -= size

    def _full(self, name: str, size: int, why: str) -> DoesNotFit:
        return DoesNotFit(
            f"slab {name!r} needs {size} bytes of {self._folder.parent}; {self.budget - self._used} of {self.budget} "
            f"are left of nvme.bytes, {self._free_on_disk()} on the disk{why}",
            "Raise nvme.bytes, clear the disk, or end a job",
        )

    def _free_on_disk(self) -> int:
        found = os.statvfs(self._folder)
        return found.f_bavail * found.f_frsize


def _move_in(path: Path) -> tuple[Path, int]:
    """A new folder in `path`, and the descriptor that keeps it locked. Folders of agents that are gone are removed.

    Raises BadInput when `path` is not ours alone, OSError.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Followed links would let who made the link choose the place.
    outer = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        held = os.fstat(outer)
        if held.st_uid != os.getuid() or stat.S_IMODE(held.st_mode) & 0o077:
            raise BadInput(
                f"nvme.path {path} belongs to uid {held.st_uid} with mode {stat.S_IMODE(held.st_mode):o}",
                f"It must belong to uid {os.getuid()} and have mode 700",
            )
        # Nobody sweeps between a folder's making and its lock.
        fcntl.flock(outer, fcntl.LOCK_EX)
        for left in path.glob(f"{_PREFIX}*"):
            _remove_if_left(left)
        folder = path / f"{_PREFIX}{secrets.token_hex(8)}"
        folder.mkdir(mode=0o700)
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        return folder, lock
    finally:
        os.close(outer)


def _remove_if_left(folder: Path) -> None:
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return  # none of ours, or just gone
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    else:
        log.warning("removing %s, left by an agent that is gone", folder)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(fd)
