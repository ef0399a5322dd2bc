"""Properties of switches between ranks on one GPU, under drawn layouts, orders, failures and deaths."""

import os
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from plexrl.memory.gate import GATE_BYTES, Gate, Withdrawn
from plexrl.memory.manifest import ITEM_BYTES, Manifest, TensorSpec
from plexrl.memory.pages import ALIGN, create_memfd
from plexrl.memory.resident import CLEAN, DIRTY, ZERO, BucketState, ResidentState
from plexrl.types import Extent, Residency
from tests.property.interleave import Judge, Killed, LinkDown, Rank, Stage, SteppedMover, SteppedSeat

SEEDS = int(os.environ.get("PLEXRL_SEEDS", "1"))
pytestmark = pytest.mark.timeout(120 * SEEDS)

MAY_FOLLOW = {
    Residency.HOST: {Residency.LOADING, Residency.SPILLING},
    Residency.LOADING: {Residency.DEVICE, Residency.HOST, Residency.LOST},
    Residency.DEVICE: {Residency.OFFLOADING, Residency.LOADING, Residency.LOST},
    Residency.OFFLOADING: {Residency.HOST, Residency.DEVICE, Residency.LOST},
    Residency.SPILLING: {Residency.NVME},
    Residency.NVME: {Residency.HOST},
    Residency.LOST: set(),
}

shapes = st.lists(st.integers(1, 6), max_size=3).map(tuple)
buckets = st.lists(st.tuples(shapes, st.sampled_from(sorted(ITEM_BYTES))), max_size=3).map(
    lambda tensors: [TensorSpec(f"t{i}", shape, dtype) for i, (shape, dtype) in enumerate(tensors)]
)
optional = st.dictionaries(st.sampled_from(["frozen", "grads", "moment1", "rng"]), buckets)
layouts = st.tuples(optional, st.integers(1, 100)).map(
    lambda drawn: {**drawn[0], "weights": [TensorSpec("w", (drawn[1],), "float32")]}
)
names = st.sets(st.sampled_from(["frozen", "weights", "grads", "moment1", "rng"]))
writes = st.dictionaries(st.sampled_from(["grads", "moment1", "rng"]), st.sampled_from([DIRTY, ZERO])).map(
    lambda drawn: {**drawn, "weights": DIRTY}
)
PHASES = ("come", "pull", "leave")
faults = st.one_of(st.none(), st.tuples(st.sampled_from(PHASES), st.integers(0, 5), st.integers(1, 3)))


class Turn(NamedTuple):
    """What a tenant does with its GPU once.

    first: buckets that come at once (None: all), then those pulled, then (whole) the rest. written: what is done to
    buckets that are there. fault: (phase, copies that go well in it, copies after them that fail).
    regret: take that phase back although it went well, as when another rank of the gang has failed.
    """

    first: set[str] | None
    pulled: set[str]
    written: dict[str, BucketState]
    whole: bool
    spilled: bool
    fault: tuple[str, int, int] | None
    regret: str


turns = st.builds(
    Turn,
    first=st.one_of(st.none(), st.just({"weights"}), names),
    pulled=names,
    written=writes,
    whole=st.booleans(),
    spilled=st.booleans(),
    fault=faults,
    regret=st.sampled_from(["", "", "come", "leave"]),
)


class Watched(ResidentState):
    """Knows which residencies may follow each other, from elsewhere than the code under test."""

    def __setattr__(self, name, value):
        if name == "residency" and hasattr(self, "residency") and value is not self.residency:
            assert value in MAY_FOLLOW[self.residency], f"{self.residency} -> {value}"
        super().__setattr__(name, value)


