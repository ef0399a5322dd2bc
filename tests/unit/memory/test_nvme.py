"""The NVMe tier: what comes back is what went, or is named as damaged; nothing is lost when the disk is full."""

import os
import re
import resource
import signal
import stat
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from plexrl.memory import nvmefile
from plexrl.memory.arena import Arena
from plexrl.memory.nvme import Damaged, Tier
from plexrl.memory.nvmefile import CHUNK, header_bytes
from plexrl.memory.pages import PAGE
from plexrl.types import BadInput, DoesNotFit, PlexrlError

SIZE = 3 * CHUNK + 16 * PAGE
GIB = 1 << 30


@pytest.fixture
def place(memfd, tmp_path):
    arena = Arena(memfd(SIZE), SIZE)
    tier = Tier(arena, tmp_path / "nvme", GIB)
    yield arena, tier
    tier.close()
    assert list((tmp_path / "nvme").iterdir()) == []


def filled(arena: Arena, name: str, size: int, seed: int = 1) -> bytes:
    """A slab of random bytes; its bytes."""
    drawn = np.random.default_rng(seed).bytes(size)
    arena.bytes_of(arena.alloc(name, size, 1001))[:size] = drawn
    return drawn


def held(arena: Arena, name: str) -> bytes:
    slab = arena.get(name)
    return bytes(arena.bytes_of(slab)[: slab.size])


def the_file(tmp_path: Path) -> Path:
    (file,) = (tmp_path / "nvme").glob("*/*")
    return file


