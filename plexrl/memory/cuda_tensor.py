"""A torch tensor over given addresses, also where nothing is mapped yet.

By DLPack, whose layout is published and fixed: `__cuda_array_interface__` makes torch ask the driver whose memory the
address is, and reserved addresses are nobody's.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_int32, c_int64, c_uint8, c_uint16, c_uint64, c_void_p
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

CPU, CUDA = 1, 2
"""DLPack's numbers for kinds of devices."""

_UNSIGNED = 1
_NAME = b"dltensor"


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", c_void_p),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("ndim", c_int32),
        ("code", c_uint8),
        ("bits", c_uint8),
        ("lanes", c_uint16),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("byte_offset", c_uint64),
    )


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("manager", c_void_p), ("deleter", c_void_p))


_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype = ctypes.py_object
_capsule.argtypes = (c_void_p, ctypes.c_char_p, c_void_p)

# torch reads these after the call too, whenever a tensor dies. A process reserves a handful of regions in its life.
_alive: list[object] = []


def tensor_at(address: int, size: int, kind: int, index: int) -> Tensor:
    """uint8, 1-D, `size` bytes from `address` on; kind: CPU or CUDA, index: which GPU. It does not own the memory."""
    import torch

    shape = (c_int64 * 1)(size)
    managed = _Managed(_Tensor(address, kind, index, 1, _UNSIGNED, 8, 1, shape, None, 0), None, None)
    _alive.append((shape, managed))
    return torch.from_dlpack(_capsule(ctypes.addressof(managed), _NAME, None))
