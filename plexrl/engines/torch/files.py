"""Saved states: a folder of safetensors, written whole or not at all."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from plexrl.engines.layout import header
from plexrl.engines.protocol import UserError
from plexrl.engines.torch.pieces import Pieces
from plexrl.types import DoesNotFit, PlexrlError

_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64", torch.uint8: "U8"}
_FLOATS = {"F32", "BF16"}
SPARE = "master."
"""Names in a saved optimizer of what only some engines keep, and make of the weights where it is not there."""


@contextmanager
def replacing(folder: Path):
    """A temporary folder beside `folder` that takes its place at the end; on any error the old one stays as it is.

    Raises DoesNotFit when the disk is full, or a quota or file size limit reached.
    """
    work: Path | None = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        yield work
        _sync(work)
        if folder.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{folder.name}.old.", dir=folder.parent))
            os.rename(folder, old / "was")
            try:
                os.rename(work, folder)
            except OSError:
                os.rename(old / "was", folder)
                raise
            finally:
                shutil.rmtree(old, ignore_errors=True)
        else:
            os.rename(work, folder)
        _sync(folder.parent)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise DoesNotFit(
                f"the disk is full or a size limit reached ({error.strerror}): nothing was saved to {folder}",
                "Free space and save again",
            ) from error
        raise PlexrlError(f"cannot save to {folder}: {error}") from error
    finally:
        if work is not None:
            shutil.rmtree(work, ignore_errors=True)


def write_tensors(path: Path, pieces: Pieces, tensors: Iterable[Tensor], metadata: Mapping[str, str]) -> None:
    """One safetensors file (the format: length, JSON header, bytes), straight from the tensors' memory.

    tensors: the whole ones, in the order of pieces. Those of a GPU come to the host one by one.
    """
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    at = 0
    for name, piece in pieces.items():
        size = math.prod(piece.shape) * piece.dtype.itemsize
        entries[name] = {"dtype": _NAMES[piece.dtype], "shape": list(piece.shape), "data_offsets": [at, at + size]}
        at += size
    head = json.dumps(entries, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    with path.open("wb") as file:
        file.write(len(head).to_bytes(8, "little"))
        file.write(head)
        for tensor in tensors:
            file.write(memoryview(tensor.detach().reshape(-1).view(torch.uint8).cpu().numpy()))
        file.flush()
        os.fsync(file.fileno())


def check_tensors(path: Path, wanted: Pieces, spare: str = "", converts: bool = False) -> None:
    """Raises UserError unless the file has exactly these names, shapes and dtypes.

    spare: names that begin so may be in one and not in the other. converts: floats of another width will do.
    """
    if not path.is_file():
        raise UserError(f"the saved state has no {path.name}", "Load a state that was saved with it")
    entries = header(path)
    odd = sorted(name for name in entries.keys() ^ wanted.keys() if not spare or not name.startswith(spare))
    if odd:
        raise UserError(
            f"the saved state is of another kind of model: {odd[0]}", "Load it into a model of its own shape"
        )
    for name in entries.keys() & wanted.keys():
        piece = wanted[name]
        have = (entries[name]["dtype"], tuple(entries[name]["shape"]))
        mine = (_NAMES[piece.dtype], tuple(piece.shape))
        if have != mine and not (converts and {have[0], mine[0]} <= _FLOATS and have[1] == mine[1]):
            raise UserError(
                f"the saved {name} is {have[0]}{list(have[1])}, the model's {mine[0]}{list(mine[1])}",
                "Create the model with the rank and dtype of the saved one",
            )


def read_tensors(path: Path, into: Pieces) -> set[str]:
    """Copy a checked file's tensors; the names that it has. Raises PlexrlError when it cannot be read."""
    try:
        with safe_open(str(path), framework="pt") as tensors:
            found = set(tensors.keys()) & into.keys()
            for name in found:
                into[name].take(tensors.get_tensor(name))
    except (OSError, SafetensorError) as error:
        raise PlexrlError(f"cannot read {path.name}: {error}", "Load another saved state") from error
    return found


def copy_files(model_dir: str, work: Path, names: Iterable[str]) -> None:
    """Take along what makes the folder a model of its own: configuration and tokenizer, as far as they are there."""
    for name in names:
        source = Path(model_dir) / name
        if source.is_file():
            shutil.copyfile(source, work / name)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