@contextmanager
def disk_of(size: int):
    """No file may grow beyond `size` bytes: writes come short, then fail."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("size", [1, PAGE, 5 * PAGE + 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3 * PAGE])
@pytest.mark.parametrize("direct", [True, False])
def test_there_and_back(place, size, direct):
    arena, tier = place
    tier.direct &= direct
    drawn = filled(arena, "state:a:0", size)
    moved, seconds = tier.spill("state:a:0")
    assert moved == size and seconds > 0
    assert tier.names() == ("state:a:0",) and arena.slabs() == () and arena.free_bytes() == SIZE
    assert arena.alloc("b", 100, 1002).offset == 0 and not any(held(arena, "b"))
    assert tier.spill("state:a:0") == (0, 0.0)
    slab, moved, seconds = tier.refill("state:a:0")
    assert (slab.size, slab.owner, moved) == (size, 1001, size) and seconds > 0
    assert slab.offset > 0 and held(arena, "state:a:0") == drawn
    assert tier.refill("state:a:0") == (slab, 0, 0.0)
    assert tier.names() == () and tier.free_bytes() == GIB


def test_files_are_the_accounts_alone_and_their_names_say_nothing(place, tmp_path):
    arena, tier = place
    filled(arena, "state:alice's secret model:0", 100)
    tier.spill("state:alice's secret model:0")
    file = the_file(tmp_path)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in (file.parent, file.parent.parent)] == [0o700, 0o700]
    assert re.fullmatch(r"[0-9a-f]{32}", file.name) and b"alice" not in file.read_bytes()
    assert tier.free("state:alice's secret model:0") and not file.exists()
    assert not tier.free("state:alice's secret model:0")


@pytest.mark.parametrize("where", ["start", "token", "sums", "first", "middle", "last"])
def test_a_flipped_bit_is_found_and_named(place, tmp_path, where):
    arena, tier = place
    drawn = filled(arena, "a", 2 * CHUNK + PAGE)
    tier.spill("a")
    file, start = the_file(tmp_path), header_bytes(2 * CHUNK + PAGE)
    at, chunk = {
        "start": (3, -1),
        "token": (30, -1),
        "sums": (44, -1),
        "first": (start, 0),
        "middle": (start + CHUNK + 12345, 1),
        "last": (start + 2 * CHUNK + PAGE - 1, 2),
    }[where]
    flip(file, at)
    with pytest.raises(Damaged, match=re.escape(str(file))) as found:
        tier.refill("a")
    assert (found.value.file, found.value.chunk) == (file, chunk)
    assert re.search(r"expected checksum [0-9a-f]{16}, found [0-9a-f]{16}", str(found.value))
    assert "checkpoint" in found.value.mend
    # The arena is as it was, and the damage is not forgotten.
    assert arena.slabs() == () and not any(arena.bytes_of(arena.alloc("all", SIZE, 7)))
    arena.free("all")
    assert tier.names() == ("a",)
    flip(file, at)
    tier.refill("a")
    assert held(arena, "a") == drawn


def flip(file: Path, at: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(at)
        byte = opened.read(1)[0]
        opened.seek(at)
        opened.write(bytes([byte ^ 0x10]))


def test_a_file_that_is_cut_gone_or_anothers_is_damaged(place, tmp_path):
    arena, tier = place
    for name in "ab":
        filled(arena, name, CHUNK + PAGE, seed=ord(name))
        tier.spill(name)
    mine, theirs = (tier._path(tier._known[name]) for name in "ab")
    whole = mine.read_bytes()
    for found, said in ((whole[:-PAGE], "bytes"), (theirs.read_bytes(), "another one")):
        mine.write_bytes(found)
        with pytest.raises(Damaged, match=said):
            tier.refill("a")
    mine.unlink()
    with pytest.raises(Damaged, match="No such file"):
        tier.refill("a")
    mine.symlink_to(theirs)
    with pytest.raises(Damaged):
        tier.refill("a")
    assert arena.slabs() == ()
    tier.refill("b")


@pytest.mark.parametrize("room", [0, PAGE, CHUNK + 8 * PAGE, CHUNK + 100, header_bytes(2 * CHUNK) + 2 * CHUNK - PAGE])
@pytest.mark.parametrize("direct", [True, False])
def test_nothing_is_lost_when_a_write_fails(place, tmp_path, room, direct):
    arena, tier = place
    tier.direct &= direct
    drawn = filled(arena, "a", 2 * CHUNK)
    slab = arena.get("a")
    with disk_of(room), pytest.raises(PlexrlError, match="'a'"):
        tier.spill("a")
    assert arena.get("a") == slab and held(arena, "a") == drawn
    assert tier.names() == () and tier.free_bytes() == GIB and not list((tmp_path / "nvme").glob("*/*"))
    tier.spill("a")
    tier.refill("a")
    assert held(arena, "a") == drawn


def test_the_budget_is_kept_and_told(memfd, tmp_path):
    arena = Arena(memfd(SIZE), SIZE)
    file = header_bytes(PAGE) + PAGE
    tier = Tier(arena, tmp_path, 2 * file)
    for name in "abc":
        filled(arena, name, PAGE)
    tier.spill("a")
    tier.spill("b")
    assert tier.free_bytes() == 0
    with pytest.raises(DoesNotFit, match=f"'c' needs {file} bytes.* 0 of {2 * file} are left of nvme.bytes"):
        tier.spill("c")
    assert arena.get("c") is not None
    tier.free("a")
    tier.spill("c")
    tier.close()


def test_a_full_arena_leaves_the_file_where_it_is(place):
    arena, tier = place
    drawn = filled(arena, "a", 4 * PAGE)
    tier.spill("a")
    arena.alloc("all", SIZE, 1)
    with pytest.raises(DoesNotFit, match="host arena"):
        tier.refill("a")
    arena.free("all")
    tier.refill("a")
    assert held(arena, "a") == drawn


def test_what_is_not_there_is_refused(place):
    _, tier = place
    for verb in (tier.spill, tier.refill):
        with pytest.raises(BadInput, match="'none'"):
            verb("none")


def test_more_than_the_disk_has_is_refused_at_start(memfd, tmp_path):
    arena = Arena(memfd(SIZE), SIZE)
    with pytest.raises(DoesNotFit, match=rf"nvme.bytes is {1 << 60}, the disk of .* has \d+ bytes free"):
        Tier(arena, tmp_path, 1 << 60)
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_others_reach_is_refused(memfd, tmp_path):
    arena = Arena(memfd(SIZE), SIZE)
    tmp_path.chmod(0o755)
    with pytest.raises(BadInput, match="mode 755.*mode 700"):
        Tier(arena, tmp_path, GIB)
    tmp_path.chmod(0o700)
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "file").touch()
    for name in ("link", "file", "file/below"):
        with pytest.raises(BadInput, match="cannot be used"):
            Tier(arena, tmp_path / name, GIB)


AGENT = """
import os, sys, time
from plexrl.memory.arena import Arena
from plexrl.memory.nvme import Tier
from plexrl.memory.pages import create_memfd
arena = Arena(create_memfd("a", 1 << 20), 1 << 20)
tier = Tier(arena, sys.argv[1], 1 << 24)
arena.bytes_of(arena.alloc("a", 9000, 1001))[:9000] = b"\\xa5" * 9000
tier.spill("a")
print("spilled", flush=True)
time.sleep(60)
"""


def test_what_a_killed_agent_left_the_next_one_removes_and_no_other(memfd, tmp_path):
    path = tmp_path / "nvme"
    alive, dead = (
        subprocess.Popen([sys.executable, "-c", AGENT, str(path)], stdout=subprocess.PIPE, text=True) for _ in "ab"
    )
    try:
        assert alive.stdout.readline() == dead.stdout.readline() == "spilled\n"
        assert len(list(path.glob("*/*"))) == 2
        dead.send_signal(signal.SIGKILL)
        dead.wait()
        kept = path / "notes"
        kept.mkdir()
        tier = Tier(Arena(memfd(SIZE), SIZE), path, GIB)
        assert len(list(path.glob("agent-*"))) == 2 and len(list(path.glob("agent-*/*"))) == 1 and kept.exists()
        tier.close()
    finally:
        for process in (alive, dead):
            process.kill()
            process.wait()
            process.stdout.close()


def test_an_end_breaks_off_a_spill(memfd, tmp_path):
    arena = Arena(memfd(SIZE), SIZE)
    tier = Tier(arena, tmp_path, GIB)
    drawn = filled(arena, "a", 2 * CHUNK)
    tier._ended.set()
    with pytest.raises(PlexrlError, match="the agent ends"):
        tier.spill("a")
    assert held(arena, "a") == drawn
    tier.close()
    assert list(tmp_path.iterdir()) == []


def test_spills_leave_no_descriptor_mapping_or_thread(place):
    arena, tier = place

    def counts():
        tasks = len(os.listdir("/proc/self/task"))
        return len(os.listdir("/proc/self/fd")), len(Path("/proc/self/maps").read_text().splitlines()), tasks

    filled(arena, "a", 2 * CHUNK)
    for _ in range(3):
        tier.spill("a")
        tier.refill("a")
    before = counts()
    for _ in range(20):
        tier.spill("a")
        tier.refill("a")
    assert counts() == before


def test_file_systems_without_direct_io_are_told(memfd, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(nvmefile, "supports_direct", lambda folder: False)
    arena = Arena(memfd(SIZE), SIZE)
    tier = Tier(arena, tmp_path, GIB)
    assert "page cache" in caplog.text and not tier.direct
    drawn = filled(arena, "a", CHUNK + PAGE)
    tier.spill("a")
    tier.refill("a")
    assert held(arena, "a") == drawn
    tier.close()