class Tenant:
    """One rank: `parts` states side by side on its extent, beside a model of their bytes."""

    def __init__(self, specs, offset, script, chunk, seed):
        self.plans = [Manifest.build(spec) for spec in specs]
        self.offset, self.script, self.chunk = offset, script, chunk
        self.generator = torch.Generator().manual_seed(seed)
        self.size = sum(plan.size for plan in self.plans)
        self.extent = Extent(offset, self.size)
        self.seen: set[str] = set()

    def noise(self, size):
        return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=self.generator)

    def play(self, rank: Rank, gate: Gate, judge: Judge):
        self.seat = gate.seat(rank.index, f"gang{rank.index}", self.extent)
        self.seat.__class__ = SteppedSeat
        self.seat.rank = rank
        self.mover = SteppedMover(rank, judge)
        self.states, self.models, self.places = [], [], []
        at = 0
        for plan in self.plans:
            place = judge.device[self.offset + at : self.offset + at + plan.size]
            sources = {b.name: self.noise(b.size) for b in plan.buckets if b.name == "frozen" and b.size}
            own = plan.without(*sources).size
            slab = torch.zeros(own, dtype=torch.uint8) if own else None
            self.states.append(Watched(plan, place, slab, sources, at=at, mover=self.mover, chunk=self.chunk))
            self.models.append(
                {b.name: sources.get(b.name, torch.zeros(b.size).byte()) for b in plan.buckets if b.size}
            )
            self.places.append({b.name: place[b.offset : b.offset + b.size] for b in plan.buckets if b.size})
            at += plan.size
        try:
            self.live()
        except Killed:
            self.seen.add(f"killed while the seat was {self.seat.state}")
            raise

    def live(self):
        for turn in self.script:
            try:
                if not self.turn(turn):
                    return
            except Withdrawn:
                self.seen.add("a pull was withdrawn")
                if not self.leave(turn):
                    return

    def turn(self, turn):
        """In, every bit checked, written to, out. False when the state is lost."""
        if not self.come(turn):
            return True
        self.check()
        self.arm(turn, "pull")
        for state in self.states:
            self.pull(state, turn.pulled & self.model(state).keys())
        if turn.whole:
            for state in self.states:
                self.pull(state, self.model(state))
            self.seat.held()
        self.check()
        for state, model, place in zip(self.states, self.models, self.places, strict=True):
            for bucket, action in turn.written.items():
                if bucket in model and state.present(bucket):
                    model[bucket] = self.noise(model[bucket].numel()) if action is DIRTY else model[bucket] * 0
                    place[bucket].copy_(model[bucket])
                    state.mark(bucket, action)
        self.seat.rank.pause()
        self.check()
        return self.leave(turn) and (not turn.spilled or self.spill())

    def model(self, state):
        return self.models[self.states.index(state)]

    def arm(self, turn, phase):
        self.mover.arm(*(turn.fault[1:] if turn.fault and turn.fault[0] == phase else (0, 0)))

    def pull(self, state, buckets):
        try:
            state.pull(*buckets, seat=self.seat)
        except LinkDown:
            self.seen.add("a pull failed")
            assert state.residency is Residency.DEVICE

    def come(self, turn):
        """Onto the device; False when that was undone."""
        self.arm(turn, "come")
        self.seat.come()
        try:
            for state in self.states:
                state.load(None if turn.first is None else turn.first & self.model(state).keys(), seat=self.seat)
        except (LinkDown, Withdrawn) as error:
            self.seen.add(f"a load was undone: {type(error).__name__}")
        else:
            if turn.regret != "come":
                return True
            self.seen.add("a load that went well was undone")
        for state in self.states:
            if state.residency is not Residency.HOST:
                state.undo(self.seat)
        self.seat.gone()
        self.check()
        return False

    def leave(self, turn):
        """Off the device, or back onto it and then off; False when the state is lost."""
        self.arm(turn, "leave")
        regret = turn.regret == "leave"
        while True:
            self.seat.leave()
            try:
                for state in self.states:
                    state.offload(self.seat)
            except LinkDown:
                self.seen.add("an offload failed")
                if not self.back():
                    return False
                continue
            if regret:
                regret = False
                self.seen.add("an offload that went well was undone")
                if not self.back():
                    return False
                continue
            self.seat.gone()
            self.check()
            return True

    def back(self):
        """On the device again, or lost."""
        try:
            for state in reversed(self.states):
                if state.residency is not Residency.DEVICE:
                    state.undo(self.seat)
        except LinkDown:
            self.seen.add("an undo failed")
            assert {state.residency for state in self.states} & {Residency.LOST, Residency.HOST}
            self.seat.gone()
            return False
        self.seat.held()
        self.check()
        return True

    def spill(self):
        for state in self.states:
            if state.host.size:
                slab = next(c.home for p in state._pieces.values() if not p.fixed for c in p.chunks).untyped_storage()
                stored = torch.tensor([], dtype=torch.uint8).set_(slab).clone()
                state.rehome(None)
                torch.tensor([], dtype=torch.uint8).set_(slab).random_()
                self.seat.rank.pause()
                state.rehome(stored)
        self.check()
        return True

    def check(self):
        """Whole on one tier: on the device what is present, for the rest and off the device the host's copy."""
        for state, model, place in zip(self.states, self.models, self.places, strict=True):
            assert state.residency in (Residency.HOST, Residency.DEVICE)
            for bucket, bytes_ in model.items():
                if state.residency is Residency.DEVICE and state.present(bucket):
                    assert torch.equal(place[bucket], bytes_), bucket
                else:
                    assert state.state(bucket) is not DIRTY
                if state.state(bucket) is CLEAN:
                    home = torch.cat([chunk.home for chunk in state._pieces[bucket].chunks])
                    assert torch.equal(home, bytes_), bucket
                elif state.state(bucket) is ZERO:
                    assert not bytes_.any()


