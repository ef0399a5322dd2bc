"""Fault points for the crash tests: a file `run/faults/<name>` ends the process there, once, as SIGKILL would.

Some say instead, once, that something is not as it should be.
"""

import os
import signal
from pathlib import Path


class Faults:
    """The fault points of one pool. The folder is the service account's, so nobody else can set one."""

    def __init__(self, run: Path):
        self._folder = run / "faults"
        self._path = str(self._folder)

    def arm(self, name: str) -> None:
        """The next `hit(name)` ends its process."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        (self._folder / name).touch(mode=0o600)

    def hit(self, name: str) -> None:
        """Die here if the point is armed."""
        if self.take(name):
            os.kill(os.getpid(), signal.SIGKILL)

    def take(self, name: str) -> bool:
        """Whether the point was armed. It is not any more."""
        # On the way of every call, so this costs one system call as long as nobody ever armed a point.
        if not os.path.isdir(self._path):
            return False
        try:
            (self._folder / name).unlink()
        except FileNotFoundError:
            return False
        return True
