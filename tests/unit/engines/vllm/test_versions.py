"""Adapters and full parameters by version: beside each other, one after another, never half."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tinker.proto import tinker_public_pb2 as pb

from plexrl.engines import layout, sizing
from plexrl.engines.protocol import UserError, build
from plexrl.engines.torch.home import manifest
from plexrl.memory.device import CpuDevice, create_memfd
from plexrl.types import BadInput, Role
from tests.unit.engines.conftest import Node
from tests.unit.engines.test_sample import ask, drain, draws, tokens

BOUND = 2e-4


def adapter(node: Node, model_dir: str, rank: int, seed: int, name: str, unembed: bool = True):
    """A slab with a random adapter in the house's snapshot form."""
    slab = node.arena.alloc(name, sizing.snapshot_bytes(model_dir, "float32", "lora", rank, True, True, unembed), 1)
    specs = layout.adapter_specs(layout.architecture(model_dir), rank, True, True, unembed)
    generator = torch.Generator().manual_seed(seed)
    for tensor in manifest({"weights": specs}).views(node.map.view(slab))["weights"].values():
        tensor.normal_(0, 0.1, generator=generator)
    return slab


def reference(node: Node, model_dir: str, kind: str = "lora"):
    """The torch engine on a device of its own, over the same arena."""
    spec = node.spec(model_dir, Role.SAMPLE, kind)
    return build(spec, CpuDevice(create_memfd("reference", node.size), node.size), node.map)


@pytest.mark.parametrize("name", ["tied", "untied", "qwen"])
def test_tenants_in_one_batch_are_drawn_as_by_the_torch_engine(replicas, vllm_models, name: str) -> None:
    """Two adapters of different ranks, one without a head, and the base itself: greedy tokens and logprobs agree."""
    folder = vllm_models[name]
    node, engine = replicas(name)
    torch_engine = reference(node, folder)
    shapes = {"one": (8, True), "two": (3, False)}
    slabs = [adapter(node, folder, rank, i, f"{name}{v}", head) for i, (v, (rank, head)) in enumerate(shapes.items())]
    for each in (engine, torch_engine):
        for slab, (version, (rank, head)) in zip(slabs, shapes.items(), strict=True):
            each.attach(version, slab, rank, True, True, head)
        for index, version in enumerate([*shapes, None]):
            body = ask([5 + index, 6, 7, 8], max_tokens=8, temperature=0, prompt_logprobs=True)
            each.add(str(version), version, body)
    got, want = drain(engine), drain(torch_engine)
    for version in map(str, [*shapes, None]):
        assert tokens(got[version].sequences[0]) == tokens(want[version].sequences[0])
        np.testing.assert_allclose(draws(got[version].sequences[0]), draws(want[version].sequences[0]), atol=BOUND)
        prompt = [np.frombuffer(found[version].prompt_logprobs, "<f4")[1:] for found in (got, want)]
        np.testing.assert_allclose(*prompt, atol=BOUND)
    assert tokens(got["one"].sequences[0]) != tokens(got["None"].sequences[0])
    for version in shapes:
        engine.detach(version)


def test_more_tenants_than_slots_take_turns(replicas, vllm_models) -> None:
    node, engine = replicas("tied")
    for index in range(4):
        slab = adapter(node, vllm_models["tied"], 4, index, f"many{index}")
        engine.attach(f"many{index}", slab, 4, True, True, True)
        engine.add(str(index), f"many{index}", ask([5, 6, 7], 2, max_tokens=6, temperature=0))
    found = drain(engine)
    assert len({tuple(tokens(found[str(index)].sequences[0])) for index in range(4)}) > 1
    with pytest.raises(BadInput, match="not attached"):
        engine.add("x", "many9", ask([5], max_tokens=1))
    engine.add("x", "many0", ask([5], max_tokens=1))
    with pytest.raises(BadInput, match="in use"):
        engine.detach("many0")
    engine.cancel("x")
    for index in range(4):
        engine.detach(f"many{index}")


def test_what_does_not_fit_the_group_is_refused(replicas, vllm_models) -> None:
    node, engine = replicas("tied")
    slab = node.arena.alloc("odd", 64, 1)
    with pytest.raises(BadInput, match="rank 9"):
        engine.attach("v", slab, 9, True, True, True)
    with pytest.raises(BadInput, match="needs"):
        engine.attach("v", slab, 8, True, True, True)
    with pytest.raises(BadInput, match="other kind"):
        engine.attach("v", slab, None, True, True, True)


def test_weights_that_are_no_numbers_fail_their_call_only(replicas, vllm_models) -> None:
    node, engine = replicas("tied")
    slab = adapter(node, vllm_models["tied"], 4, 1, "broken")
    node.map.view(slab).view(torch.float32).fill_(torch.nan)
    engine.attach("broken", slab, 4, True, True, True)
    engine.add("good", None, ask([5, 6, 7], 2, max_tokens=6, temperature=0))
    engine.add("bad", "broken", ask(list(range(3, 70)), 2, max_tokens=6))
    found = drain(engine)
    assert isinstance(found["bad"], UserError)
    engine.add("after", None, ask([5, 6, 7], max_tokens=6, temperature=0))
    assert tokens(drain(engine)["after"].sequences[0]) == tokens(found["good"].sequences[0])
    engine.detach("broken")


def full_version(node: Node, model_dir: str, seed: int, name: str):
    """A slab with random parameters in the house's snapshot form."""
    slab = node.arena.alloc(name, sizing.snapshot_bytes(model_dir, "float32", "full", None, True, True, True), 1)
    specs = layout.base_specs(layout.architecture(model_dir), "float32")
    generator = torch.Generator().manual_seed(seed)
    for tensor in manifest({"weights": specs}).views(node.map.view(slab))["weights"].values():
        tensor.normal_(0, 0.2, generator=generator)
    return slab


@pytest.mark.parametrize("name", ["tied", "qwen"])
def test_full_versions_come_one_after_another(replicas, vllm_models, name: str) -> None:
    """Calls of three versions at once: each is drawn by its own weights, whole, as by the torch engine."""
    folder = vllm_models[name]
    node, engine = replicas(name, "full")
    torch_engine = reference(node, folder, "full")
    slabs = {f"{name}v{seed}": full_version(node, folder, seed, f"{name}v{seed}") for seed in (1, 2)}
    order = [None, f"{name}v1", f"{name}v2", f"{name}v1", None]
    for each in (engine, torch_engine):
        for version, slab in slabs.items():
            each.attach(version, slab, None, True, True, True)
        for index, version in enumerate(order):
            each.add(str(index), version, ask([5, 6, 7, index], max_tokens=6, temperature=0))
    got, want = drain(engine), drain(torch_engine)
    for index in range(len(order)):
        assert tokens(got[str(index)].sequences[0]) == tokens(want[str(index)].sequences[0])
        np.testing.assert_allclose(
            draws(got[str(index)].sequences[0]), draws(want[str(index)].sequences[0]), atol=BOUND
        )
    engine.add("last", f"{name}v2", ask([5], max_tokens=1, temperature=0))
    drain(engine)
    for version in slabs:
        engine.detach(version)
    engine.add("base", None, ask([5, 6, 7, 0], max_tokens=6, temperature=0))
    again = drain(engine)["base"]
    assert isinstance(again, pb.SampleResponse)
    assert tokens(again.sequences[0]) == tokens(got["0"].sequences[0])
