"""Compares plexrl.memory.cuda_driver with a CUDA toolkit's cuda.h: `python scripts/cuda_abi.py [FOLDER OF cuda.h]`.

Needs gcc, no GPU and no driver. Exit status: 0 all the same, 1 something differs (the compiler says what).
"""

import ctypes
import subprocess
import sys

from plexrl.memory.cuda_driver import CONSTANTS, PROTOTYPES, STRUCTURES

INCLUDE = "/usr/local/cuda/include"

C_PROTOTYPES = {
    "cuInit": "unsigned int",
    "cuGetErrorName": "CUresult, const char **",
    "cuGetErrorString": "CUresult, const char **",
    "cuDevicePrimaryCtxRetain": "CUcontext *, CUdevice",
    "cuCtxGetCurrent": "CUcontext *",
    "cuCtxSetCurrent": "CUcontext",
    "cuMemGetInfo_v2": "size_t *, size_t *",
    "cuMemGetAllocationGranularity": "size_t *, const CUmemAllocationProp *, CUmemAllocationGranularity_flags",
    "cuMemAddressReserve": "CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long",
    "cuMemAddressFree": "CUdeviceptr, size_t",
    "cuMemCreate": "CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *, unsigned long long",
    "cuMemRelease": "CUmemGenericAllocationHandle",
    "cuMemMap": "CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long",
    "cuMemSetAccess": "CUdeviceptr, size_t, const CUmemAccessDesc *, size_t",
    "cuMemUnmap": "CUdeviceptr, size_t",
    "cuMemHostRegister_v2": "void *, size_t, unsigned int",
    "cuMemHostUnregister": "void *",
}
"""The parameters in C. A test holds them against PROTOTYPES, the compiler against cuda.h."""


def program() -> str:
    """A C file that compiles only if cuda.h agrees."""
    lines = ["#include <stddef.h>", "#include <cuda.h>"]
    for name, value in CONSTANTS.items():
        lines.append(f'_Static_assert((int){name} == {value}, "{name}");')
    for name, structure in STRUCTURES.items():
        lines.append(f'_Static_assert(sizeof({name}) == {ctypes.sizeof(structure)}, "size of {name}");')
        for field, kind in structure._fields_:
            at, size = getattr(structure, field).offset, ctypes.sizeof(kind)
            lines.append(f'_Static_assert(offsetof({name}, {field}) == {at}, "{name}.{field}");')
            lines.append(f'_Static_assert(sizeof((({name} *)0)->{field}) == {size}, "size of {name}.{field}");')
    for name in PROTOTYPES:
        lines.append(
            f"_Static_assert(__builtin_types_compatible_p(__typeof__({name}), "
            f'CUresult CUDAAPI({C_PROTOTYPES[name]})), "{name}");'
        )
    return "\n".join(lines) + "\n"


def main(include: str) -> int:
    """Returns the exit status."""
    made = subprocess.run(
        ["gcc", "-std=gnu11", "-Werror", "-fsyntax-only", "-I", include, "-x", "c", "-"], input=program(), text=True
    )
    if made.returncode == 0:
        what = f"{len(PROTOTYPES)} calls, {len(STRUCTURES)} structures, {len(CONSTANTS)} constants"
        print(f"{what}: as in {include}/cuda.h")
    return 1 if made.returncode else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2] or [INCLUDE]))
