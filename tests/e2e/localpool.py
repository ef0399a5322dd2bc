"""A private pool, and the programs of tests/e2e/programs attached to it."""

import subprocess
import sys
from pathlib import Path

import bench.localpool
from bench.localpool import finish, unprivileged

__all__ = ["LocalPool", "finish", "unprivileged"]

PROGRAMS = Path(__file__).parent / "programs"


class LocalPool(bench.localpool.LocalPool):
    """A pool named `test` under a folder of its own. Use as a context manager: nothing outlives it."""

    def popen(self, program: str, *arguments: str, **env: str) -> subprocess.Popen[str]:
        """Start a program of tests/e2e/programs attached to the pool."""
        return self.attach([sys.executable, str(PROGRAMS / program), *arguments], **env)

    def run(self, program: str, *arguments: str, timeout: float = 100, **env: str) -> dict:
        """Run a program to its end; the JSON of its last line. Fails with its output otherwise."""
        return finish(self.popen(program, *arguments, **env), timeout)
