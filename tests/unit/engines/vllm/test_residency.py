"""A replica leaves its device and comes back, as often as it must, and is the same."""

from __future__ import annotations

import json
import os
import tempfile

import numpy as np
import psutil
import pytest
import torch
from tinker.proto import tinker_public_pb2 as pb
from transformers import AutoModelForCausalLM

from plexrl.engines.parking import Costs, Meter
from plexrl.engines.protocol import build
from plexrl.engines.vllm.versions import Versions
from plexrl.memory.device import CpuDevice
from plexrl.memory.gate import FREE, Gate
from plexrl.types import BadInput, Extent, PlexrlError
from tests.unit.engines.test_sample import ask, drain, draws, forced, tokens
from tests.unit.engines.vllm.test_versions import adapter

BOUND = 2e-4
PARK = Costs(copy_bps=1e12, read_token_s=1.0)
READ_AGAIN = Costs(copy_bps=1.0, read_token_s=1e-9)


def foreign(engine) -> None:
    """Somebody else's bytes in all of the replica's place, many of them no numbers."""
    engine._house.region.buffer.random_(generator=torch.Generator().manual_seed(1))


def bodies(count: int) -> dict[str, bytes]:
    rng = np.random.default_rng(3)
    prompts = [rng.integers(3, 500, 3 + 11 * index).tolist() for index in range(count)]
    return {str(i): ask(p, 2, max_tokens=6 + 5 * i, seed=i, prompt_logprobs=True) for i, p in enumerate(prompts)}


def test_every_tensor_lies_in_the_extent(replicas) -> None:
    """Parameters, buffers, stacks of adapters and KV; beside it only the scales, which are single numbers."""
    for kind in ("lora", "full"):
        _, engine = replicas("tied", kind)
        buffer = engine._house.region.buffer
        start, end = buffer.data_ptr(), buffer.data_ptr() + buffer.numel()
        runner = engine._house.runner
        held = [*runner.model.parameters(), *runner.model.buffers(), *runner.kv_caches, *engine._house._stacks()]
        for module in runner.model.modules():
            for value in vars(module).values():
                held += [t for t in (value if isinstance(value, tuple | list) else [value]) if torch.is_tensor(t)]
        outside = [t for t in held if not start <= t.data_ptr() < end and t.numel()]
        assert sum(t.nbytes for t in outside) < 1024
        assert len(held) > 20


@pytest.mark.parametrize("costs", [PARK, READ_AGAIN])
def test_offload_after_every_step(replicas, vllm_models, monkeypatch, costs: Costs) -> None:
    """Parked: the same tokens and bits. Read again: the same tokens, logprobs of the draw within the bound."""
    model = AutoModelForCausalLM.from_pretrained(vllm_models["tied"])
    node, engine = replicas("tied")
    monkeypatch.setattr(Meter, "costs", costs)
    slab = adapter(node, vllm_models["tied"], 8, 5, f"parked{costs.copy_bps:g}")
    engine.attach("v", slab, 8, True, True, True)
    asked = bodies(4)
    found = []
    for leave in (False, True):
        for name, body in asked.items():
            engine.add(name, None if int(name) % 2 else "v", body)
        got = {}
        while engine.live():
            got |= {call: result.body for call, result in engine.step()}
            if leave:
                live, moved = engine._blocks.live(), engine.offload()
                assert moved.bytes_out + moved.bytes_clean >= (len(live) if costs is PARK else 0) * engine._blocks.size
                assert moved.bytes_out == 0 or costs is PARK
                foreign(engine)
                engine.load_device()
        found.append({call: pb.SampleResponse.FromString(body) for call, body in got.items()})
    stayed, left = found
    for name, body in asked.items():
        prompt = [t for chunk in json.loads(body)["prompt"]["chunks"] for t in chunk["tokens"]]
        for one, other in zip(stayed[name].sequences, left[name].sequences, strict=True):
            assert tokens(one) == tokens(other)
            if costs is PARK:
                np.testing.assert_allclose(draws(one), draws(other), atol=1e-5)
            if int(name) % 2:
                np.testing.assert_allclose(draws(other), forced(model, prompt, tokens(other)), atol=BOUND)
    engine.detach("v")


