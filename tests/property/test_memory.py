"""Properties of the memory room: round trips bit for bit, budgets, clearing, no overlap."""

import os

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from plexrl.memory.arena import Arena, ArenaMap
from plexrl.memory.device import CpuDevice, NotMapped
from plexrl.memory.manifest import ITEM_BYTES, Manifest, TensorSpec
from plexrl.memory.pages import ALIGN, PAGE, align_up, create_memfd
from plexrl.memory.resident import CLEAN, DIRTY, ZERO, ResidentState
from plexrl.types import DoesNotFit, Extent, Residency

SEEDS = int(os.environ.get("PLEXRL_SEEDS", "1"))
pytestmark = pytest.mark.timeout(120 * SEEDS)

shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
buckets = st.lists(st.tuples(shapes, st.sampled_from(sorted(ITEM_BYTES))), max_size=4).map(
    lambda tensors: [TensorSpec(f"t{i}", shape, dtype) for i, (shape, dtype) in enumerate(tensors)]
)
layouts = st.dictionaries(st.sampled_from(["frozen", "weights", "grads", "moment1", "rng"]), buckets, min_size=1)
seeds = st.integers(0, 2**31)


def noise(size: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)


@given(specs=layouts, base=st.integers(0, 5))
def test_a_layout_depends_on_the_specs_only_and_never_overlaps(specs, base):
    manifest = Manifest.build(specs, base * ALIGN)
    assert manifest == Manifest.build(specs, base * ALIGN)
    taken = []
    for bucket in manifest.buckets:
        for spec, at in bucket.tensors:
            assert at % ALIGN == 0 and bucket.offset <= at and at + spec.nbytes <= bucket.offset + bucket.size
            taken.append((at, at + spec.nbytes))
    assert all(a[1] <= b[0] for a, b in zip(taken, taken[1:], strict=False))
    assert manifest.end - manifest.size == (base * ALIGN if manifest.buckets else 0)


class Tenant:
    """A deployment on a device of its own mapping (as in a process of its own), beside a model of its bytes."""

    def __init__(self, specs, fd, size, offset, arena, host, name, generator, paranoid):
        self.generator = generator
        self.manifest = Manifest.build(specs)
        self.sizes = {bucket.name: bucket.size for bucket in self.manifest.buckets if bucket.size}
        self.device = CpuDevice(fd, size, paranoid)
        self.region = self.device.reserve(Extent(offset, self.manifest.size))
        sources = {}
        if self.sizes.get("frozen"):
            base = arena.alloc(f"{name}/base", self.sizes["frozen"], -1)
            host.view(base).copy_(noise(base.size, generator))
            sources["frozen"] = host.view(base, readonly=True)
        own = self.manifest.without(*sources).size
        slab = host.view(arena.alloc(f"{name}/state", own, 1000)) if own else None
        self.state = ResidentState(self.manifest, self.region.buffer, slab, sources)
        self.model = {b: sources[b].clone() if b in sources else torch.zeros(n).byte() for b, n in self.sizes.items()}
        self.own = [b for b in self.sizes if b not in sources]

    def place(self, bucket):
        found = next(b for b in self.manifest.buckets if b.name == bucket)
        return self.region.buffer[found.offset : found.offset + found.size]

    def turn(self, actions):
        """Come in, check every bit, write as told, go out; check what was counted."""
        self.device.map(self.region)
        copied = sum(n for b, n in self.sizes.items() if self.state.state(b) is not ZERO)
        assert self.state.load().bytes_in == copied and self.state.residency is Residency.DEVICE
        for bucket, bytes_ in self.model.items():
            assert torch.equal(self.place(bucket), bytes_), bucket
        assert self.device.residual_bytes() == self.manifest.size
        for bucket, action in zip(self.own, actions, strict=False):
            if action == "write":
                self.model[bucket] = noise(self.sizes[bucket], self.generator)
                self.place(bucket).copy_(self.model[bucket])
                self.state.mark(bucket, DIRTY)
            elif action == "zero":
                self.model[bucket] = torch.zeros(self.sizes[bucket], dtype=torch.uint8)
                self.place(bucket).zero_()
                self.state.mark(bucket, ZERO)
        dirty = sum(n for b, n in self.sizes.items() if self.state.state(b) is DIRTY)
        clean = sum(n for b, n in self.sizes.items() if self.state.state(b) is CLEAN)
        moved = self.state.offload()
        assert (moved.bytes_out, moved.bytes_clean) == (dirty, clean) and self.state.residency is Residency.HOST
        self.device.unmap(self.region)
        assert self.device.residual_bytes() == 0


turns = st.lists(
    st.tuples(st.integers(0, 1), st.lists(st.sampled_from(["write", "zero", "leave"]), max_size=5)),
    min_size=2,
    max_size=8,
)


