"""How agents and engine hosts find the head: run/control.json, with its address, key and epoch; and its keys. 0600."""

import os
from pathlib import Path

import msgspec
from msgspec import Struct

from plexrl.types import Epoch, Unavailable
from plexrl.wire.keys import Keys


class Control(Struct, frozen=True, kw_only=True):
    """The head's inner address for agents and engine hosts. server_key: z85."""

    address: str
    server_key: str
    epoch: Epoch


def write_control(path: Path, control: Control) -> None:
    """Replace the file at once, 0600."""
    replace(path, msgspec.json.encode(control))


def replace(path: Path, data: bytes) -> None:
    """Write a file that nobody ever sees half, 0600."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def read_control(path: Path) -> Control:
    """Raises Unavailable while no head has written it."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Control)
    except FileNotFoundError:
        raise Unavailable(f"no head has written {path} yet") from None


def keys_of(path: Path, keep: bool) -> Keys:
    """A key pair per start of the pool; a head that follows another in one allocation keeps it."""
    if not keep or not path.exists():
        path.unlink(missing_ok=True)
        Keys.generate().save(path)
    return Keys.load(path)
