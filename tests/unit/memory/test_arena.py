"""The host arena: slabs by name, cleared before anybody else sees them, one mapping per engine host."""

import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from plexrl.memory import room
from plexrl.memory.arena import Arena, ArenaMap
from plexrl.memory.pages import PAGE
from plexrl.types import BadInput, DoesNotFit, Slab

SIZE = 16 * PAGE


@pytest.fixture
def arena(memfd):
    fd = memfd(SIZE)
    made = Arena(fd, SIZE)
    yield made, ArenaMap(fd, SIZE)
    made.close()


def test_alloc_is_idempotent_by_name(arena):
    agent, _ = arena
    slab = agent.alloc("a", 100, 1001)
    assert agent.alloc("a", 100, 1001) == slab == Slab("a", 0, 100, 1001)
    assert agent.slabs() == (slab,) and agent.free_bytes() == SIZE - PAGE
    for size, owner in ((101, 1001), (100, 1002)):
        with pytest.raises(BadInput, match="'a'"):
            agent.alloc("a", size, owner)
    for name, size in (("", 1), ("b", 0)):
        with pytest.raises(BadInput):
            agent.alloc(name, size, 1001)


def test_what_does_not_fit_is_refused_with_figures(arena):
    agent, _ = arena
    for i in range(4):
        agent.alloc(f"s{i}", 4 * PAGE, 1001)
    agent.free("s0")
    agent.free("s2")
    with pytest.raises(DoesNotFit, match=f"needs {5 * PAGE} .* {8 * PAGE} of {SIZE} are free.* has {4 * PAGE}"):
        agent.alloc("big", 5 * PAGE, 1001)
    agent.free("s1")
    assert agent.alloc("big", 12 * PAGE, 1001).offset == 0


def test_a_freed_slab_is_cleared_at_once(arena):
    agent, host = arena
    view = host.view(agent.alloc("a", 2 * PAGE - 100, 1001))
    view.fill_(0xA5)
    kept = host.view(agent.alloc("b", PAGE, 1001))
    kept.fill_(3)
    assert agent.free("a") is True and agent.free("a") is False
    assert not view.any() and (kept == 3).all()
    assert not host.view(agent.alloc("c", 2 * PAGE, 1002)).any()


