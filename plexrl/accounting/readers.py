"""Who may see more than the own jobs, as Slurm has it: operators the whole, coordinators their accounts."""

import pwd
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec
from msgspec import Struct

from plexrl.slurm.adapter import Person, Slurm
from plexrl.types import PlexrlError

_FRESH_S = 600.0  # sacctmgr is asked no more often, so that long is a coordinator who is no more one
_FILE = "readers.json"
_ADMINS = ("Operator", "Administrator")


class Readers(Struct, frozen=True):
    """operators: uids. coordinated: uid -> accounts."""

    operators: frozenset[int] = frozenset()
    coordinated: dict[int, frozenset[str]] = {}


def readers(people: Iterable[Person]) -> Readers:
    """Those of the people that have a uid on this machine."""
    operators, coordinated = set(), {}
    for person in people:
        try:
            uid = pwd.getpwnam(person.name).pw_uid
        except KeyError:
            continue
        if person.admin_level in _ADMINS:
            operators.add(uid)
        if person.coordinates:
            coordinated[uid] = frozenset(person.coordinates)
    return Readers(frozenset(operators), coordinated)


def kept(folder: Path) -> Readers:
    """As they were last asked for; nobody before that."""
    try:
        return msgspec.json.decode((folder / _FILE).read_bytes(), type=Readers)
    except (OSError, msgspec.MsgspecError):
        return Readers()


def asked(slurm: Slurm, folder: Path, anew: bool = False) -> Readers:
    """As Slurm has them now; where it does not answer, or was asked a moment ago and not `anew`, as they were then."""
    path = folder / _FILE
    if not anew and path.exists() and abs(time.time() - path.stat().st_mtime) < _FRESH_S:
        return kept(folder)
    if not shutil.which("sacctmgr"):
        return kept(folder)
    try:
        found = readers(slurm.people())
    except PlexrlError:
        return kept(folder)
    temporary = path.with_suffix(".new")
    temporary.write_bytes(msgspec.json.encode(found))
    temporary.chmod(0o600)
    temporary.rename(path)
    return found
