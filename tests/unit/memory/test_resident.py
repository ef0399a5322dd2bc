"""Resident state: what moves, what does not, and that a switch allocates nothing."""

import os
import tracemalloc

import pytest
import torch

from plexrl.memory.gate import FAILED, GATE_BYTES, HELD, Gate
from plexrl.memory.manifest import Manifest, TensorSpec
from plexrl.memory.pages import create_memfd
from plexrl.memory.resident import CLEAN, DIRTY, LEGAL, ZERO, IllegalTransition, ResidentState, advance
from plexrl.memory.transfer import Memcpy
from plexrl.types import BadInput, Extent, Moved, Residency

MANIFEST = Manifest.build(
    {
        "frozen": [TensorSpec("base", (100,), "float32")],
        "weights": [TensorSpec("a", (33,), "float32"), TensorSpec("b", (5, 7), "bfloat16")],
        "grads": [TensorSpec("a", (33,), "float32")],
        "steps": [TensorSpec("n", (2,), "int64")],
        "none": [],
    }
)
SIZES = {bucket.name: bucket.size for bucket in MANIFEST.buckets}


class Rig:
    """A state whose frozen bucket is a shared base, over plain tensors."""

    def __init__(self) -> None:
        self.device = torch.randint(0, 256, (MANIFEST.size,), dtype=torch.uint8)
        self.base = torch.randint(0, 256, (SIZES["frozen"],), dtype=torch.uint8)
        self.slab = torch.zeros(MANIFEST.without("frozen").size, dtype=torch.uint8)
        self.state = ResidentState(MANIFEST, self.device, self.slab, {"frozen": self.base})
        self.views = MANIFEST.views(self.device)


def counters(moved: Moved) -> tuple[int, int, int]:
    assert moved.seconds > 0
    return moved.bytes_out, moved.bytes_in, moved.bytes_clean


def test_a_new_state_is_zero_beside_its_sources():
    rig = Rig()
    assert rig.state.residency is Residency.HOST and rig.state.state("weights") is ZERO
    assert counters(rig.state.load()) == (0, SIZES["frozen"], 0)
    assert torch.equal(rig.device[: SIZES["frozen"]], rig.base) and not rig.device[SIZES["frozen"] :].any()
    assert rig.state.residency is Residency.DEVICE


def test_only_dirty_buckets_go_out_and_zero_ones_come_back_as_zeros():
    rig = Rig()
    rig.state.load()
    rig.views["weights"]["a"].fill_(1.5)
    rig.views["grads"]["a"].fill_(2.5)
    rig.state.mark("weights", DIRTY)
    rig.state.mark("grads", DIRTY)
    assert counters(rig.state.offload()) == (SIZES["weights"] + SIZES["grads"], 0, SIZES["frozen"])
    rig.device.random_()
    everything = SIZES["frozen"] + SIZES["weights"] + SIZES["grads"]
    assert counters(rig.state.load()) == (0, everything, 0)
    assert (rig.views["weights"]["a"] == 1.5).all() and (rig.views["grads"]["a"] == 2.5).all()
    assert not rig.views["steps"]["n"].any()
    rig.views["grads"]["a"].zero_()
    rig.state.mark("grads", ZERO)
    assert counters(rig.state.offload()) == (0, 0, SIZES["frozen"] + SIZES["weights"])
    rig.device.random_()
    assert counters(rig.state.load()) == (0, SIZES["frozen"] + SIZES["weights"], 0)
    assert not rig.views["grads"]["a"].any() and (rig.views["weights"]["a"] == 1.5).all()


def test_bytes_written_into_the_slab_are_loaded():
    rig = Rig()
    MANIFEST.without("frozen").views(rig.slab)["weights"]["a"].fill_(4.0)
    rig.state.mark("weights", CLEAN)
    rig.state.load()
    assert (rig.views["weights"]["a"] == 4.0).all()


def test_a_mark_that_would_lose_bytes_is_refused():
    rig = Rig()
    for bucket, state in (("weights", DIRTY), ("frozen", CLEAN), ("none", ZERO), ("other", ZERO)):
        with pytest.raises(BadInput, match=bucket):
            rig.state.mark(bucket, state)
    rig.state.load()
    for bucket, state in (("weights", CLEAN), ("frozen", DIRTY)):
        with pytest.raises(BadInput, match=bucket):
            rig.state.mark(bucket, state)


