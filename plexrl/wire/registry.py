"""The registry: two small JSON files per pool in a directory that only root and the service accounts can write.

`NAME.json` declares a pool for good; `NAME.live.json` says where its head is now. What they say decides whom a job's
proxy talks to, so a file that anybody else could have written, or that hides behind a link, is refused and not read.
"""

import os
import re
import stat
import tempfile
from typing import Literal, TypeVar

import msgspec

from plexrl.types import POOL_NAME, BadInput, Unavailable

_MAX_BYTES = 64 * 1024
_DECLARED = ".json"
_LIVE = ".live.json"


class Declared(msgspec.Struct, frozen=True, kw_only=True):
    """A pool that exists, whether it runs or not.

    owner_uid: the account that the pool runs as: the service account of a site pool, the user of a private one.
    Only files of that account (or root) may say where the pool's head is. config, state_dir: absolute paths.
    """

    name: str
    kind: Literal["site", "private"]
    owner_uid: int
    config: str
    state_dir: str


class Live(msgspec.Struct, frozen=True, kw_only=True):
    """Where the head of a pool is.

    instance: differs for each start of the head. address: `tcp://host:port` or `ipc://path`. server_key: z85, public.
    nonce: what a credential must contain to be good for this head. service_uid: whom credentials are restricted to.
    slurm_job: the pool's Slurm job, 0 without Slurm. epoch: `str(types.Epoch)`.
    """

    name: str
    instance: str
    state: Literal["starting", "ready", "draining"]
    address: str
    server_key: str
    nonce: str
    service_uid: int
    slurm_job: int
    epoch: str


T = TypeVar("T", Declared, Live)


