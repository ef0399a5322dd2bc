"""bench.switch counts what it says it counts."""

import json

import torch

from bench.switch import BUCKETS, allocations, differing, layout, main, measure
from plexrl.types import BadInput


def test_one_gibibyte_in_three_hundred_tensors():
    manifest = layout()
    assert manifest.size == 1 << 30
    assert sum(len(bucket.tensors) for bucket in manifest.buckets) == 300
    assert [bucket.name for bucket in manifest.buckets] == list(BUCKETS)


def test_the_hot_path_is_free_of_allocations_and_clean_bytes():
    lines = []
    figures = measure(1 << 22, 2, lines.append)
    assert figures["hot_path_allocations"] == 0 and figures["clean_bytes_out"] == 0
    assert figures["plain_copy_gbs"] > 0 and figures["offload_gbs"] > 0 and figures["load_gbs"] > 0
    assert json.loads(json.dumps(figures)) == figures and len(lines) == 4


def test_the_counters_see_what_they_look_for():
    assert allocations(lambda: None) == 0
    assert allocations(lambda: torch.empty(1 << 16)) >= 1
    assert allocations(lambda: bytearray(1 << 16)) >= 1
    assert differing(torch.tensor([5, 5, 6], dtype=torch.uint8), 5) == 1


def test_cuda_is_refused_as_not_built(capsys):
    assert main(["--device", "cuda", "--json"]) == BadInput.exit_code
    out, err = capsys.readouterr()
    assert out == "" and "not built" in err and "--device cpu" in err
