"""Resident state: what moves, what does not, and that a switch allocates nothing."""

import tracemalloc

import pytest
import torch

from plexrl.memory.manifest import Manifest, TensorSpec
from plexrl.memory.resident import CLEAN, DIRTY, LEGAL, ZERO, IllegalTransition, ResidentState, advance
from plexrl.types import BadInput, Moved, Residency

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


def test_an_error_in_a_copy_loses_the_state(monkeypatch):
    rig = Rig()
    rig.state.load()
    rig.state.mark("steps", DIRTY)
    monkeypatch.setattr(rig.state._pieces["steps"], "home", torch.zeros(3, dtype=torch.uint8))
    with pytest.raises(RuntimeError):
        rig.state.offload()
    assert rig.state.residency is Residency.LOST
    with pytest.raises(IllegalTransition):
        rig.state.load()


def test_a_switch_allocates_nothing():
    rig = Rig()

    def switch() -> None:
        for bucket in ("weights", "grads", "steps"):
            rig.state.mark(bucket, DIRTY)
        rig.state.offload()
        rig.state.load()

    rig.state.load()
    switch()
    places = [(id(p.device), p.device.data_ptr(), id(p.home), p.home.data_ptr()) for p in rig.state._pieces.values()]
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
    assert places == [
        (id(p.device), p.device.data_ptr(), id(p.home), p.home.data_ptr()) for p in rig.state._pieces.values()
    ]
    storages = {p.device.untyped_storage().data_ptr() for p in rig.state._pieces.values()}
    assert storages == {rig.device.untyped_storage().data_ptr()}
