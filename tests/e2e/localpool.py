"""A private pool, and the programs of tests/e2e/programs attached to it."""

import contextlib
import subprocess
import sys
from pathlib import Path

import psutil

import bench.localpool
from bench.localpool import finish, unprivileged

__all__ = ["LocalPool", "finish", "unprivileged"]

PROGRAMS = Path(__file__).parent / "programs"


class LocalPool(bench.localpool.LocalPool):
    """A pool named `test` under a folder of its own. Use as a context manager: nothing outlives it."""

    def __init__(self, root: Path, config: dict, gpus: int = 1):
        super().__init__(root, config, gpus)
        self._programs: list[subprocess.Popen[str]] = []

    def stop(self) -> None:
        """End it, and first the programs that a failed test left."""
        for process in self._programs:
            if process.poll() is None:
                for each in [*psutil.Process(process.pid).children(recursive=True), process]:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        each.kill()
                process.communicate()
        if self._process is not None and self._process.poll() is not None:
            self._process = None
            self.log.close()
        super().stop()

    def pid(self) -> int:
        """Of `plexrl pool run`."""
        assert self._process is not None
        return self._process.pid

    def returncode(self) -> int | None:
        """Of `plexrl pool run`; None while it runs."""
        assert self._process is not None
        return self._process.poll()

    def popen(self, program: str, *arguments: str, **env: str) -> subprocess.Popen[str]:
        """Start a program of tests/e2e/programs attached to the pool."""
        process = self.attach([sys.executable, str(PROGRAMS / program), *arguments], **env)
        self._programs.append(process)
        return process

    def run(self, program: str, *arguments: str, timeout: float = 240, **env: str) -> dict:
        """Run a program to its end; the JSON of its last line. Fails with its output otherwise."""
        return finish(self.popen(program, *arguments, **env), timeout)
