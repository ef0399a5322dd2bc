"""Devices and arenas on fresh memfds that are closed again."""

import os

import pytest

from plexrl.memory.pages import create_memfd


@pytest.fixture
def memfd():
    """create_memfd whose descriptors are closed at the end."""
    made = []

    def make(size: int) -> int:
        made.append(create_memfd("test", size))
        return made[-1]

    yield make
    for fd in made:
        os.close(fd)


@pytest.fixture
def ending():
    """Run a function in a forked child; returns the signal that ended it, 0 when none did."""
    import faulthandler

    def run(function) -> int:
        pid = os.fork()
        if pid == 0:
            faulthandler.disable()
            function()
            os._exit(0)
        return os.WTERMSIG(os.waitpid(pid, 0)[1])

    return run