def play(drawn, order, seed):
    """Have all (tenant, when it dies) play, on a device of their own."""
    made = [(tenant, dies_after) for tenant, dies_after in drawn if tenant.size]
    # Larger than needed, so that somebody could write beyond every extent; 64-byte aligned, as a device's memory is.
    size = max((tenant.offset + tenant.size for tenant, _ in made), default=0) + ALIGN
    memory = torch.empty(size + ALIGN, dtype=torch.uint8)
    skip = -memory.data_ptr() % ALIGN
    fd = create_memfd("gate", GATE_BYTES)
    gate = Gate(fd)
    judge = Judge(fd, memory[skip : skip + size], torch.Generator().manual_seed(seed))
    try:
        works = [
            (lambda rank, tenant=tenant: tenant.play(rank, gate, judge), dies_after) for tenant, dies_after in made
        ]
        Stage(judge, gate, order).play(works)
        assert gate.holders() == ()
    finally:
        gate.close()
        os.close(fd)
    for seen in sorted(set().union(*(tenant.seen for tenant, _ in made))):
        event(seen)


tenants = st.tuples(
    st.lists(layouts, min_size=1, max_size=2),
    st.integers(0, 12),
    st.lists(turns, min_size=1, max_size=3),
    st.sampled_from([64, 64, 128, 4096]),
    st.one_of(st.none(), st.none(), st.integers(0, 60)),
)


@settings(max_examples=120 * SEEDS, suppress_health_check=[HealthCheck.too_slow])
@given(
    drawn=st.lists(tenants, min_size=2, max_size=3),
    order=st.lists(st.integers(0, 5), max_size=40),
    seed=st.integers(0, 2**31),
)
def test_ranks_that_share_a_device_get_their_state_back_whatever_fails(drawn, order, seed):
    made = [
        (Tenant(specs, offset * ALIGN, script, chunk, seed + i), dies_after)
        for i, (specs, offset, script, chunk, dies_after) in enumerate(drawn)
    ]
    play(made, order, seed)


@settings(max_examples=60 * SEEDS, suppress_health_check=[HealthCheck.too_slow])
@given(
    specs=layouts,
    phase=st.sampled_from(PHASES),
    good=st.integers(0, 30),
    first=names,
    chunk=st.sampled_from([64, 192]),
    seed=st.integers(0, 99),
)
def test_any_single_copy_that_fails_leaves_a_state_whole(specs, phase, good, first, chunk, seed):
    written = dict.fromkeys(("weights", "moment1", "rng"), DIRTY)
    script = [
        Turn(None, set(), written, True, False, None, ""),
        Turn(first, first, written, True, True, (phase, good, 1), ""),
    ]
    play([(Tenant([specs], 0, script * 2, chunk, seed), None)], [0], seed)
