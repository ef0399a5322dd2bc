"""NUMA: which nodes the machine has, to which a core belongs, and memory that comes from one of them."""

import ctypes
import platform
from pathlib import Path

SYSTEM = Path("/sys/devices/system/node")

_MBIND = {"x86_64": 237, "aarch64": 235, "ppc64le": 259, "s390x": 268, "riscv64": 235}.get(platform.machine())
_MPOL_PREFERRED = 1
_WORD = 8 * ctypes.sizeof(ctypes.c_ulong)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def nodes(system: Path = SYSTEM) -> tuple[int, ...]:
    """The nodes that have memory, ascending; (0,) where the kernel tells of none."""
    return tuple(_numbers(system / "has_memory")) or (0,)


def node_of_core(core: int, system: Path = SYSTEM) -> int:
    """The node of a core; the first with memory where it is unknown or has none of its own."""
    known = nodes(system)
    return next((node for node in known if core in _numbers(system / f"node{node}" / "cpulist")), known[0])


def prefer(start: int, size: int, node: int) -> bool:
    """Pages of a shared mapping's [start, start + size) that are not there yet come from `node` while it has some.

    The preference is the file's: it holds in whatever process the pages are touched first. A preference and no more,
    because a full node would else be an OOM kill. False where the kernel does not do it.
    """
    if _MBIND is None:
        return False
    words = node // _WORD + 1
    mask = (ctypes.c_ulong * words)()
    mask[node // _WORD] = 1 << node % _WORD
    arguments = (ctypes.c_void_p(start), ctypes.c_ulong(size), _MPOL_PREFERRED, mask, ctypes.c_ulong(words * _WORD + 1))
    return _libc.syscall(_MBIND, *arguments, 0) == 0


def _numbers(path: Path) -> list[int]:
    """What the kernel writes as `0-3,8`."""
    try:
        text = path.read_text().strip()
    except OSError:
        return []
    found: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found
