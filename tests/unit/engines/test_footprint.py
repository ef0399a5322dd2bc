"""bench.footprint finds what a process keeps, wherever it is."""

import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from bench.footprint import copies, footprint, memory_files

MIB = 1 << 20
# Made by both sides, so that the pattern itself stands nowhere else: two copies in a memfd, three in private memory.
PATTERN = "bytes((i * i + 7 * i) % 251 for i in range(4096))"
CHILD = f"""
import mmap, os, sys
pattern = {PATTERN}
fd = os.memfd_create("thing")
os.ftruncate(fd, 64 << 20)
shared = mmap.mmap(fd, 64 << 20)
shared[0:4096] = pattern
shared[(32 << 20) + 5 : (32 << 20) + 5 + 4096] = pattern
own = mmap.mmap(-1, 80 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
own[(64 << 20) - 9 : (64 << 20) - 9 + 4096] = pattern
own[9:4105] = pattern
print("ready", flush=True)
sys.stdin.readline()
own[0 : 20 << 20] = bytes(20 << 20)
shared[1 << 20 : 9 << 20] = bytes(8 << 20)
del pattern
print("ready", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def child() -> Iterator[subprocess.Popen]:
    command = [sys.executable, "-c", CHILD]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        yield process
        process.stdin.close()


def test_copies_are_counted_in_shared_and_in_private_memory(child: subprocess.Popen) -> None:
    who = [psutil.Process(child.pid)]
    ((name, count),) = [(n, c) for n, c in copies(eval(PATTERN), who).items() if n != "private"]
    assert name.startswith("thing:") and count == 2
    # Two in its mapping, one of them across the border of two pieces; one that it wrote them from.
    assert copies(eval(PATTERN), who)["private"] == 3


def test_a_footprint_grows_by_what_is_written_once_whoever_maps_it(child: subprocess.Popen) -> None:
    who = [psutil.Process(child.pid)]
    before = footprint([*who, *who])
    assert before.shared == footprint(who).shared < MIB
    assert len(memory_files(who)) == 1
    child.stdin.write("more\n")
    child.stdin.flush()
    child.stdout.readline()
    after = footprint(who)
    assert 8 * MIB <= after.shared - before.shared < 9 * MIB
    assert after.private > 20 * MIB
