"""What stands in a slab beside the tensors: whether they are the whole state, so that others can go on from it."""

from __future__ import annotations

import zlib

import msgspec
import torch
from msgspec import Struct
from torch import Tensor

from plexrl.memory.manifest import Manifest
from plexrl.types import PlexrlError

_FRAME = 8
_encode = msgspec.msgpack.Encoder().encode


class Header(Struct, frozen=True):
    """form: of the tensors, as a checksum. zero: buckets whose bytes are all zero, whatever the slab holds.

    whole: the slab is the state: nothing of it is newer on a device, no call on it is half done.
    """

    form: int
    zero: tuple[str, ...] = ()
    whole: bool = False


def form_of(plan: Manifest) -> int:
    """A checksum over names, shapes, dtypes and places."""
    return zlib.crc32(_encode(plan.buckets))


def write(memory: Tensor, header: Header) -> None:
    """memory: uint8, layout.HEADER_BYTES. A process that dies in here leaves a header that `read` refuses."""
    payload = _encode(header)
    frame = len(payload).to_bytes(4, "little") + zlib.crc32(payload).to_bytes(4, "little") + payload
    memory[: len(frame)] = torch.frombuffer(bytearray(frame), dtype=torch.uint8)


def read(memory: Tensor, form: int) -> Header:
    """The header of a whole state of this form. Raises PlexrlError for anything else."""
    found = memory.numpy().tobytes()
    length, checksum = (int.from_bytes(found[at : at + 4], "little") for at in (0, 4))
    payload = found[_FRAME : _FRAME + length]
    if not payload or zlib.crc32(payload) != checksum:
        raise PlexrlError("the slab holds no state", "Restore the deployment from its last checkpoint")
    header = msgspec.msgpack.decode(payload, type=Header)
    if header.form != form:
        raise PlexrlError("the slab holds a state of another form", "Give the settings that it was created with")
    if not header.whole:
        raise PlexrlError(
            "the state in the slab is not whole: some of it was on a device, or a call was half done",
            "Restore the deployment from its last checkpoint",
        )
    return header