@settings(max_examples=60 * SEEDS, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    first=layouts,
    second=layouts,
    offsets=st.tuples(*[st.integers(0, 80)] * 2),
    turns=turns,
    seed=seeds,
    paranoid=st.booleans(),
)
def test_two_tenants_on_the_same_bytes_get_their_state_back_bit_for_bit(first, second, offsets, turns, seed, paranoid):
    generator = torch.Generator().manual_seed(seed)
    sizes = [Manifest.build(specs).size for specs in (first, second)]
    size = align_up(max(o * ALIGN + n for o, n in zip(offsets, sizes, strict=True)) + ALIGN, PAGE)
    room = sum(2 * PAGE + 2 * align_up(n, PAGE) for n in sizes)
    fd, arena_fd = create_memfd("device", size), create_memfd("arena", room)
    arena, host = Arena(arena_fd, room), ArenaMap(arena_fd, room)
    try:
        tenants = [
            Tenant(specs, fd, size, offset * ALIGN, arena, host, str(i), generator, paranoid)
            for i, (specs, offset, n) in enumerate(zip((first, second), offsets, sizes, strict=True))
            if n
        ]
        judge = CpuDevice(fd, size)
        everything = judge.reserve(Extent(0, size))
        judge.map(everything)
        for who, actions in turns:
            if tenants:
                judge.copy_in(everything, 0, noise(size, generator))
                tenants[who % len(tenants)].turn(actions)
    finally:
        arena.close()
        os.close(fd)
        os.close(arena_fd)


class ArenaMachine(RuleBasedStateMachine):
    """The allocator against a model: names, bytes and a bitmap of pages."""

    SIZE = 24 * PAGE

    def __init__(self):
        super().__init__()
        self.fd = create_memfd("arena", self.SIZE)
        self.arena, self.host = Arena(self.fd, self.SIZE), ArenaMap(self.fd, self.SIZE)
        self.model = {}
        self.count = 0

    def teardown(self):
        self.arena.close()
        os.close(self.fd)

    def pages(self):
        """Which pages the model says are taken; fails when two slabs share one."""
        taken = [False] * (self.SIZE // PAGE)
        for slab, _ in self.model.values():
            for page in range(slab.offset // PAGE, align_up(slab.offset + slab.size, PAGE) // PAGE):
                assert not taken[page], "slabs overlap"
                taken[page] = True
        return taken

    @rule(size=st.integers(1, 8 * PAGE), owner=st.integers(-1, 3), fill=st.integers(1, 255))
    def alloc(self, size, owner, fill):
        self.count += 1
        gaps = "".join("x" if taken else "." for taken in self.pages()).split("x")
        fits = max(len(gap) for gap in gaps) * PAGE >= align_up(size, PAGE)
        try:
            slab = self.arena.alloc(f"s{self.count}", size, owner)
        except DoesNotFit:
            assert not fits
            return
        assert fits and slab.size == size and slab.owner == owner
        view = self.host.view(slab)
        assert not view.any(), "a new slab holds somebody's bytes"
        view.fill_(fill)
        self.model[slab.name] = (slab, fill)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def again(self, data):
        slab, _ = self.model[data.draw(st.sampled_from(sorted(self.model)))]
        assert self.arena.alloc(slab.name, slab.size, slab.owner) == slab

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def free(self, data):
        assert self.arena.free(self.model.pop(data.draw(st.sampled_from(sorted(self.model))))[0].name)

    @invariant()
    def budget_and_contents_hold(self):
        taken = self.pages()
        assert self.arena.free_bytes() == taken.count(False) * PAGE
        assert self.arena.slabs() == tuple(sorted((s for s, _ in self.model.values()), key=lambda s: s.offset))
        for slab, fill in self.model.values():
            assert (self.host.view(slab, readonly=True) == fill).all()
        for page, is_taken in enumerate(taken):
            if not is_taken:
                assert not any(os.pread(self.fd, PAGE, page * PAGE)), "free bytes are not zero"


ArenaMachine.TestCase.settings = settings(max_examples=40 * SEEDS, stateful_step_count=20, deadline=None)
TestArena = ArenaMachine.TestCase


@settings(max_examples=60 * SEEDS, deadline=None)
@given(
    extents=st.lists(st.tuples(st.integers(0, 300), st.integers(1, 300)), min_size=1, max_size=5),
    steps=st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=20),
    paranoid=st.booleans(),
)
def test_mapped_regions_of_a_device_never_overlap_nor_exceed_it(extents, steps, paranoid):
    size = 4 * PAGE
    fd = create_memfd("device", size)
    device = CpuDevice(fd, size, paranoid)
    os.close(fd)
    regions = []
    for offset, length in extents:
        extent = Extent(offset * ALIGN, length * ALIGN)
        try:
            regions.append(device.reserve(extent))
        except DoesNotFit:
            assert extent.offset + extent.size > size
    for which, on in steps if regions else []:
        region = regions[which % len(regions)]
        if on:
            others = [r.extent for r in regions if r.mapped and r is not region]
            free = all(
                o.offset + o.size <= region.extent.offset or region.extent.offset + region.extent.size <= o.offset
                for o in others
            )
            try:
                device.map(region)
                assert free
            except NotMapped:
                assert not free
        else:
            device.unmap(region)
        mapped = [r for r in regions if r.mapped]
        assert device.residual_bytes() == sum(r.extent.size for r in mapped) <= size
        for r in mapped:
            # With paranoid a page that was forbidden by mistake ends the test run here.
            r.buffer.fill_(1)
