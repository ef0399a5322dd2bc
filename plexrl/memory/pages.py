"""Shared pages: memfds, their mappings, and the few system calls on them."""

import ctypes
import errno
import fcntl
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from plexrl.types import DoesNotFit

ALIGN = 64
"""Bytes. Every bucket, tensor and extent starts at a multiple: elsewhere kernels round differently."""

PAGE = mmap.PAGESIZE
HUGE = 2 << 20
"""Bytes of a huge page, as transparent ones are on x86-64 and most others."""

PROT_NONE = 0
PROT_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE

_MADV_HUGEPAGE = 14
_MADV_DONTDUMP = 16
_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23
_MAP_FIXED, _MAP_ANONYMOUS, _MAP_NORESERVE = 0x10, mmap.MAP_ANONYMOUS, 0x4000
# Large enough that memset writes past the caches.
_CLEAR_PIECE, _CLEARERS = 256 << 20, 4
_KERNEL = Path("/sys/kernel/mm")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mlock.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.mmap.restype = ctypes.c_void_p


def align_up(n: int, to: int = ALIGN) -> int:
    """The smallest multiple of `to` that is at least n."""
    return -(-n // to) * to


def create_memfd(name: str, size: int, reserved_huge: bool = False) -> int:
    """A new anonymous file of exactly `size` bytes, all zero, close-on-exec; returns its descriptor.

    It is sealed against resizing, so that no process can make another one fault by truncating it. reserved_huge: of
    huge pages that the admin has set aside (`reserved_huge_bytes`); `size` must be a multiple of theirs.
    """
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | (os.MFD_HUGETLB if reserved_huge else 0)
    fd = os.memfd_create(name, flags)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd


def granule(fd: int) -> int:
    """Bytes of which offsets and sizes in this memfd are multiples: a page, or a reserved huge page."""
    return os.statvfs(fd).f_bsize


def reserved_huge_bytes(size: int, kernel: Path = _KERNEL) -> bool:
    """Whether the machine has huge pages set aside and free for `size` bytes, which is a multiple of theirs."""
    free = _read(kernel / f"hugepages/hugepages-{HUGE // 1024}kB/free_hugepages")
    return size % HUGE == 0 and free.isdigit() and int(free) * HUGE >= size


def transparent_huge(kernel: Path = _KERNEL) -> bool:
    """Whether shared memory may get huge pages where a mapping asks for them."""
    setting = _read(kernel / "transparent_hugepage/shmem_enabled")
    return any(f"[{word}]" in setting for word in ("always", "within_size", "advise", "force"))


def map_shared(fd: int, size: int, readonly: bool = False, offset: int = 0) -> mmap.mmap:
    """Map `size` bytes of fd from `offset`, shared with all other processes, kept out of core dumps.

    offset: a multiple of the file's granule. Huge pages are asked for where the machine gives them.
    """
    prot = mmap.PROT_READ if readonly else PROT_READ_WRITE
    mapping = mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=prot, offset=offset)
    mapping.madvise(_MADV_DONTDUMP)
    if size >= HUGE and transparent_huge():
        mapping.madvise(_MADV_HUGEPAGE)
    return mapping


def address(mapping: mmap.mmap) -> int:
    """Where a writable mapping begins in this process."""
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


def populate(mapping: mmap.mmap, offset: int, size: int, readonly: bool = False) -> None:
    """Touch every page of [offset, offset + size) once, contents unchanged, so that later copies take no page fault.

    Raises DoesNotFit when the machine has no memory for the pages.
    """
    start = offset // PAGE * PAGE
    length = min(align_up(offset + size, PAGE), align_up(len(mapping), PAGE)) - start
    try:
        mapping.madvise(_MADV_POPULATE_READ if readonly else _MADV_POPULATE_WRITE, start, length)
    except OSError as error:
        if error.errno == errno.EINVAL:
            # Linux before 5.14. A read is enough: pages of a shared memfd are mapped writable by it.
            bytes(memoryview(mapping)[start : start + length : PAGE])
        elif error.errno in (errno.ENOMEM, errno.EFAULT):
            raise DoesNotFit(
                f"no memory for {size} bytes at offset {offset} of shared memory ({error.strerror})",
                "Lower device.bytes or host.bytes, or run fewer pools on this node",
            ) from error
        else:
            raise


def lock(start: int, size: int) -> bool:
    """Keep [start, start + size) from being swapped out; False when this process may not lock so much."""
    if _libc.mlock(start, size) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOMEM, errno.EPERM, errno.EAGAIN):
        return False
    raise OSError(code, os.strerror(code))


def protect(start: int, size: int, protection: int) -> None:
    """mprotect(2) on page-aligned [start, start + size). Raises OSError."""
    if size > 0 and _libc.mprotect(start, size, protection) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def forget(start: int, size: int) -> None:
    """Take the file out from under a mapping: whoever still uses its addresses is ended instead of reading what comes
    there next. The addresses stay taken until the mapping object goes. Raises OSError.
    """
    flags = mmap.MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_FIXED | _MAP_NORESERVE
    if _libc.mmap(start, size, PROT_NONE, flags, -1, 0) != start:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def clear(start: int, size: int) -> None:
    """Write zeros to [start, start + size) of this process; the pages stay allocated. Releases the GIL.

    Large ones by several threads: one core does not reach what the memory can do.
    """
    if size <= _CLEAR_PIECE:
        ctypes.memset(start, 0, size)
        return
    with ThreadPoolExecutor(_CLEARERS, "clear") as threads:
        for at in range(0, size, _CLEAR_PIECE):
            threads.submit(ctypes.memset, start + at, 0, min(_CLEAR_PIECE, size - at))


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
