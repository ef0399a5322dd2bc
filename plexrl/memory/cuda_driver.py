"""The dozen calls of CUDA's driver that the cuda device makes: an interface of our own, and libcuda behind it.

By ctypes and not by `cuda-python`: nothing to install beside torch, no pairing of its version with the driver's, and
these calls have kept their shape since CUDA 11.1. `python scripts/cuda_abi.py` compares every prototype, structure and
constant here with a site's own cuda.h.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_ulonglong, c_ushort, c_void_p
from typing import Protocol

from plexrl.types import DoesNotFit, PlexrlError, Unavailable

LIBRARY = "libcuda.so.1"

OUT_OF_MEMORY = 2
CONSTANTS = {
    "CUDA_ERROR_OUT_OF_MEMORY": OUT_OF_MEMORY,
    "CU_MEM_ALLOCATION_TYPE_PINNED": 1,
    "CU_MEM_LOCATION_TYPE_DEVICE": 1,
    "CU_MEM_ACCESS_FLAGS_PROT_READWRITE": 3,
    "CU_MEM_ALLOC_GRANULARITY_RECOMMENDED": 1,
    "CU_MEMHOSTREGISTER_PORTABLE": 1,
}
"""Names in cuda.h and their values."""


class Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", c_int), ("id", c_int))


class AllocationFlags(ctypes.Structure):
    """The nested allocFlags of CUmemAllocationProp."""

    _fields_ = (
        ("compressionType", c_ubyte),
        ("gpuDirectRDMACapable", c_ubyte),
        ("usage", c_ushort),
        ("reserved", c_ubyte * 4),
    )


class Allocation(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", c_int),
        ("requestedHandleTypes", c_int),
        ("location", Location),
        ("win32HandleMetaData", c_void_p),
        ("allocFlags", AllocationFlags),
    )


class Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", Location), ("flags", c_int))


STRUCTURES = {"CUmemLocation": Location, "CUmemAllocationProp": Allocation, "CUmemAccessDesc": Access}

# CUdeviceptr and CUmemGenericAllocationHandle are unsigned long long, CUdevice is int, CUcontext a pointer.
PROTOTYPES = {
    "cuInit": (c_uint,),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuCtxGetCurrent": (POINTER(c_void_p),),
    "cuCtxSetCurrent": (c_void_p,),
    "cuMemGetInfo_v2": (POINTER(c_size_t), POINTER(c_size_t)),
    "cuMemGetAllocationGranularity": (POINTER(c_size_t), POINTER(Allocation), c_int),
    "cuMemAddressReserve": (POINTER(c_ulonglong), c_size_t, c_size_t, c_ulonglong, c_ulonglong),
    "cuMemAddressFree": (c_ulonglong, c_size_t),
    "cuMemCreate": (POINTER(c_ulonglong), c_size_t, POINTER(Allocation), c_ulonglong),
    "cuMemRelease": (c_ulonglong,),
    "cuMemMap": (c_ulonglong, c_size_t, c_size_t, c_ulonglong, c_ulonglong),
    "cuMemSetAccess": (c_ulonglong, c_size_t, POINTER(Access), c_size_t),
    "cuMemUnmap": (c_ulonglong, c_size_t),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
}
"""Exported names and their parameters; all return CUresult, an int."""


class CudaFailed(PlexrlError):
    """A driver call failed: which one, with what, and the driver's own words."""


class Driver(Protocol):
    """One GPU's driver. Calls raise DoesNotFit when the GPU (for `pin`: the host) is full, CudaFailed for all else."""

    def enter(self) -> None:
        """Make the GPU's primary context (torch's) current on the calling thread; costs nothing when it is."""

    def granularity(self) -> int:
        """Bytes: every size and address of the calls below is a multiple."""

    def reserve(self, size: int) -> int:
        """Take `size` bytes of addresses, backed by nothing; returns the first."""

    def free(self, address: int, size: int) -> None:
        """Give addresses back that `reserve` gave and that nothing is mapped to."""

    def create(self, size: int) -> int:
        """Take physical memory; returns its handle."""

    def release(self, handle: int) -> None:
        """Drop a handle. The memory goes back once nothing is mapped to it any more."""

    def map(self, address: int, size: int, handle: int) -> None:
        """Put the whole of a handle's memory at reserved addresses. Not accessible yet."""

    def access(self, address: int, size: int) -> None:
        """Let this GPU read and write mapped addresses."""

    def unmap(self, address: int, size: int) -> None:
        """Take away exactly what one `map` put there. Nothing that runs on the GPU may use it any more."""

    def memory(self) -> tuple[int, int]:
        """Free and total bytes of the GPU, for all processes together."""

    def pin(self, address: int, size: int) -> None:
        """Page-lock host memory that is mapped writable, and tell the GPU where it is."""

    def unpin(self, address: int) -> None:
        """Undo `pin` of the mapping that starts there."""


