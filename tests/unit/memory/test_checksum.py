"""The checksum of a version: small ones whole, of large ones other places with every name."""

import os

import pytest

from plexrl.memory import checksum as c
from plexrl.memory.pages import create_memfd
from plexrl.types import PlexrlError


@pytest.fixture
def fd():
    fd = create_memfd("version", c.WHOLE + 8 * c.CHUNK)
    yield fd
    os.close(fd)


def flip(fd: int, at: int) -> None:
    (byte,) = os.pread(fd, 1, at)
    os.pwrite(fd, bytes([byte ^ 1]), at)


@pytest.mark.parametrize("at", [0, 4999, c.CHUNK + 7, 3 * c.CHUNK + 99])
def test_every_bit_of_a_small_version_counts(fd, at):
    size = 3 * c.CHUNK + 100
    os.pwrite(fd, os.urandom(size), 4096)
    whole = c.checksum(fd, 4096, size, "v")
    assert whole == c.checksum(fd, 4096, size, "v") and whole.startswith("xxh3:")
    flip(fd, 4096 + at)
    assert c.checksum(fd, 4096, size, "v") != whole
    flip(fd, 4096 + at)
    assert c.checksum(fd, 4096, size, "v") == whole


def test_another_name_or_size_is_another_version(fd):
    sums = {c.checksum(fd, 0, size, name) for size in (100, 101) for name in "vw"}
    assert len(sums) == 4


def test_of_a_large_one_all_places_are_read_over_some_versions(fd):
    size = c.WHOLE + 8 * c.CHUNK
    seen = set()
    for number in range(200):
        starts = c._starts(size, f"v{number}", c.EVERY)
        assert len(starts) <= size / c.CHUNK / c.EVERY + 2 and starts[-1] == size - c.CHUNK
        seen |= set(starts)
    assert seen == set(range(0, size, c.CHUNK))
    before = c.checksum(fd, 0, size, "v0")
    flip(fd, c._starts(size, "v0", c.EVERY)[0])
    assert c.checksum(fd, 0, size, "v0") != before


def test_a_file_that_is_too_short(fd):
    with pytest.raises(PlexrlError, match="ends before byte"):
        c.checksum(fd, 0, c.WHOLE + 9 * c.CHUNK, "v")
