"""bench.switch_cuda: what it does between two processes, on virtual memory of the host; what it says without a GPU."""

import json
import sys

import pytest
import torch

from bench import switch_cuda
from bench.switch_cuda import Peer, exchange, measure, table
from bench.switch_serve import digest
from plexrl.types import DoesNotFit, PlexrlError, Unavailable

HOST = (sys.executable, "-m", "tests.unit.memory.hostrank")
SIZE = 1 << 21


@pytest.fixture(scope="module")
def measured():
    lines = []
    found = exchange(lines.append, SIZE, 160, 2, 0.2, HOST)
    assert len(lines) == 4
    return found


def test_it_measures_what_the_issue_asks_for(measured):
    row, once = measured
    assert SIZE * 0.9 < row["bytes"] <= SIZE * 1.1 and row["tensors"] == 160
    for name in ("offload_gbs", "load_gbs", "exchange_seconds", "exchange_ratio", "first_layer_ms", "ours_seconds"):
        assert row[name] > 0, name
    assert row["clean_bytes_out"] == 0 and row["bytes_moved"] == row["bytes_minimum"]
    for name in ("kernels_beside_copies", "offload_beside_kernels", "load_beside_kernels", "map_s_per_gib"):
        assert once[name] > 0, name
    assert once["residual_bytes_new"] == once["residual_bytes_asleep"] == 5, "a sleeping rank holds its context alone"
    assert json.loads(json.dumps(measured)) == list(measured)


def test_the_table_names_every_reference(measured):
    row, once = measured
    plain = {"plain_out_gbs": 50.0, "plain_in_gbs": 49.0, "plain_both_gbs": 40.0, "naive_seconds": 9.0}
    row = {**row, **plain, **switch_cuda._shares(row, plain)}
    refused = [{"bytes": 8, "tensors": 1, "why": "too large"}]
    saver = {"torch_memory_saver": {"sleep_gbs": 2.5, "wake_gbs": 5.5}, "cuda-checkpoint": None}
    text = table({**once, **saver, "gpu": "a GPU", "repeats": 2, "rows": [row], "refused": refused})
    for said in ("a GPU", "50.0", "2.5, 5.5", "not measured", "too large"):
        assert said in text, said


def test_other_bytes_than_were_sent_are_found(monkeypatch):
    asked = Peer.ask

    def spoilt(self, do, **how):
        said = asked(self, do, **how)
        return {"digest": said["digest"] ^ 1} if do == "digest" and how["where"] == "device" else said

    monkeypatch.setattr(Peer, "ask", spoilt)
    with pytest.raises(PlexrlError, match="other bytes than were sent are on the device"):
        exchange(lambda line: None, SIZE, 160, 1, 0.0, HOST)


def test_a_rank_that_ends_is_an_error_and_leaves_no_process():
    with pytest.raises(PlexrlError, match="ended with status 3"):
        exchange(lambda line: None, SIZE, 160, 1, 0.0, (sys.executable, "-c", "raise SystemExit(3)"))


def test_digests_see_values_and_places():
    buffer = torch.arange(1 << 12, dtype=torch.int64)
    swapped = buffer.clone()
    swapped[[3, 9]] = swapped[[9, 3]]
    changed = buffer.clone()
    changed[-1] += 1
    seen = {digest(t.view(torch.uint8)) for t in (buffer, swapped, changed)}
    assert len(seen) == 3 and digest(buffer.clone().view(torch.uint8)) in seen


def test_without_a_gpu_it_says_so_and_measures_nothing(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(Unavailable, match="no GPU"):
        measure(print)
    assert capsys.readouterr().out == ""


def test_a_small_gpu_is_refused_with_the_figures(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(switch_cuda, "_run", lambda command, what: "2000000000 2000000000")
    with pytest.raises(DoesNotFit, match="2000000000 and"):
        measure(lambda line: None)