def test_only_what_is_new_is_parked(replicas, monkeypatch) -> None:
    _, engine = replicas("tied")
    monkeypatch.setattr(Meter, "costs", PARK)
    engine.add("a", None, ask(list(range(3, 73)), max_tokens=12))
    engine.step()
    size = engine._blocks.size
    moved = [engine.offload().bytes_out // size]
    engine.load_device()
    moved.append(engine.offload().bytes_out // size)
    engine.load_device()
    engine.step()
    moved.append(engine.offload().bytes_out // size)
    engine.load_device()
    engine.cancel("a")
    # 70 tokens are three blocks; nothing; the one that a token was added to.
    assert moved == [3, 0, 1]


def test_calls_wait_while_the_replica_is_away(replicas) -> None:
    _, engine = replicas("tied")
    engine.add("early", None, ask([5, 6, 7], max_tokens=8, temperature=0))
    engine.add("dropped", None, ask([8, 9], max_tokens=8))
    engine.step()
    engine.offload()
    with pytest.raises(PlexrlError, match="not on its device"):
        engine.step()
    engine.add("late", None, ask([5, 6, 7], max_tokens=8, temperature=0))
    engine.cancel("dropped")
    foreign(engine)
    engine.load_device()
    found = drain(engine)
    assert set(found) == {"early", "late"}
    assert tokens(found["early"].sequences[0]) == tokens(found["late"].sequences[0])


def test_a_switch_is_taken_back(replicas) -> None:
    """After a leave, and after a return: as if it had not been; the gate says so."""
    _, engine = replicas("tied")
    seat = engine._house.seat
    engine.add("a", None, ask([5, 6, 7], 2, max_tokens=10, seed=4))
    engine.add("b", None, ask([5, 6, 7], 2, max_tokens=10, seed=4))
    engine.step()
    engine.offload()
    assert seat.state is FREE
    foreign(engine)
    engine.undo()
    engine.step()
    engine.offload()
    engine.load_device()
    engine.undo()
    assert seat.state is FREE
    foreign(engine)
    engine.load_device()
    found = drain(engine)
    assert [tokens(s) for s in found["a"].sequences] == [tokens(s) for s in found["b"].sequences]


def test_it_stays_until_a_leaver_is_gone(replicas, vllm_models, monkeypatch, tmp_path) -> None:
    """Two replicas take turns at the same place of one device. What one made on disk to be built is gone then."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    node, engine = replicas("tied")
    engine.add("a", None, ask([5, 6, 7], max_tokens=8, temperature=0))
    engine.step()
    engine.offload()
    other = node.replica(vllm_models["tied"])
    assert not os.listdir(tmp_path)
    other.add("b", None, ask([5, 6, 7], max_tokens=8, temperature=0))
    engine._house.seat.patience = 0.05
    with pytest.raises(PlexrlError):
        engine.load_device()
    engine.undo()
    found = {}
    while other.live() or engine.live():
        found |= {call: pb.SampleResponse.FromString(result.body) for call, result in other.step()}
        other.offload()
        engine.load_device()
        found |= {call: pb.SampleResponse.FromString(result.body) for call, result in engine.step()}
        engine.offload()
        other.load_device()
    other.offload()
    engine._house.seat.patience = 60.0
    engine.load_device()
    assert tokens(found["a"].sequences[0]) == tokens(found["b"].sequences[0])
    other.close()


def test_nothing_grows(replicas, vllm_models) -> None:
    """Twenty times away and back with calls and adapters: no descriptor, mapping, thread or memory more."""
    node, engine = replicas("tied")
    process = psutil.Process()
    slab = adapter(node, vllm_models["tied"], 8, 6, "grows")

    def turn(index: int) -> tuple[int, int, int, int]:
        engine.attach("g", slab, 8, True, True, True)
        engine.add("a", "g", ask([5, 6, 7], 4, max_tokens=4, seed=index))
        engine.step()
        engine.offload()
        engine.load_device()
        drain(engine)
        engine.detach("g")
        with open("/proc/self/maps") as maps:
            return process.num_fds(), process.num_threads(), len(maps.readlines()), process.memory_info().rss

    for index in range(5):
        before = turn(index)
    for index in range(20):
        after = turn(index)
    assert after[:2] == before[:2]
    assert after[2] - before[2] <= 8
    assert after[3] - before[3] < 4 << 20


def test_a_transfer_that_went_wrong_is_seen(replicas, vllm_models, monkeypatch) -> None:
    """A version whose bytes differ on the device from its slab is never drawn from."""
    from tests.unit.engines.vllm.test_versions import full_version

    node, engine = replicas("tied", "full")
    engine.attach("w", full_version(node, vllm_models["tied"], 9, "wrong"), None, True, True, True)
    engine.add("a", "w", ask([5], max_tokens=1))
    monkeypatch.setattr(Versions, "_checks", lambda self: True)
    pull = engine._house.state.pull

    def damaged(*names: str, seat):
        moved = pull(*names, seat=seat)
        engine._house.region.buffer[engine._house.model_at] ^= 1
        return moved

    monkeypatch.setattr(engine._house.state, "pull", damaged)
    with pytest.raises(PlexrlError, match="differs on the device"):
        engine.step()
    monkeypatch.undo()
    engine.cancel("a")
    engine.detach("w")


def test_it_opens_no_port(replicas) -> None:
    replicas("tied")
    assert not [c for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN]


def test_specs_that_do_not_fit(vllm_models) -> None:
    from msgspec import structs

    from tests.unit.engines.vllm.conftest import Replica

    node = Replica()
    spec = node.replica_spec(vllm_models["tied"])
    for change, said in (
        ({"extent_size": 4096}, "too small"),
        ({"kv_bytes": 1 << 15}, "kv_bytes"),
        ({"base": None}, "no slab"),
        ({"world": 2}, "several ranks"),
        ({"max_context": 512}, "positions"),
    ):
        bad = structs.replace(spec, **change)
        seat = Gate(node.gate_fd).seat(0, "g", Extent(0, max(bad.extent_size, 4096)))
        with pytest.raises(BadInput, match=said):
            build(bad, CpuDevice(node.device_fd, node.size), node.map, seat)
