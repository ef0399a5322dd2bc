"""ZeRO 1, 2 and 3 on one and two ranks against the torch engine: what they compute, keep, save and survive."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest
import torch

from plexrl.types import Role
from tests.unit.engines.conftest import Node, loss, request, run, sft
from tests.unit.engines.deepspeed import gangs
from tests.unit.engines.deepspeed.gangs import Rank, gang, leave, make, tensors, train

STAGES = (1, 2, 3)
KINDS = ("full", "lora")
CASES = [(kind, "float32", stage) for kind in KINDS for stage in STAGES]
CASES += [("full", "bfloat16", stage) for stage in STAGES]


def key(kind: str, dtype: str, stage: int) -> str:
    return f"{kind}-{dtype}-{stage}"


def outside(engine, kind: str) -> list[str]:
    """Training tensors that do not lie in the region, or off a 16-byte boundary."""
    buffer = engine._home.region.buffer
    low, high = buffer.data_ptr(), buffer.data_ptr() + buffer.numel()
    bound = next(iter(engine._residence._bounds.values()))
    zero = bound._engine.optimizer
    found = {"moments": list(zero.optimizer.state.values())[0]["exp_avg"], "flat": bound.flat}
    stepped = next(iter(zero.optimizer.state))
    found["stepped"] = stepped
    if bound.cuts.stage < 3:
        found["bit16"] = zero.bit16_groups_flat[0]
        found |= {f"parameter {n}": p.data for n, p in enumerate(zero.bit16_groups[0])}
    else:
        found |= {f"part {n}": p.ds_tensor.data for n, p in enumerate(zero.fp16_groups[0]) if p.ds_tensor.numel()}
        assert all(p.numel() == 0 for p in zero.fp16_groups[0]), "parameters stay gathered"
    if bound.cuts.stage == 1:
        grads = [p.grad_accum if zero.use_grad_accum_attribute else p.grad for p in zero.bit16_groups[0]]
        found |= {f"gradient {n}": g for n, g in enumerate(grads) if g is not None}
        assert len(grads) > 10
    elif bound.cuts.stage == 2:
        found["gradients"] = zero.averaged_gradients[0].flat_partition
    else:
        found["gradients"] = zero.grad_partitions_flat_buffer
    return [name for name, t in found.items() if not low <= t.data_ptr() < high]


def everything(place: Rank, model: str) -> dict[str, object]:
    """All cases on one gang, one after the other."""
    found: dict[str, object] = {}
    for kind, dtype, stage in CASES:
        name = key(kind, dtype, stage)
        engine, slab = place.engine(model, kind, dtype=dtype, zero_stage=stage)
        make(engine, slab, kind)
        losses = train(engine)
        engine.save("d", place.folder / name, optimizer=True)
        found[name] = losses
        found[f"{name} outside"] = outside(engine, kind)
        if dtype == "float32":
            run(engine.forward_backward("d", request("cross_entropy", sft(9)), False))
            bound, _ = engine._use(engine._deployments["d"])
            grads = bound.grads.clone()
            said = gangs.refused(lambda e=engine: run(e.forward_backward("d", gangs.not_finite(), False)))
            bound, _ = engine._use(engine._deployments["d"])
            found[f"{name} bad"] = said, bool(torch.equal(grads, bound.grads)), bool(grads.any())
        engine.drop("d")
        # The same slab again, with switches everywhere.
        place.node.map.view(slab).zero_()
        make(engine, slab, kind)
        found[f"{name} switching"] = train(engine, switching=True)
        engine.save("d", place.folder / f"{name}-switching", optimizer=True)
        engine.close()
    return found


@pytest.fixture(scope="module")
def results(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Path, list]]:
    """World -> the folder of its saved states, and what its ranks said."""
    from plexrl.engines.deepspeed import start

    start.load("cpu")  # once, for all that are forked from here
    found = {}
    for world in (1, 2):
        folder = tmp_path_factory.mktemp(f"world{world}")
        found[world] = folder, gang(world, lambda place: everything(place, models["tied"]), folder)
    return found


@pytest.fixture(scope="module")
def reference(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], tuple]:
    """(kind, dtype) -> what the torch engine says, and the folder of its saved state."""
    found = {}
    for kind, dtype in {(kind, dtype) for kind, dtype, _ in CASES}:
        folder = tmp_path_factory.mktemp("torch") / "saved"
        engine = torch_trainer(models["tied"], kind, dtype)
        losses = train(engine)
        engine.save("d", folder, optimizer=True)
        found[kind, dtype] = losses, folder
    return found


def torch_trainer(model: str, kind: str, dtype: str):
    node = Node()
    spec = node.spec(model, Role.TRAIN, kind, dtype=dtype, micro_batch_tokens=24)
    engine = node.build(model, Role.TRAIN, kind, dtype=dtype, micro_batch_tokens=24)
    make(engine, node.state_of(spec, None if kind == "full" else 4), kind)
    return engine


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(("kind", "dtype", "stage"), CASES)
def test_it_trains_as_the_torch_engine_does(results, reference, world: int, kind: str, dtype: str, stage: int) -> None:
    """float32 tightly; in bfloat16 DeepSpeed keeps float32 weights, gradients and moments beside, torch does not."""
    folder, said = results[world]
    want, saved = reference[kind, dtype]
    got = said[0][key(kind, dtype, stage)]
    assert got == pytest.approx(want, rel=1e-4 if dtype == "float32" else 1e-2)
    mine, theirs = tensors(folder / key(kind, dtype, stage)), tensors(saved)
    assert {n for n in mine if not n.startswith("master.")} == set(theirs)
    for name, tensor in theirs.items():
        if name == "rng" or (dtype == "bfloat16" and name.startswith("moment")):
            continue
        bound = {"atol": 1e-4, "rtol": 1e-3} if dtype == "float32" else {"atol": 1e-2, "rtol": 1e-2}
        torch.testing.assert_close(mine[name].float(), tensor.float(), **bound)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(("kind", "dtype", "stage"), CASES)
def test_the_same_bits_with_and_without_switches(results, world: int, kind: str, dtype: str, stage: int) -> None:
    """Between calls, between micro-batches, with gradients live; whoever is there meanwhile overwrites the device."""
    folder, said = results[world]
    name = key(kind, dtype, stage)
    for rank in said:
        assert rank[f"{name} switching"] == rank[name]
    mine, again = tensors(folder / name), tensors(folder / f"{name}-switching")
    assert mine.keys() == again.keys() and all(torch.equal(mine[n], again[n]) for n in mine)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(("kind", "dtype", "stage"), CASES)
def test_no_training_tensor_lies_outside(results, world: int, kind: str, dtype: str, stage: int) -> None:
    for rank in results[world][1]:
        assert rank[f"{key(kind, dtype, stage)} outside"] == []


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(("kind", "stage"), [(kind, stage) for kind in KINDS for stage in STAGES])
def test_a_loss_that_is_no_number_leaves_gradients_as_they_were(results, world: int, kind: str, stage: int) -> None:
    for rank in results[world][1]:
        said, same, some = rank[f"{key(kind, 'float32', stage)} bad"]
        assert "not finite" in said and same and some


def go_on(place: Rank, model: str, folders: dict[str, Path]) -> dict[str, object]:
    """Load a state that others saved, and train on: in every stage."""
    found: dict[str, object] = {}
    for name, folder in folders.items():
        kind, dtype, stage = name.split("-")
        engine, slab = place.engine(model, kind, dtype=dtype, zero_stage=int(stage))
        make(engine, slab, kind, seed=99)
        if int(stage) == 2:
            # A deployment is made from a saved state whoever has the device just then.
            engine.offload()
            engine.load("d", folder, optimizer=True)
            engine.load_device()
        else:
            engine.load("d", folder, optimizer=True)
        found[name] = train(engine, first=3, steps=2)
        engine.save("d", place.folder / name, optimizer=True)
        engine.close()
    return found


@pytest.mark.parametrize(("saver", "loader"), [(2, 1), (1, 2)])
def test_a_saved_state_goes_on_at_another_world_and_stage_and_in_torch(
    results, reference, models: dict[str, str], tmp_path: Path, saver: int, loader: int
) -> None:
    saved = {key(k, d, s % 3 + 1): results[saver][0] / key(k, d, s) for k, d, s in CASES if d == "float32"}
    saved[key("full", "bfloat16", 1)] = results[saver][0] / key("full", "bfloat16", 3)
    said = gang(loader, lambda place: go_on(place, models["tied"], saved), tmp_path)
    for name, folder in saved.items():
        kind, dtype, _ = name.split("-")
        engine = torch_trainer(models["tied"], kind, dtype)
        engine.load("d", folder, optimizer=True)
        want = train(engine, first=3, steps=2)
        assert said[0][name] == pytest.approx(want, rel=1e-4 if dtype == "float32" else 2e-2)


def test_what_torch_saved_goes_on_in_every_stage(reference, models: dict[str, str], tmp_path: Path, results) -> None:
    saved = {key(k, d, s): reference[k, d][1] for k, d, s in CASES}
    said = gang(2, lambda place: go_on(place, models["tied"], saved), tmp_path)
    for name, folder in saved.items():
        kind, dtype, _ = name.split("-")
        engine = torch_trainer(models["tied"], kind, dtype)
        engine.load("d", folder, optimizer=True)
        want = train(engine, first=3, steps=2)
        assert said[0][name] == pytest.approx(want, rel=1e-4 if dtype == "float32" else 2e-2)


def adapters(place: Rank, model: str) -> dict[int, bool]:
    """Two adapters with one slot, their calls interleaved, against each alone."""
    found = {}
    for stage in STAGES:
        alone: dict[str, list[float]] = {}
        for name, seed in (("a", 1), ("b", 2)):
            engine, slab = place.engine(model, "lora", zero_stage=stage, lora_slots=1)
            make(engine, slab, "lora", name, seed)
            alone[name] = train(engine, name)
            engine.save(name, place.folder / f"alone-{name}-{stage}", optimizer=True)
        engine, slab = place.engine(model, "lora", zero_stage=stage, lora_slots=1)
        make(engine, slab, "lora", "a", 1)
        make(engine, place.slab(slab.size), "lora", "b", 2)
        losses: dict[str, list[float]] = {"a": [], "b": []}
        for step in range(3):
            # b's gradients stay where they are while a steps in the same slot.
            for data, stepping in ((sft(2 * step)[:1], False), (sft(2 * step + 1), True)):
                for name in "ab":
                    body = run(engine.forward_backward(name, request("cross_entropy", data), False))[0].body
                    losses[name].append(loss(body) if body else 0.0)
                    if stepping:
                        engine.optim_step(name, gangs.optim(step))
        same = all([value for n, value in enumerate(alone[name]) if n % 3 < 2] == losses[name] for name in "ab")
        for name in "ab":
            engine.save(name, place.folder / f"both-{name}-{stage}", optimizer=True)
        found[stage] = same
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_adapters_of_one_base_do_not_touch_each_other(results, models, tmp_path: Path, world: int) -> None:
    for rank in gang(world, lambda place: adapters(place, models["tied"]), tmp_path):
        assert rank == dict.fromkeys(STAGES, True)
    for stage in STAGES:
        for name in "ab":
            alone, both = (tensors(tmp_path / f"{which}-{name}-{stage}") for which in ("alone", "both"))
            assert all(torch.equal(alone[n], both[n]) for n in alone)


def published(place: Rank, model: str) -> dict[str, bool]:
    """Versions in the form that samplers take, whole whoever has what of the weights."""
    found = {}
    for kind in KINDS:
        for stage in STAGES:
            engine, slab = place.engine(model, kind, zero_stage=stage)
            make(engine, slab, kind)
            train(engine, steps=1)
            version = place.slab(snapshot_bytes(engine)) if place.number == 0 else None
            engine.publish("d", version, place.folder / f"{kind}-{stage}")
            if version is not None:
                held = gangs.snapshot(engine, place.node.map.view(version))
                saved = tensors(place.folder / f"{kind}-{stage}")
                found[f"{kind}-{stage}"] = held.keys() == saved.keys() and all(
                    torch.equal(held[n], saved[n]) for n in held
                )
    return found


def snapshot_bytes(engine) -> int:
    from plexrl.engines import layout

    return layout.packed(gangs.weight_specs(engine))


def test_a_version_is_whole(results, models: dict[str, str], tmp_path: Path) -> None:
    said = gang(2, lambda place: published(place, models["untied"]), tmp_path)
    assert said[0] == {f"{kind}-{stage}": True for kind in KINDS for stage in STAGES}


def many(place: Rank, model: str) -> dict[int, tuple[int, int]]:
    """Bytes and descriptors that 100 switches add, with a call after every fourth."""
    found = {}
    me = psutil.Process(os.getpid())
    for stage in STAGES:
        engine, slab = place.engine(model, "full", zero_stage=stage)
        make(engine, slab, "full")
        before = (0, 0)
        for count in range(120):
            leave(engine)
            if count % 4 == 3:
                run(engine.forward_backward("d", request("cross_entropy", sft(1)[:2]), False))
                engine.optim_step("d", gangs.optim(0))
            if count == 19:
                before = (me.memory_info().rss, me.num_fds())
        found[stage] = (me.memory_info().rss - before[0], me.num_fds() - before[1])
        engine.close()
    return found


def test_a_hundred_switches_leave_nothing_behind(results, models: dict[str, str], tmp_path: Path) -> None:
    for grown, descriptors in gang(1, lambda place: many(place, models["tied"]), tmp_path)[0].values():
        assert grown < 4 << 20
        assert descriptors == 0
