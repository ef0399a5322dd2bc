"""The manifest: alignment, order, views, and refusal of what it cannot lay out."""

import pytest
import torch

from plexrl.memory.manifest import Manifest, TensorSpec
from plexrl.memory.pages import ALIGN
from plexrl.types import BadInput

SPECS = {
    "frozen": [TensorSpec("a", (3, 5), "bfloat16"), TensorSpec("b", (7,), "float32")],
    "weights": [TensorSpec("w", (2, 3, 4), "float32"), TensorSpec("scalar", (), "float32")],
    "rng": [TensorSpec("state", (5056,), "uint8")],
    "steps": [TensorSpec("none", (0, 4), "int64"), TensorSpec("n", (9,), "int64")],
    "empty": [],
}


def test_everything_is_aligned_and_nothing_overlaps():
    manifest = Manifest.build(SPECS)
    end = 0
    for bucket in manifest.buckets:
        assert bucket.offset == end and bucket.offset % ALIGN == 0 and bucket.size % ALIGN == 0
        for spec, at in bucket.tensors:
            assert at >= end and at % ALIGN == 0
            end = at + spec.nbytes
        end = bucket.offset + bucket.size
    assert manifest.size == manifest.end == end


def test_views_hold_each_tensor_in_its_own_bytes():
    manifest = Manifest.build(SPECS)
    buffer = torch.zeros(manifest.size, dtype=torch.uint8)
    views = manifest.views(buffer)
    assert {bucket: list(tensors) for bucket, tensors in views.items()} == {
        bucket: [spec.name for spec in specs] for bucket, specs in SPECS.items()
    }
    for number, (bucket, specs) in enumerate(SPECS.items()):
        for spec in specs:
            tensor = views[bucket][spec.name]
            assert tensor.shape == spec.shape and tensor.dtype == getattr(torch, spec.dtype)
            assert tensor.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
            tensor.fill_(number + 1)
    for number, (bucket, specs) in enumerate(SPECS.items()):
        assert all((views[bucket][spec.name] == number + 1).all() for spec in specs)


def test_a_base_offset_moves_offsets_and_not_the_size():
    here, there = Manifest.build(SPECS), Manifest.build(SPECS, base_offset=128)
    assert there.size == here.size and there.end == here.size + 128
    assert [b.offset - 128 for b in there.buckets] == [b.offset for b in here.buckets]
    views = there.views(torch.zeros(there.end, dtype=torch.uint8))
    assert views["frozen"]["a"].storage_offset() * 2 == 128


def test_without_lays_out_the_rest_from_zero():
    rest = Manifest.build(SPECS, base_offset=64).without("frozen", "rng")
    assert rest == Manifest.build({name: SPECS[name] for name in ("weights", "steps", "empty")})
    assert Manifest.build(SPECS).without(*SPECS).size == 0


@pytest.mark.parametrize(
    ("specs", "base", "word"),
    [
        ({"b": [TensorSpec("x", (2,), "float16")]}, 0, "float16"),
        ({"b": [TensorSpec("x", (-1,), "float32")]}, 0, "shape"),
        ({"b": [TensorSpec("x", (1,), "uint8"), TensorSpec("x", (2,), "uint8")]}, 0, "twice"),
        ({}, 32, "64"),
    ],
)
def test_bad_specs_are_refused(specs, base, word):
    with pytest.raises(BadInput, match=word):
        Manifest.build(specs, base)


@pytest.mark.parametrize(
    "buffer",
    [
        torch.zeros(8192, dtype=torch.int8),
        torch.zeros(2, 8192, dtype=torch.uint8),
        torch.zeros(63, dtype=torch.uint8),
        torch.zeros(8192, dtype=torch.uint8)[4:],
    ],
    ids=["dtype", "shape", "short", "misaligned"],
)
def test_bad_buffers_are_refused(buffer):
    with pytest.raises(BadInput):
        Manifest.build(SPECS).views(buffer)
