"""bench.switch counts what it says it counts."""

import json

import pytest
import torch

from bench.switch import GIB, PROCESSES_BYTES, ROWS, main, measure, pair, soak, table
from bench.switch_rank import BUCKETS, allocations, differing, layout
from plexrl.types import DoesNotFit, Unavailable

KEYS = {
    "bytes",
    "tensors",
    "plain_copy_gbs",
    "offload_gbs",
    "load_gbs",
    "first_layer_ms",
    "clean_bytes_out",
    "hot_path_allocations",
    "bytes_moved",
    "bytes_minimum",
    "naive_seconds",
    "ours_seconds",
}


@pytest.mark.parametrize("total, tensors", [*ROWS, (4 << 20, 30)])
def test_a_row_has_the_bytes_and_tensors_that_it_says(total, tensors):
    manifest = layout(total, tensors)
    assert manifest.size == total
    assert sum(len(bucket.tensors) for bucket in manifest.buckets) == tensors
    assert [bucket.name for bucket in manifest.buckets] == list(BUCKETS)
    assert manifest.buckets[0].size < total // 16


def test_between_two_processes_nothing_is_allocated_and_nothing_moves_that_need_not():
    lines = []
    figures = measure(4 << 20, 300, 2, lines.append, chunk=1 << 18)
    assert figures.keys() >= KEYS
    assert figures["hot_path_allocations"] == 0 and figures["clean_bytes_out"] == 0
    # Three quarters go out and come back: gradients are zero after a step.
    assert figures["bytes_moved"] == figures["bytes_minimum"] == 6 << 20
    assert min(figures[key] for key in ("plain_copy_gbs", "offload_gbs", "load_gbs", "first_layer_ms")) > 0
    assert figures["naive_seconds"] > 0 and figures["ours_seconds"] > 0
    assert json.loads(json.dumps(figures)) == figures and lines


def test_where_memory_is_short_one_state_goes_from_process_to_process():
    figures = measure(4 << 20, 30, 3, lambda line: None, 1, chunk=1 << 18)
    assert figures.keys() >= KEYS and figures["exchange_seconds"] is None
    assert figures["hot_path_allocations"] == 0 and figures["clean_bytes_out"] == 0
    assert figures["bytes_moved"] == figures["bytes_minimum"] == 6 << 20
    assert "-" in table({"says": "", "rows": [figures], "refused": []})


def test_two_hundred_switches_leave_nothing_behind():
    figures = soak(200, lambda line: None)
    growth = figures["growth"]
    assert growth["device_bytes"] == growth["descriptors"] == growth["mappings"] == 0
    # 400 bytes of a switch and process that stay would show.
    assert growth["host_bytes"] < 160 << 10, figures


def test_the_counters_see_what_they_look_for():
    assert allocations(lambda: None) == 0
    assert allocations(lambda: torch.empty(1 << 16)) >= 1
    assert allocations(lambda: bytearray(1 << 16)) >= 1
    assert differing(torch.tensor([5, 5, 6], dtype=torch.uint8), 5) == 1


def test_what_does_not_fit_is_refused_with_the_figures():
    with pytest.raises(DoesNotFit, match=str(300 * 1024 * GIB + PROCESSES_BYTES)), pair(100 * 1024 * GIB, 30):
        pass


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_is_refused_without_a_gpu(capsys):
    assert main(["--device", "cuda", "--json"]) == Unavailable.exit_code
    out, err = capsys.readouterr()
    assert out == "" and "GPU" in err
