"""CURVE key pairs and the private files that they are kept in."""

import os

import msgspec
import zmq

from plexrl.types import BadInput


class Keys(msgspec.Struct, frozen=True):
    """A CURVE key pair, each half as 40 characters of z85."""

    public: str
    secret: str

    @classmethod
    def generate(cls) -> "Keys":
        """A new pair."""
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())

    def __repr__(self) -> str:
        return f"Keys(public={self.public!r})"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the pair to a new file, mode 0600. Raises BadInput when the path exists or cannot be written."""
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise BadInput(f"cannot write keys to {path} ({error.strerror})", "Name a new file") from error
        with os.fdopen(fd, "wb") as file:
            file.write(msgspec.json.encode(self))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Keys":
        """Read a pair. Raises BadInput when the file is another account's, readable by others, a link or damaged."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise BadInput(f"cannot read keys from {path} ({error.strerror})", "Start the pool again") from error
        with os.fdopen(fd, "rb") as file:
            status = os.fstat(fd)
            if status.st_uid != os.geteuid() or status.st_mode & 0o077:
                raise BadInput(f"{path} is not private to this account", "Remove it and start the pool again")
            try:
                return msgspec.json.decode(file.read(4096), type=cls)
            except msgspec.MsgspecError as error:
                raise BadInput(f"{path} holds no keys: {error}", "Remove it and start the pool again") from error
