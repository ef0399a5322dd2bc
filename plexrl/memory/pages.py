"""Shared pages: memfds, their mappings, and the few system calls on them."""

import ctypes
import errno
import fcntl
import mmap
import os

from plexrl.types import DoesNotFit

ALIGN = 64
"""Bytes. Every bucket, tensor and extent starts at a multiple: elsewhere kernels round differently."""

PAGE = mmap.PAGESIZE
PROT_NONE = 0
PROT_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE

_MADV_DONTDUMP = 16
_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def align_up(n: int, to: int = ALIGN) -> int:
    """The smallest multiple of `to` that is at least n."""
    return -(-n // to) * to


def create_memfd(name: str, size: int) -> int:
    """A new anonymous file of exactly `size` bytes, all zero, close-on-exec; returns its descriptor.

    It is sealed against resizing, so that no process can make another one fault by truncating it.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd


def map_shared(fd: int, size: int, readonly: bool = False) -> mmap.mmap:
    """Map `size` bytes of fd from its start, shared with all other processes, kept out of core dumps."""
    prot = mmap.PROT_READ if readonly else PROT_READ_WRITE
    mapping = mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=prot)
    mapping.madvise(_MADV_DONTDUMP)
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


def protect(start: int, size: int, protection: int) -> None:
    """mprotect(2) on page-aligned [start, start + size). Raises OSError."""
    if size > 0 and _libc.mprotect(start, size, protection) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def clear(start: int, size: int) -> None:
    """Write zeros to [start, start + size) of this process; the pages stay allocated. Releases the GIL."""
    ctypes.memset(start, 0, size)
