"""A version's weights from its folder back into a slab, as its trainer had packed them. No torch: an agent does it."""

import math
import os
from pathlib import Path

from plexrl.engines import layout
from plexrl.memory.arena import Arena
from plexrl.pool.messages import Fill
from plexrl.types import BadInput, PlexrlError, Slab

_DTYPES = {"float32": "F32", "bfloat16": "BF16"}


def fill(arena: Arena, order: Fill, numa: int | None) -> Slab:
    """The slab that the order asks for. Raises DoesNotFit without room, BadInput for a folder of something else."""
    known = arena.get(order.name)
    if known is not None:
        return known
    arch = layout.architecture(order.model_dir)
    specs = layout.weight_specs(arch, order.dtype, order.lora_rank, order.attn, order.mlp, order.unembed)
    file = "model.safetensors" if order.lora_rank is None else "adapter_model.safetensors"
    slab = arena.alloc(order.name, layout.packed(specs), order.owner, numa)
    try:
        with arena.bytes_of(slab) as memory:
            read(Path(order.folder) / file, specs, memory)
    except BaseException:
        arena.free(order.name)
        raise
    return slab


def read(path: Path, specs: list[layout.Spec], memory: memoryview) -> None:
    """The tensors of a safetensors file into memory, laid out as a bucket of `specs`.

    Raises BadInput when it cannot be read or has other tensors, PlexrlError when it ends too early.
    """
    entries = layout.header(path)
    at = 0
    try:
        with path.open("rb", buffering=0) as file:
            begin = 8 + int.from_bytes(file.read(8), "little")
            for name, shape, dtype in specs:
                entry = entries.get(name, {})
                if (entry.get("dtype"), tuple(entry.get("shape", ()))) != (_DTYPES[dtype], shape):
                    raise BadInput(f"{path} has no {name} of {dtype}{list(shape)}", "Publish the version again")
                start, end = entry["data_offsets"]
                _read(file.fileno(), memory[at : at + end - start], begin + start)
                at += layout.align(math.prod(shape) * layout.ITEMSIZE[dtype])
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}", "Publish the version again") from error


def _read(fd: int, memory: memoryview, offset: int) -> None:
    """All of it: one call reads no more than about 2 GiB."""
    done = 0
    while done < len(memory):
        count = os.preadv(fd, [memory[done:]], offset + done)
        if count == 0:
            raise PlexrlError("the file of the version ends too early", "Publish the version again")
        done += count