def test_a_new_version_replaces_a_source_on_the_device_too():
    rig = Rig()
    rig.state.load()
    newer = torch.randint(0, 256, (SIZES["frozen"],), dtype=torch.uint8)
    rig.state.repoint("frozen", newer)
    assert counters(rig.state.load()) == (0, SIZES["frozen"], 0)
    assert torch.equal(rig.device[: SIZES["frozen"]], newer)
    assert counters(rig.state.load()) == (0, 0, 0)
    with pytest.raises(BadInput):
        rig.state.repoint("weights", newer)
    with pytest.raises(BadInput):
        rig.state.repoint("frozen", newer[:64])


def test_another_slot_gets_the_state_and_the_old_one_is_left_alone():
    rig = Rig()
    rig.state.load()
    rig.views["weights"]["b"].fill_(2.0)
    rig.state.mark("weights", DIRTY)
    slot = torch.randint(0, 256, (MANIFEST.size,), dtype=torch.uint8)
    with pytest.raises(IllegalTransition):
        rig.state.rebind(slot)
    rig.state.offload()
    before = rig.device.clone()
    rig.state.rebind(slot)
    rig.state.load()
    assert (MANIFEST.views(slot)["weights"]["b"] == 2.0).all() and torch.equal(rig.device, before)


def test_buffers_must_hold_the_state():
    device, slab, base = (torch.zeros(n, dtype=torch.uint8) for n in (MANIFEST.size, MANIFEST.size, SIZES["frozen"]))
    for arguments in (
        (device[64:], slab, {"frozen": base}),
        (device, slab[:64], {"frozen": base}),
        (device, None, {"frozen": base}),
        (device, slab, {"frozen": base[:-64]}),
        (device, slab, {"other": base}),
        (device.view(torch.int32), slab, {"frozen": base}),
    ):
        with pytest.raises(BadInput):
            ResidentState(MANIFEST, *arguments)
    only = Manifest.build({"frozen": [TensorSpec("base", (100,), "float32")]})
    assert ResidentState(only, device, None, {"frozen": base}).load().bytes_in == SIZES["frozen"]


def test_only_legal_transitions_happen():
    rig = Rig()
    with pytest.raises(IllegalTransition, match="host"):
        rig.state.offload()
    for now in Residency:
        for to in Residency:
            if to in LEGAL[now]:
                assert advance(now, to) is to
            else:
                with pytest.raises(IllegalTransition):
                    advance(now, to)


class Faulty(Memcpy):
    """Copies as memcpy does until `good` copies are done; then every copy fails."""

    def __init__(self, good: int) -> None:
        self.good = good

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if self.good == 0:
            raise OSError("the link is down")
        self.good -= 1
        super().copy(target, source)


def chunked(rig: Rig, mover: Memcpy | None = None) -> ResidentState:
    return ResidentState(MANIFEST, rig.device, rig.slab, {"frozen": rig.base}, mover=mover, chunk=64)


