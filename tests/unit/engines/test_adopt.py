"""An engine that has ended leaves its deployments in the arena; another goes on from there, or says that it cannot."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plexrl.engines import layout
from plexrl.engines.torch import header
from plexrl.types import PlexrlError
from tests.unit.engines.conftest import Node, request, run, sft
from tests.unit.engines.test_exchange import KINDS, OPTIM, same, state, step
from tests.unit.engines.test_train_state import trainer


def heir(node: Node, model_dir: str, rank: int | None, slab, name: str = "d", **more: object):
    """An engine without deployments on the same arena, which adopts one."""
    other = Node()
    other.arena, other.arena_fd, other.map = node.arena, node.arena_fd, node.map
    engine = other.join(model_dir, "train", "full" if rank is None else "lora", micro_batch_tokens=24, **more)
    engine.create(name, slab, rank, 99, True, True, True, adopt=True)
    return engine


@KINDS
def test_training_goes_on_bit_for_bit_in_another_engine(models: dict[str, str], rank: int | None) -> None:
    """With gradients that wait for their step, and with none: what stands in the slab of zero buckets is old."""
    twin = trainer(Node(), models["tied"], rank)
    node = Node()
    engine = trainer(node, models["tied"], rank)
    slab = engine._deployments["d"].slab
    for turn in range(3):
        for one in (engine, twin):
            step(one, turn)
            run(one.forward_backward("d", request("cross_entropy", sft(10 + turn)), False))
            if turn == 1:
                one.optim_step("d", OPTIM)
        engine.offload()
        engine = heir(node, models["tied"], rank, slab)
        assert same(state(engine), state(twin))
    assert step(engine, 5) == step(twin, 5)
    assert same(state(engine), state(twin))


@KINDS
def test_a_new_deployment_can_be_adopted_before_its_first_call(models: dict[str, str], rank: int | None) -> None:
    node = Node()
    engine = trainer(node, models["tied"], rank)
    slab = engine._deployments["d"].slab
    engine.offload()
    twin = trainer(Node(), models["tied"], rank)
    assert step(heir(node, models["tied"], rank, slab), 0) == step(twin, 0)


@KINDS
def test_what_was_on_a_device_or_half_done_is_refused(models: dict[str, str], rank: int | None) -> None:
    node = Node()
    engine = trainer(node, models["tied"], rank)
    slab = engine._deployments["d"].slab
    step(engine, 0)
    with pytest.raises(PlexrlError, match="not whole"):
        heir(node, models["tied"], rank, slab)
    generator = engine.forward_backward("d", request("cross_entropy", sft(1)), False)
    next(generator)
    engine.offload()
    with pytest.raises(PlexrlError, match="half done"):
        heir(node, models["tied"], rank, slab)
    engine.load_device()
    engine.undo()
    engine.load_device()
    run(generator)
    engine.offload()
    heir(node, models["tied"], rank, slab)
    # A switch that was taken back: what it had brought home is no longer all there is, unless it is not used again.
    engine.undo()
    if rank is not None:
        heir(node, models["tied"], rank, slab)
        engine.optim_step("d", OPTIM)
    with pytest.raises(PlexrlError, match="not whole"):
        heir(node, models["tied"], rank, slab)


def test_adapters_that_were_not_on_the_device_survive_their_engine(models: dict[str, str]) -> None:
    """Of three adapters over two slots only the two that were there are lost when the process is killed."""
    node = Node()
    engine = trainer(node, models["tied"], 4)
    slabs = {"d": engine._deployments["d"].slab}
    for name in "ef":
        slabs[name] = node.state(models["tied"], 4)
        engine.create(name, slabs[name], 4, 3, True, True, True)
    for name in "def":
        run(engine.forward_backward(name, request("cross_entropy", sft(1)), False))
        engine.optim_step(name, OPTIM)
    kept = heir(node, models["tied"], 4, slabs["d"])
    twin = trainer(Node(), models["tied"], 4)
    step(twin, 1)
    assert same(state(kept), state(twin))
    for name in "ef":
        with pytest.raises(PlexrlError, match="not whole"):
            heir(node, models["tied"], 4, slabs[name], name)


def test_a_state_of_another_form_is_refused(models: dict[str, str]) -> None:
    node = Node()
    engine = trainer(node, models["tied"], 4)
    engine.offload()
    slab = engine._deployments["d"].slab
    other = node.state(models["tied"], 4)
    with pytest.raises(PlexrlError, match="holds no state"):
        heir(node, models["tied"], 4, other)
    form = engine._deployments["d"]._form
    memory = node.map.view(slab)[-layout.HEADER_BYTES :]
    assert header.read(memory, form).whole
    with pytest.raises(PlexrlError, match="another form"):
        header.read(memory, form + 1)


@settings(max_examples=200)
@given(st.integers(0, 60), st.integers(1, 255))
def test_a_header_with_any_byte_changed_is_refused(at: int, change: int) -> None:
    memory = torch.zeros(layout.HEADER_BYTES, dtype=torch.uint8)
    header.write(memory, header.Header(7, ("grads", "moment1", "moment2", "steps"), True))
    length = int.from_bytes(memory[:4].numpy().tobytes(), "little")
    memory[at % (8 + length)] ^= change
    with pytest.raises(PlexrlError, match="holds no state"):
        header.read(memory, 7)


def test_the_longest_header_fits() -> None:
    """Every bucket of a model of many layers zero at once: weights never are in a state that has begun."""
    zero = tuple(name for name in layout.state_buckets([]) if name != "weights")
    memory = torch.zeros(layout.HEADER_BYTES, dtype=torch.uint8)
    header.write(memory, header.Header(2**32 - 1, zero, True))
    assert header.read(memory, 2**32 - 1).zero == zero
