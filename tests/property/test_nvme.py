"""Slabs between arena and NVMe in any order, with full disks, failing writes, flipped bits: nothing is lost unseen."""

import itertools
import resource
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from plexrl.memory import nvmefile
from plexrl.memory.arena import Arena
from plexrl.memory.nvme import Damaged, Tier
from plexrl.memory.pages import PAGE, create_memfd
from plexrl.types import BadInput, DoesNotFit, PlexrlError

ARENA = 20 * PAGE
BUDGET = 40 * PAGE
CHUNK = 2 * PAGE


class TierMachine(RuleBasedStateMachine):
    """Against a model: the bytes of every slab, and whether they are in the arena, on disk, or damaged there."""

    def __init__(self):
        super().__init__()
        self.chunk, nvmefile.CHUNK = nvmefile.CHUNK, CHUNK  # many chunks in few bytes
        self.folder = Path(tempfile.mkdtemp(dir="/dev/shm"))  # thousands of fsyncs
        self.arena = Arena(create_memfd("arena", ARENA), ARENA)
        self.tier = Tier(self.arena, self.folder, BUDGET)
        self.count = itertools.count()
        self.bytes: dict[str, bytes] = {}
        self.flipped: dict[str, int] = {}

    def teardown(self):
        nvmefile.CHUNK = self.chunk
        self.tier.close()
        assert not list(self.folder.iterdir())
        self.arena.close()
        shutil.rmtree(self.folder)

    def file(self, name):
        return self.tier._path(self.tier._known[name])

    def home(self):
        return sorted(self.bytes.keys() - set(self.tier.names()))

    @rule(size=st.integers(1, 9 * PAGE), seed=st.integers(0, 1000))
    def alloc(self, size, seed):
        name = f"s{next(self.count)}"
        try:
            slab = self.arena.alloc(name, size, 1001)
        except DoesNotFit:
            return
        view = self.arena.bytes_of(slab)
        assert not any(view), "a new slab holds somebody's bytes"
        self.bytes[name] = np.random.default_rng(seed).bytes(size)
        view[:size] = self.bytes[name]

    @precondition(lambda self: self.bytes)
    @rule(data=st.data())
    def free(self, data):
        name = data.draw(st.sampled_from(sorted(self.bytes)))
        assert self.arena.free(name) != self.tier.free(name), "a slab was in both places, or in none"
        del self.bytes[name]
        self.flipped.pop(name, None)

    @precondition(lambda self: self.home())
    @rule(data=st.data(), room=st.none() | st.integers(0, 12 * PAGE))
    def spill(self, data, room):
        """room: bytes beyond which no file may grow."""
        name = data.draw(st.sampled_from(self.home()))
        slab, left = self.arena.get(name), self.tier.free_bytes()
        size = -(-slab.size // PAGE) * PAGE
        need = nvmefile.header_bytes(size) + size
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if room is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
        try:
            moved, _ = self.tier.spill(name)
        except PlexrlError:
            assert need > left or (room is not None and need > room)
            assert self.arena.get(name) == slab and self.tier.free_bytes() == left
        else:
            assert moved == slab.size and need <= left and (room is None or need <= room)
            assert self.arena.get(name) is None and self.tier.free_bytes() == left - need
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    @precondition(lambda self: self.tier.names())
    @rule(data=st.data())
    def flip(self, data):
        """Once per file: two flips might mend each other."""
        name = data.draw(st.sampled_from(sorted(self.tier.names())))
        if name in self.flipped:
            return
        file = self.file(name)
        content = bytearray(file.read_bytes())
        start = nvmefile.header_bytes(len(content) - PAGE)
        used = nvmefile._HEAD.size + (-(-(len(content) - start) // CHUNK) + 1) * 8
        # What pads the header is nobody's.
        at = data.draw(st.integers(0, used - 1) | st.integers(start, len(content) - 1))
        content[at] ^= 1 << data.draw(st.integers(0, 7))
        file.write_bytes(content)
        self.flipped[name] = -1 if at < start else (at - start) // CHUNK

    @precondition(lambda self: self.tier.names())
    @rule(data=st.data())
    def refill(self, data):
        name = data.draw(st.sampled_from(sorted(self.tier.names())))
        file, before = self.file(name), self.arena.slabs()
        try:
            slab, moved, _ = self.tier.refill(name)
        except DoesNotFit:
            assert self.arena.slabs() == before and file.exists()
        except Damaged as found:
            assert (found.file, found.chunk) == (file, self.flipped[name])
            assert self.arena.slabs() == before and file.exists()
        else:
            assert name not in self.flipped, "a flipped bit went unseen"
            assert moved == slab.size == len(self.bytes[name])
            assert self.tier.free_bytes() and not file.exists()

    @rule(verb=st.sampled_from(["spill", "refill"]))
    def unknown(self, verb):
        with pytest.raises(BadInput):
            getattr(self.tier, verb)("none")

    @invariant()
    def every_byte_is_somewhere(self):
        for name in self.home():
            slab = self.arena.get(name)
            view = self.arena.bytes_of(slab)
            assert view[: slab.size] == self.bytes[name] and not any(view[slab.size :])
        assert {slab.name for slab in self.arena.slabs()} == set(self.home())

    @invariant()
    def budgets_hold(self):
        files = [self.file(name).stat().st_size for name in self.tier.names()]
        assert sum(files) == BUDGET - self.tier.free_bytes() <= BUDGET
        assert len(list(self.folder.glob("*/*"))) == len(files), "a half-written file was left"


TierMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestTier = TierMachine.TestCase