class Registry:
    """The pools under one directory. pool_uids: the accounts, beside root, whose files are believed."""

    def __init__(self, directory: str | os.PathLike[str], pool_uids: frozenset[int]) -> None:
        self.directory = os.fspath(directory)
        self.pool_uids = frozenset(pool_uids)
        self._trusted = self.pool_uids | {0}

    def declare(self, declared: Declared) -> None:
        """Write `NAME.json`. Raises BadInput for a bad name or a directory that cannot be trusted."""
        self._write(_checked(declared.name) + _DECLARED, msgspec.json.encode(declared))

    def declared(self, name: str) -> Declared:
        """The declaration of a pool. Raises BadInput, naming the pools there are, when it is not declared."""
        found = self._read(_checked(name) + _DECLARED)
        if found is None:
            known = ", ".join(self.names()) or "none"
            raise BadInput(
                f"pool {name!r} is not declared in {self.directory}", f"Use one of the declared pools: {known}"
            )
        return self._decode(found[0], Declared, name, _DECLARED)

    def names(self) -> tuple[str, ...]:
        """The declared pools, sorted."""
        directory = self._open_directory()
        try:
            entries = os.listdir(directory)
        finally:
            os.close(directory)
        names = (entry.removesuffix(_DECLARED) for entry in entries if entry.endswith(_DECLARED))
        return tuple(sorted(name for name in names if re.fullmatch(POOL_NAME, name)))

    def live(self, name: str) -> Live | None:
        """Where the pool's head is; None while there is none.

        Raises BadInput when the pool is not declared, or when the file is not the work of the account that the
        declaration names: one service account must not be able to speak for another one's pool.
        """
        declared = self.declared(name)
        found = self._read(_checked(name) + _LIVE)
        if found is None:
            return None
        live = self._decode(found[0], Live, name, _LIVE)
        if live.service_uid != declared.owner_uid or found[1] not in (declared.owner_uid, 0):
            raise BadInput(
                f"{self._path(name + _LIVE)} was written by uid {found[1]} for service uid {live.service_uid}, "
                f"but pool {name!r} is declared for uid {declared.owner_uid}",
                "Start the pool as the declared account, or correct the declaration",
            )
        return live

    def publish(self, live: Live) -> None:
        """Replace `NAME.live.json` in one step."""
        self._write(_checked(live.name) + _LIVE, msgspec.json.encode(live))

    def withdraw(self, name: str, instance: str | None = None) -> None:
        """Remove `NAME.live.json`; with an instance only if it is still that one's, a successor's file stays."""
        if instance is not None:
            found = self._read(_checked(name) + _LIVE)
            if found is None or self._decode(found[0], Live, name, _LIVE).instance != instance:
                return
        directory = self._open_directory()
        try:
            os.unlink(_checked(name) + _LIVE, dir_fd=directory)
        except FileNotFoundError:
            return
        finally:
            os.close(directory)

    def _path(self, entry: str) -> str:
        return os.path.join(self.directory, entry)

    def _decode(self, raw: bytes, kind: type[T], name: str, suffix: str) -> T:
        path = self._path(name + suffix)
        try:
            value = msgspec.json.decode(raw, type=kind)
        except msgspec.MsgspecError as error:
            raise BadInput(f"{path} is damaged: {error}", "Declare or start the pool again") from error
        if value.name != name:
            raise BadInput(f"{path} is about pool {value.name!r}", f"Rename it to {value.name}{suffix}")
        return value

    def _open_directory(self) -> int:
        try:
            fd = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise Unavailable(
                f"the registry {self.directory} does not exist", "Name the right directory, or have the admin create it"
            ) from error
        except OSError as error:
            raise BadInput(
                f"the registry {self.directory} cannot be opened ({error.strerror})",
                "It must be a directory and not a link, readable by everyone",
            ) from error
        try:
            self._trust(fd, self.directory)
        except BadInput:
            os.close(fd)
            raise
        return fd

    def _trust(self, fd: int, path: str) -> os.stat_result:
        status = os.fstat(fd)
        if status.st_uid not in self._trusted:
            uids = ", ".join(str(uid) for uid in sorted(self._trusted))
            raise BadInput(
                f"{path} belongs to uid {status.st_uid}, which is none of the trusted accounts ({uids})",
                "Have the admin chown it, or add the account to pool_uids",
            )
        if status.st_mode & 0o022:
            raise BadInput(
                f"{path} can be written by group or others (mode {stat.S_IMODE(status.st_mode):04o})",
                f"Run: chmod go-w {path}",
            )
        return status

    def _read(self, entry: str) -> tuple[bytes, int] | None:
        """Bytes and owner uid of a trusted file, None when it is not there."""
        directory = self._open_directory()
        path = self._path(entry)
        try:
            # O_NONBLOCK: a FIFO in its place must not hang the reader.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            fd = os.open(entry, flags, dir_fd=directory)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise BadInput(
                f"{path} cannot be opened ({error.strerror})", "It must be a plain file and not a link, readable by all"
            ) from error
        finally:
            os.close(directory)
        try:
            status = self._trust(fd, path)
            if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_BYTES:
                raise BadInput(f"{path} is no plain file of at most {_MAX_BYTES} bytes", "Remove it")
            return os.read(fd, _MAX_BYTES), status.st_uid
        finally:
            os.close(fd)

    def _write(self, entry: str, content: bytes) -> None:
        directory = self._open_directory()
        temporary = ""
        try:
            fd, temporary = tempfile.mkstemp(prefix=f".{entry}.", dir=self.directory)
            with os.fdopen(fd, "wb") as file:
                os.fchmod(fd, 0o644)
                file.write(content)
                file.flush()
                os.fsync(fd)
            os.rename(temporary, self._path(entry))
            temporary = ""
            os.fsync(directory)
        except OSError as error:
            raise Unavailable(
                f"{self._path(entry)} cannot be written ({error.strerror})",
                "The registry must be writable by the account that declares or starts the pool",
            ) from error
        finally:
            os.close(directory)
            if temporary:
                os.unlink(temporary)


def _checked(name: str) -> str:
    if not re.fullmatch(POOL_NAME, name):
        raise BadInput(f"{name!r} is no valid pool name", "Use 1 to 32 of a-z, 0-9, _ and -, beginning with a letter")
    return name
