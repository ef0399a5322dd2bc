"""The host arena: slabs by name, cleared before anybody else sees them, one mapping per engine host."""

import signal
import subprocess
import sys
import warnings

import pytest
import torch

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