def test_large_slabs_are_cleared_to_the_last_byte(memfd):
    size = 384 << 20
    agent = Arena(memfd(size), size)
    slab = agent.alloc("a", (256 << 20) + 5 * PAGE + 1, 1001)
    beside = agent.alloc("b", PAGE, 1002)
    for each in (slab, beside):
        with agent.bytes_of(each) as data:
            data[::PAGE] = b"\xa5" * (len(data) // PAGE)
    agent.free("a")
    with agent.bytes_of(slab) as data, agent.bytes_of(beside) as kept:
        assert not any(data[::PAGE]) and kept[0] == 0xA5
    agent.close()


def test_the_shared_base_cannot_be_written_through_a_readonly_view(arena, ending):
    agent, host = arena
    slab = agent.alloc("base", PAGE, -1)
    host.view(slab).fill_(9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        base = host.view(slab, readonly=True)
    assert (base == 9).all()
    assert ending(lambda: base.fill_(1)) == signal.SIGSEGV
    assert (base == 9).all()


@pytest.mark.parametrize("slab", [Slab("x", SIZE, 1, 0), Slab("x", 0, SIZE + 1, 0), Slab("x", -64, 64, 0)])
def test_a_slab_of_another_arena_is_refused(arena, slab):
    with pytest.raises(BadInput, match="outside"):
        arena[1].view(slab)


def test_files_of_another_size_are_refused(memfd):
    fd = memfd(SIZE)
    for kind in (Arena, ArenaMap):
        with pytest.raises(BadInput):
            kind(fd, 2 * SIZE)
    with pytest.raises(BadInput, match=str(PAGE)):
        Arena(memfd(PAGE + 1), PAGE + 1)


def test_views_are_aligned_bytes(arena):
    agent, host = arena
    agent.alloc("a", 1, 1001)
    view = host.view(agent.alloc("b", 1000, 1001))
    assert view.dtype == torch.uint8 and view.shape == (1000,) and view.data_ptr() % PAGE == 0


def test_neither_the_agent_nor_the_head_imports_torch():
    code = (
        "import sys; from plexrl.memory.device import create_memfd; from plexrl.memory.arena import Arena\n"
        "from plexrl.memory.manifest import Manifest, TensorSpec; import plexrl.memory.resident\n"
        "a = Arena(create_memfd('a', 1 << 16), 1 << 16); a.alloc('s', 100, 1); a.free('s')\n"
        "Manifest.build({'w': [TensorSpec('x', (3,), 'float32')]}).size\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def mapped_bytes(name: str) -> int:
    """Bytes of the test's memfds in this process's address space."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if f"memfd:{name}" in line]
    return sum(int(end, 16) - int(start, 16) for start, end in (line[0].split("-") for line in lines))


def test_a_process_maps_only_the_slabs_that_it_was_given(memfd, ending):
    fd = memfd(SIZE)
    agent = Arena(fd, SIZE)
    theirs, ours = agent.alloc("a", 3 * PAGE, 1001), agent.alloc("b", 100, 1002)
    agent.close()
    before = mapped_bytes("test")
    host = ArenaMap(fd, SIZE)
    assert mapped_bytes("test") == before
    view = host.view(ours)
    assert host.view(ours) is view and host.mapped() == (ours,)
    assert mapped_bytes("test") - before == PAGE
    base = host.view(theirs, readonly=True)
    host.view(theirs).fill_(5)
    host.drop(theirs, readonly=False)
    assert (base == 5).all() and host.mapped() == (ours, theirs)
    assert mapped_bytes("test") - before == 4 * PAGE


def test_what_was_dropped_is_out_of_reach(arena, ending):
    agent, host = arena
    slab = agent.alloc("a", 2 * PAGE, 1001)
    for readonly in (False, True):
        kept = host.view(slab, readonly)[5:]
        assert ending(lambda kept=kept: kept.sum()) == 0
        host.drop(slab)
        host.drop(slab)
        assert ending(lambda kept=kept: kept.sum()) == signal.SIGSEGV
    assert host.mapped() == ()
    agent.free("a")
    assert not host.view(agent.alloc("b", 2 * PAGE, 1002)).any()


def test_a_thousand_views_leave_no_mapping_and_no_descriptor(memfd):
    def counts():
        return len(Path("/proc/self/maps").read_text().splitlines()), len(os.listdir("/proc/self/fd"))

    fd = memfd(SIZE)
    agent = Arena(fd, SIZE)
    host = ArenaMap(fd, SIZE)
    before = counts()
    for i in range(1000):
        slab = agent.alloc(f"s{i}", 1 + i % (4 * PAGE), 1001)
        host.view(slab, readonly=i % 2 == 0)
        host.drop(slab)
        agent.free(f"s{i}")
    assert counts() == before
    agent.close()


def test_every_mapping_is_registered_once_and_told_before_it_goes(memfd):
    fd = memfd(SIZE)
    agent = Arena(fd, SIZE)
    held = {}

    def register(address, size):
        assert address not in held
        held[address] = size

    host = ArenaMap(fd, SIZE, register, held.pop)
    slabs = [agent.alloc("a", 100, 1001), agent.alloc("b", 2 * PAGE, -1)]
    views = [host.view(slab, readonly=slab.owner < 0) for slab in slabs for _ in range(3)]
    assert held == {views[0].data_ptr(): PAGE, views[3].data_ptr(): 2 * PAGE}
    assert host.registrations.count == 2 and host.registrations.seconds > 0
    host.drop(slabs[1])
    assert list(held) == [views[0].data_ptr()] and host.registrations.count == 2
    agent.close()


def test_slabs_lie_on_the_node_that_is_asked_for_while_it_has_room(memfd):
    agent = Arena(memfd(SIZE), SIZE, nodes=(0, 3))
    half = SIZE // 2
    assert agent.alloc("a", half - PAGE, 1, node=3) == Slab("a", half, half - PAGE, 1, 3)
    assert agent.alloc("b", 2 * PAGE, 1, node=3) == Slab("b", 0, 2 * PAGE, 1, 0)
    assert agent.alloc("c", PAGE, 1, node=3).numa == 3
    agent.free("a")
    assert agent.alloc("d", PAGE, 1).offset == 2 * PAGE
    # Larger than any node's gap: it lies across.
    across = agent.alloc("e", half + 2 * PAGE, 1, node=3)
    assert (across.offset, across.numa) == (3 * PAGE, 0)
    with pytest.raises(DoesNotFit):
        agent.alloc("f", half, 1)
    for name in "bde":
        agent.free(name)
    assert agent.free_bytes() == SIZE - PAGE


def test_slabs_are_locked_as_far_as_the_process_may(memfd):
    def locked():
        return int(next(w for w in Path("/proc/self/status").read_text().splitlines() if "VmLck" in w).split()[1])

    before = locked()
    agent = Arena(memfd(SIZE), SIZE, lock=True)
    agent.alloc("a", 3 * PAGE, 1001)
    assert (locked() - before) * 1024 == 3 * PAGE
    agent.free("a")
    agent.close()


def test_a_limit_on_locked_memory_is_no_error():
    code = (
        "import os, resource; from plexrl.memory import pages; from plexrl.memory.arena import Arena\n"
        "resource.setrlimit(resource.RLIMIT_MEMLOCK, (8192, 8192))\n"
        "if os.getuid() == 0: os.setuid(65534)\n"
        "a = Arena(pages.create_memfd('a', 1 << 20), 1 << 20, lock=True)\n"
        "a.alloc('small', 4096, 1); assert 'locked' in a.told()\n"
        "a.alloc('large', 1 << 16, 1); assert 'locked' not in a.told()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "ulimit -l" in done.stderr, done.stderr


def test_memory_that_the_machine_lacks_is_refused_not_taken(memfd, monkeypatch):
    """Filling a machine is no test; that the arena asks before it takes, and what for, is."""
    agent = Arena(memfd(SIZE), SIZE)
    agent.alloc("was there", 2 * PAGE, 1)
    agent.free("was there")
    monkeypatch.setattr(room, "room", lambda: room.Room(room.SPARE + 3 * PAGE, "the limit of cgroup /job_7"))
    with pytest.raises(DoesNotFit, match=f"takes {4 * PAGE} bytes.* {room.SPARE + 3 * PAGE} are left of .* /job_7"):
        agent.alloc("a", 6 * PAGE, 1)
    assert agent.slabs() == () and agent.free_bytes() == SIZE
    agent.alloc("a", 5 * PAGE, 1)
    agent.close()