class LibCuda:
    """Driver of the `index`-th GPU that this process sees. The GIL is released in every call."""

    def __init__(self, index: int) -> None:
        """Raises Unavailable without a driver or GPU."""
        try:
            self._library = ctypes.CDLL(LIBRARY)
            self._calls = {name: _bound(self._library, name) for name in PROTOTYPES}
        except (OSError, AttributeError) as error:
            raise Unavailable(
                f"there is no usable CUDA driver here ({error})", "Use a machine with a GPU, or device.kind cpu"
            ) from error
        code = self._calls["cuInit"](0)
        if code:
            raise Unavailable(f"CUDA cannot start: {self._words(code)}", "Check `nvidia-smi` and CUDA_VISIBLE_DEVICES")
        self.index = index
        self._context = c_void_p()
        self._call("cuDevicePrimaryCtxRetain", byref(self._context), index)
        here = Location(CONSTANTS["CU_MEM_LOCATION_TYPE_DEVICE"], index)
        self._allocation = Allocation(type=CONSTANTS["CU_MEM_ALLOCATION_TYPE_PINNED"], location=here)
        self._access = Access(here, CONSTANTS["CU_MEM_ACCESS_FLAGS_PROT_READWRITE"])
        self.enter()

    def enter(self) -> None:
        current = c_void_p()
        self._call("cuCtxGetCurrent", byref(current))
        if current.value != self._context.value:
            self._call("cuCtxSetCurrent", self._context)

    def granularity(self) -> int:
        size = c_size_t()
        wanted = CONSTANTS["CU_MEM_ALLOC_GRANULARITY_RECOMMENDED"]
        self._call("cuMemGetAllocationGranularity", byref(size), byref(self._allocation), wanted)
        return size.value

    def reserve(self, size: int) -> int:
        address = c_ulonglong()
        self._call("cuMemAddressReserve", byref(address), size, 0, 0, 0)
        return address.value

    def free(self, address: int, size: int) -> None:
        self._call("cuMemAddressFree", address, size)

    def create(self, size: int) -> int:
        handle = c_ulonglong()
        self._call("cuMemCreate", byref(handle), size, byref(self._allocation), 0)
        return handle.value

    def release(self, handle: int) -> None:
        self._call("cuMemRelease", handle)

    def map(self, address: int, size: int, handle: int) -> None:
        self._call("cuMemMap", address, size, 0, handle, 0)

    def access(self, address: int, size: int) -> None:
        self._call("cuMemSetAccess", address, size, byref(self._access), 1)

    def unmap(self, address: int, size: int) -> None:
        self._call("cuMemUnmap", address, size)

    def memory(self) -> tuple[int, int]:
        free, total = c_size_t(), c_size_t()
        self._call("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value, total.value

    def pin(self, address: int, size: int) -> None:
        self._call("cuMemHostRegister_v2", address, size, CONSTANTS["CU_MEMHOSTREGISTER_PORTABLE"])

    def unpin(self, address: int) -> None:
        self._call("cuMemHostUnregister", address)

    def _call(self, name: str, *arguments: object) -> None:
        code = self._calls[name](*arguments)
        if not code:
            return
        shown = ", ".join(str(argument) for argument in arguments if isinstance(argument, int))
        what = f"{name}({shown}) failed on GPU {self.index}: {self._words(code)}"
        if code == OUT_OF_MEMORY:
            raise DoesNotFit(what, "Lower device.bytes or host.bytes, or end what else uses this GPU")
        raise CudaFailed(what)

    def _words(self, code: int) -> str:
        said = []
        for name in ("cuGetErrorName", "cuGetErrorString"):
            text = c_char_p()
            if self._calls[name](code, byref(text)) == 0 and text.value:
                said.append(text.value.decode(errors="replace"))
        return ": ".join(said) or f"error {code}"


def _bound(library: ctypes.CDLL, name: str):
    function = getattr(library, name)
    function.argtypes = PROTOTYPES[name]
    function.restype = c_int
    return function