def test_a_failed_load_is_taken_back_and_may_be_tried_again():
    rig = Rig()
    for good in range(SIZES["frozen"] // 64):
        mover = Faulty(good)
        state = chunked(rig, mover)
        with pytest.raises(OSError):
            state.load()
        assert state.residency is Residency.LOADING
        assert state.undo().bytes_in == 0 and state.residency is Residency.HOST
        mover.good = -1
        rig.device.random_()
        assert state.load().bytes_in == SIZES["frozen"] and torch.equal(rig.device[: SIZES["frozen"]], rig.base)


def test_a_failed_offload_is_taken_back_with_what_others_wrote_over_it():
    rig = Rig()
    chunks = (SIZES["weights"] + SIZES["grads"]) // 64
    for good in range(chunks):
        mover = Faulty(-1)
        state = chunked(rig, mover)
        state.load()
        rig.device[SIZES["frozen"] : -SIZES["steps"]].random_()
        state.mark("weights", DIRTY)
        state.mark("grads", DIRTY)
        before = rig.device.clone()
        mover.good = good
        with pytest.raises(OSError):
            state.offload()
        assert state.residency is Residency.OFFLOADING
        # What was let go of is another's until it is waited for again.
        rig.device[: SIZES["frozen"] + 64 * good].random_()
        mover.good = -1
        assert state.undo().bytes_in == SIZES["frozen"] + 64 * good
        assert state.residency is Residency.DEVICE and torch.equal(rig.device, before)
        state.offload()
        rig.device.random_()
        state.load()
        assert torch.equal(rig.device, before)


def test_what_is_done_is_taken_back_too_because_another_rank_failed():
    rig = Rig()
    state = chunked(rig)
    state.load()
    assert state.undo() and state.residency is Residency.HOST
    with pytest.raises(IllegalTransition, match="take back"):
        state.undo()
    state.load({"frozen", "weights"})
    rig.device[SIZES["frozen"] :][: SIZES["weights"]].random_()
    state.mark("weights", DIRTY)
    before = rig.device.clone()
    state.offload()
    rig.device[: SIZES["frozen"] + SIZES["weights"]].random_()
    assert state.undo().bytes_in == SIZES["frozen"] + SIZES["weights"] and state.residency is Residency.DEVICE
    assert torch.equal(rig.device, before) and state.present("weights") and not state.present("grads")


def test_only_an_undo_that_fails_loses_the_state():
    rig = Rig()
    mover = Faulty(-1)
    state = chunked(rig, mover)
    state.load()
    mover.good = 0
    state.mark("steps", DIRTY)
    with pytest.raises(OSError):
        state.offload()
    with pytest.raises(OSError):
        state.undo()
    assert state.residency is Residency.LOST
    for verb in (state.load, state.offload, state.undo):
        with pytest.raises(IllegalTransition):
            verb()


class Late:
    """Copies nothing before somebody waits for it, as a GPU may; then all up to there, in order."""

    def __init__(self) -> None:
        self.waiting = []

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> "Late.Arrival":
        self.waiting.append((target, source))
        return Late.Arrival(self, len(self.waiting) - 1)

    class Arrival:
        def __init__(self, late: "Late", number: int) -> None:
            self.late, self.number = late, number

        def synchronize(self) -> None:
            for i, (target, source) in enumerate(self.late.waiting[: self.number + 1]):
                target.copy_(source)
                self.late.waiting[i] = (target, target)


class Eager:
    """A seat at which everything is free, and where noise is written over what is let go of at once."""

    extent = Extent(0, MANIFEST.size)
    state = HELD

    def __init__(self, device: torch.Tensor) -> None:
        self.device = device
        self.released = [0]

    def wait(self, start: int, end: int) -> float:
        return 0.5

    def release(self, upto: int) -> None:
        assert upto > self.released[-1]
        self.device[self.released[-1] : upto].random_()
        self.released.append(upto)


def test_copies_that_run_behind_are_waited_for_before_their_bytes_are_given_away():
    rig = Rig()
    state = chunked(rig, Late())
    seat = Eager(rig.device)
    moved = state.load(seat=seat)
    assert moved.waited_s == 0.5 * MANIFEST.size / 64 and torch.equal(rig.device[: SIZES["frozen"]], rig.base)
    rig.device[SIZES["frozen"] :].random_()
    for bucket in ("weights", "grads"):
        state.mark(bucket, DIRTY)
    rig.device[-SIZES["steps"] :].zero_()
    before = rig.device.clone()
    state.offload(seat)
    assert seat.released[-1] == MANIFEST.size and len(seat.released) > 5
    state.load(seat=seat)
    assert torch.equal(rig.device, before)
    seat.released = [0]
    state.offload(seat)
    state.undo(seat)
    assert torch.equal(rig.device, before)


def test_an_undo_tells_who_comes_to_give_up():
    memory = create_memfd("gate", GATE_BYTES)
    gate = Gate(memory)
    rig = Rig()
    state = chunked(rig)
    seat, other = (gate.seat(i, str(i), Extent(0, MANIFEST.size)) for i in range(2))
    seat.come()
    state.load(seat=seat)
    seat.held()
    other.come()
    seat.leave()
    # Its last state has left, and is taken back because another rank of the gang could not.
    state.offload(seat)
    failed = []
    seat.wait = lambda start, end, wait=seat.wait: failed.append(seat.state) or wait(start, end)
    state.undo(seat)
    assert set(failed) == {FAILED}
    seat.held()
    assert gate.holders()[0].state is HELD
    gate.close()
    os.close(memory)


def test_an_undo_of_a_whole_offload_that_fails_loses_nothing():
    rig = Rig()
    mover = Faulty(-1)
    state = chunked(rig, mover)
    state.load()
    rig.device[SIZES["frozen"] :].random_()
    before = rig.device.clone()
    for bucket in ("weights", "grads", "steps"):
        state.mark(bucket, DIRTY)
    state.offload()
    mover.good = 3
    with pytest.raises(OSError):
        state.undo()
    assert state.residency is Residency.HOST
    rig.device.random_()
    mover.good = -1
    state.load()
    assert torch.equal(rig.device, before)


def test_a_part_comes_first_and_the_rest_when_it_is_pulled():
    rig = Rig()
    rig.state.load()
    rig.device[SIZES["frozen"] :].random_()
    whole = rig.device.clone()
    for bucket in ("weights", "grads", "steps"):
        rig.state.mark(bucket, DIRTY)
    rig.state.offload()
    rig.device.zero_()
    assert rig.state.load({"frozen", "weights", "none"}).bytes_in == SIZES["frozen"] + SIZES["weights"]
    assert rig.state.present("weights") and not rig.state.present("grads")
    assert not rig.device[SIZES["frozen"] + SIZES["weights"] :].any()
    with pytest.raises(BadInput, match="grads"):
        rig.state.mark("grads", DIRTY)
    with pytest.raises(BadInput, match="other"):
        rig.state.pull("other")
    # An absent bucket costs nothing on the way out either.
    assert counters(rig.state.offload()) == (0, 0, SIZES["frozen"] + SIZES["weights"])
    rig.state.load({"frozen"})
    assert counters(rig.state.pull("grads", "weights", "steps"))[1] == sum(SIZES.values()) - SIZES["frozen"]
    assert rig.state.pull("grads", "none").bytes_in == 0 and torch.equal(rig.device, whole)
    rig.state.offload()
    with pytest.raises(IllegalTransition, match="host"):
        rig.state.pull("grads")


def test_an_absent_bucket_that_is_marked_zero_is_pulled_as_zeros():
    rig = Rig()
    rig.state.load()
    rig.views["grads"]["a"].fill_(3.0)
    rig.state.mark("grads", DIRTY)
    rig.state.offload()
    rig.device.random_()
    rig.state.load({"frozen"})
    rig.state.mark("grads", ZERO)
    assert rig.state.pull("grads").bytes_in == 0 and not rig.views["grads"]["a"].any()


def test_a_pull_that_fails_leaves_the_state_usable():
    rig = Rig()
    mover = Faulty(-1)
    state = chunked(rig, mover)
    state.load()
    rig.device[SIZES["frozen"] :].random_()
    for bucket in ("weights", "grads", "steps"):
        state.mark(bucket, DIRTY)
    whole = rig.device.clone()
    state.offload()
    rig.device.random_()
    state.load({"frozen"})
    mover.good = 2
    with pytest.raises(OSError):
        state.pull("weights", "grads")
    assert state.residency is Residency.DEVICE and not state.present("weights")
    mover.good = -1
    state.pull("weights", "grads", "steps")
    assert torch.equal(rig.device, whole)


def test_a_spilled_state_comes_back_from_another_slab():
    rig = Rig()
    rig.state.load()
    rig.views["weights"]["a"].fill_(7.0)
    rig.state.mark("weights", DIRTY)
    with pytest.raises(IllegalTransition, match="device"):
        rig.state.rehome(None)
    rig.state.offload()
    stored = rig.slab.clone()
    rig.state.rehome(None)
    assert rig.state.residency is Residency.NVME
    for verb in (rig.state.load, rig.state.offload, rig.state.undo):
        with pytest.raises(IllegalTransition):
            verb()
    rig.slab.random_()
    with pytest.raises(BadInput):
        rig.state.rehome(stored[64:])
    assert rig.state.residency is Residency.NVME
    rig.state.rehome(stored)
    assert rig.state.residency is Residency.HOST
    rig.device.random_()
    rig.state.load()
    assert (rig.views["weights"]["a"] == 7.0).all() and not rig.views["grads"]["a"].any()


def test_a_switch_allocates_nothing():
    rig = Rig()

    def switch() -> None:
        for bucket in ("weights", "grads", "steps"):
            rig.state.mark(bucket, DIRTY)
        rig.state.offload()
        rig.state.load()

    rig.state.load()
    switch()
    chunks = [chunk for piece in rig.state._pieces.values() for chunk in piece.chunks]
    places = [(id(c.device), c.device.data_ptr(), id(c.home), c.home.data_ptr()) for c in chunks]
    tracemalloc.start()
    switch()
    settled = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    for _ in range(50):
        switch()
    after, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # A Moved record and its counters; 50 switches leave nothing behind.
    assert peak - settled < 2048 and after - settled < 1024
    assert places == [(id(c.device), c.device.data_ptr(), id(c.home), c.home.data_ptr()) for c in chunks]
    storages = {c.device.untyped_storage().data_ptr() for c in chunks}
    assert storages == {rig.device.untyped_storage().data_ptr()}
