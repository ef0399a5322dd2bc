"""bench.switch_cuda: what it does between two processes, on virtual memory of the host; what it says without a GPU."""

import json
import sys

import pytest
import torch

from bench import switch_cuda
from bench.switch_cuda import Peer, exchange, measure, table
from bench.switch_cudarank import LAYERS, digest, layout
from plexrl.types import DoesNotFit, PlexrlError, Unavailable

HOST = (sys.executable, "-m", "tests.unit.memory.hostrank")
SIZE = 1 << 21


@pytest.fixture(scope="module")
def figures():
    lines = []
    found = exchange(lines.append, SIZE, 160, 2, 0.2, HOST)
    assert len(lines) == 3
    return found


def test_it_measures_what_the_issue_asks_for(figures):
    assert figures["bytes"] == layout(SIZE, 160).size and figures["tensors"] == 160
    for name in ("offload_gbs", "load_gbs", "exchange_s", "exchange_ratio", "first_layer_ms", "kernels_beside_copies"):
        assert figures[name] > 0, name
    assert figures["residual_bytes_asleep"] == 5, "a sleeping rank holds its context and nothing else"
    assert json.loads(json.dumps(figures)) == figures


def test_the_table_names_every_reference(figures):
    plain = {"plain_out_gbs": 50.0, "plain_in_gbs": 49.0, "plain_both_gbs": 40.0, "gpu": "a GPU"}
    shares = {"offload_share": 0.95, "load_share": 0.91}
    saver = {"torch_memory_saver": {"sleep_gbs": 2.5, "wake_gbs": 5.5}, "cuda-checkpoint": None}
    text = table({**figures, **plain, **shares, **saver})
    assert "a GPU" in text and "50.0" in text and "2.5, 5.5" in text and "not measured" in text
    assert max(len(line) for line in text.splitlines()) <= 110


def test_other_bytes_than_were_sent_are_found(monkeypatch):
    asked = Peer.ask

    def spoilt(self, do, **how):
        said = asked(self, do, **how)
        return {"digest": said["digest"] ^ 1} if do == "digest" and how["where"] == "device" else said

    monkeypatch.setattr(Peer, "ask", spoilt)
    with pytest.raises(PlexrlError, match="other bytes than were sent are on the device"):
        exchange(lambda line: None, SIZE, 160, 1, 0.1, HOST)


def test_a_rank_that_ends_is_an_error_and_leaves_no_process():
    with pytest.raises(PlexrlError, match="ended with status 3"):
        exchange(lambda line: None, SIZE, 160, 1, 0.1, (sys.executable, "-c", "raise SystemExit(3)"))


def test_digests_see_values_and_places():
    buffer = torch.arange(1 << 12, dtype=torch.int64)
    swapped = buffer.clone()
    swapped[[3, 9]] = swapped[[9, 3]]
    changed = buffer.clone()
    changed[-1] += 1
    seen = {digest(t.view(torch.uint8)) for t in (buffer, swapped, changed)}
    assert len(seen) == 3 and digest(buffer.clone().view(torch.uint8)) in seen


@pytest.mark.parametrize("tensors", [30, 300, 3000])
def test_the_layout_has_the_bytes_and_a_bucket_for_each_layer(tensors):
    manifest = layout(1 << 24, tensors)
    assert sum(len(bucket.tensors) for bucket in manifest.buckets) == max(tensors, 4 * LAYERS)
    assert 0.9 < manifest.size / (1 << 24) <= 1.05
    assert sum(bucket.name.startswith("weights") for bucket in manifest.buckets) == LAYERS


def test_without_a_gpu_it_says_so_and_measures_nothing(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(Unavailable, match="no GPU"):
        measure(print)
    assert capsys.readouterr().out == ""


def test_a_small_gpu_is_refused_with_the_figures(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(switch_cuda, "_run", lambda command, what: "2000000000 2000000000")
    with pytest.raises(DoesNotFit, match="2000000000 bytes of the GPU"):
        measure(lambda line: None)
