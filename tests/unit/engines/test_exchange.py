"""Two groups on one GPU pass its memory to each other through the gate; what fails on the way is taken back."""

from __future__ import annotations

import gc
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

from plexrl.engines.parking import Meter
from plexrl.engines.torch.crossing import insist
from plexrl.memory.arena import ArenaMap
from plexrl.memory.gate import Held, Seat, Withdrawn
from plexrl.memory.resident import DIRTY
from plexrl.memory.transfer import Memcpy
from plexrl.types import BadInput, Moved, PlexrlError, Role
from tests.unit.engines.conftest import Node, loss, request, run, sft
from tests.unit.engines.test_sample import PARK, ask, drain
from tests.unit.engines.test_train_full import ADAM

OPTIM = json.dumps({"adam_params": ADAM}).encode()
KINDS = pytest.mark.parametrize("rank", [None, 4], ids=["full", "lora"])


def trainer(node: Node, model_dir: str, rank: int | None):
    engine = node.join(model_dir, Role.TRAIN, "full" if rank is None else "lora", micro_batch_tokens=24)
    engine.create("d", node.state(model_dir, rank), rank, 3, True, True, True)
    return engine


def state(engine) -> dict[str, torch.Tensor]:
    bound, _ = engine._use(engine._deployments["d"])
    return {f"{b}.{k}": t.clone() for b, views in bound.views.items() for k, t in views.items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def step(engine, seed: int) -> tuple[float, bytes]:
    result, _ = run(engine.forward_backward("d", request("cross_entropy", sft(seed)), False))
    return loss(result.body), engine.optim_step("d", OPTIM).body


class Watch(threading.Thread):
    """Looks at the gate all the time: no byte of the device ever has two owners."""

    def __init__(self, node: Node) -> None:
        super().__init__(daemon=True)
        self.node = node
        self.over = threading.Event()
        self.doubles: list[object] = []
        self.together = 0

    def run(self) -> None:
        while not self.over.is_set():
            holding = [h for h in self.node.gate.holders() if h.low < h.high]
            self.together += len(holding) > 1
            for a in holding:
                self.doubles += [(a, b) for b in holding if a.seat < b.seat and a.low < b.high and b.low < a.high]

    def __enter__(self) -> Watch:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.over.set()
        self.join(10)


def cross(leaving, coming) -> None:
    """Both at once; the gate alone puts them in order."""
    failures: list[BaseException] = []

    def leave() -> None:
        try:
            leaving.offload()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=leave)
    thread.start()
    coming.load_device()
    thread.join(30)
    assert not failures and not thread.is_alive()


@KINDS
def test_two_trainers_exchange_and_train_as_if_alone(models: dict[str, str], rank: int | None) -> None:
    """Bit for bit, with gradients live across the exchange, and in the middle of a call."""
    want = []
    for seed in (0, 50):
        alone = trainer(Node(), models["tied"], rank)
        want.append(([step(alone, seed + i) for i in range(3)], state(alone)))
    node = Node()
    first = trainer(node, models["tied"], rank)
    first.offload()
    second = trainer(node, models["tied"], rank)
    engines = [second, first]  # who is on the device, who is next
    got: dict[int, list] = {id(first): [], id(second): []}
    seeds = {id(first): 0, id(second): 50}
    with Watch(node) as watch:
        for turn in range(3):
            for _ in range(2):
                here, there = engines
                generator = here.forward_backward("d", request("cross_entropy", sft(seeds[id(here)] + turn)), False)
                next(generator)
                cross(here, there)
                there.forward_backward("d", request("cross_entropy", sft(7)), True).close()
                cross(there, here)
                result, _ = run(generator)
                cross(here, there)
                cross(there, here)
                got[id(here)].append((loss(result.body), here.optim_step("d", OPTIM).body))
                cross(here, there)
                engines.reverse()
    assert not watch.doubles
    for engine, (steps, end) in zip((first, second), want, strict=True):
        assert got[id(engine)] == steps
        if engine is not engines[0]:
            cross(engines[0], engine)
            engines.reverse()
        assert same(state(engine), end)


def test_a_sampler_and_a_trainer_exchange_while_sequences_live(models: dict[str, str], monkeypatch) -> None:
    monkeypatch.setattr(Meter, "costs", PARK)
    bodies = {str(i): ask([5 + i, 6, 7], 2, max_tokens=10 + i, seed=i) for i in range(4)}
    alone = Node().join(models["tied"], Role.SAMPLE, "lora")
    for name, body in bodies.items():
        alone.add(name, None, body)
    want = drain(alone)
    node = Node()
    engine = node.join(models["tied"], Role.SAMPLE, "lora")
    engine.offload()
    other = trainer(node, models["tied"], 4)
    other.offload()
    engine.load_device()
    for name, body in bodies.items():
        engine.add(name, None, body)
    found = {}
    with Watch(node) as watch:
        while engine.live():
            found |= {call: result.body for call, result in engine.step()}
            cross(engine, other)
            step(other, 1)
            cross(other, engine)
    assert not watch.doubles
    assert {name: response.SerializeToString() for name, response in want.items()} == found


def test_what_comes_first_is_the_first_layer_and_a_look_ahead_needs_weights_only(models: dict[str, str]) -> None:
    engine = trainer(Node(), models["tied"], None)
    step(engine, 0)
    engine.offload()
    moved = engine.load_device()
    held = engine._deployments["d"].state
    weights = [bucket.name for bucket in held.manifest.buckets if bucket.name.startswith("weights")]
    assert len(weights) == 4  # embeddings, two layers, the norm behind them
    assert [held.present(name) for name in weights] == [True, True, False, False]
    ahead, _ = run(engine.forward_backward("d", request("cross_entropy", sft(1)), True))
    assert all(held.present(name) for name in weights)
    assert not any(held.present(name) for name in ("grads", "moment1", "moment2", "steps", "rng"))
    sizes = {bucket.name: bucket.size for bucket in held.manifest.buckets}
    assert moved.bytes_in + ahead.moved_bytes == sum(sizes[name] for name in weights)
    gone = engine.offload()
    assert gone.bytes_out == 0
    engine.load_device()
    result, _ = run(engine.forward_backward("d", request("cross_entropy", sft(1)), False))
    assert held.present("grads") and not held.present("moment1")
    # Gradients alone go out, and alone are lost if they did not.
    assert engine.offload().bytes_out == sizes["grads"]


def test_promises_are_measured(models: dict[str, str]) -> None:
    engine = trainer(Node(), models["tied"], 4)
    engine._home.device.reserve(engine._home.region.extent).mapped = True  # what a runtime might keep
    assert engine.offload().residual_bytes == engine._home.region.extent.size


class Breaks:
    """Within it, the n-th copy, wait or release of the process fails; what the seat does not hold is then another's."""

    def __init__(self, monkeypatch, number: int, engine) -> None:
        self.left = number
        self.engine = engine
        self.patch = monkeypatch
        self.broke = False

    def __enter__(self) -> Breaks:
        self.context = self.patch.context()
        patch = self.context.__enter__()
        for owner, name in ((Memcpy, "copy"), (Seat, "wait"), (Seat, "release")):
            patch.setattr(owner, name, self._breaking(getattr(owner, name)))
        return self

    def __exit__(self, *error: object) -> None:
        self.context.__exit__(*error)
        if self.broke:
            seat = self.engine._home.seat
            low = high = seat.extent.offset
            for holding in seat._gate.holders():
                low, high = holding.low, holding.high
            everything = self.engine._home.device._bytes
            noise = torch.Generator().manual_seed(2)
            for part in (everything[:low], everything[high : seat.extent.offset + seat.extent.size]):
                part.random_(generator=noise)

    def _breaking(self, real: Callable) -> Callable:
        def call(*args: object, **more: object) -> object:
            self.left -= 1
            if self.left == -1:
                self.broke = True
                raise RuntimeError("the copy failed")
            return real(*args, **more)

        return call


def broken_at_every_point(monkeypatch, engine, check: Callable[[], None]) -> int:
    """Leave and come with a failure at every point, one after the other; how many there were."""
    points = 0
    for verb in ("offload", "load_device"):
        for number in range(1000):
            with Breaks(monkeypatch, number, engine) as breaks:
                try:
                    getattr(engine, verb)()
                except RuntimeError:
                    pass
                else:
                    assert not breaks.broke
            if not breaks.broke:
                break
            points += 1
            engine.undo()
            if verb == "offload":
                check()
            else:
                assert engine._home.seat.state == "free"
    check()
    return points


@KINDS
def test_a_switch_that_fails_anywhere_is_undone_bit_for_bit(models: dict[str, str], rank, monkeypatch) -> None:
    engine = trainer(Node(), models["tied"], rank)
    twin = trainer(Node(), models["tied"], rank)
    for one in (engine, twin):
        step(one, 0)
        run(one.forward_backward("d", request("cross_entropy", sft(1)), False))
    kept = state(twin)

    def check() -> None:
        assert same(state(engine), kept)
        for name in ("weights", "grads", "moment1"):  # so that there is something to move again
            engine._deployments["d"].mark(name, DIRTY)

    assert broken_at_every_point(monkeypatch, engine, check) > 10
    assert step(engine, 2) == step(twin, 2)
    assert same(state(engine), state(twin))


def test_a_samplers_switch_that_fails_anywhere_is_undone(models: dict[str, str], monkeypatch) -> None:
    monkeypatch.setattr(Meter, "costs", PARK)
    bodies = {str(i): ask([5 + i, 6, 7], 2, max_tokens=40, seed=i) for i in range(3)}
    engine, twin = (Node().join(models["tied"], Role.SAMPLE, "lora") for _ in range(2))
    for one in (engine, twin):
        for name, body in bodies.items():
            one.add(name, None, body)
        one.step()
    checks = 0

    def check() -> None:
        nonlocal checks
        checks += 1
        engine.step()
        twin.step()

    assert broken_at_every_point(monkeypatch, engine, check) > 10
    assert checks < 40
    assert drain(engine) == drain(twin)


@KINDS
def test_a_switch_that_went_through_here_is_undone_when_it_failed_elsewhere(models: dict[str, str], rank) -> None:
    engine = trainer(Node(), models["tied"], rank)
    step(engine, 0)
    kept = state(engine)
    engine.offload()
    engine.undo()
    assert same(state(engine), kept)
    engine.offload()
    engine.load_device()
    engine.undo()
    engine._home.region.buffer.random_(generator=torch.Generator().manual_seed(1))
    assert engine._home.seat.state == "free"
    engine.load_device()
    assert same(state(engine), kept)


def test_bytes_that_do_not_come_fail_the_call_and_change_nothing(models: dict[str, str]) -> None:
    """Somebody sits on the device's last bytes, where the moments and the random state go."""
    node = Node()
    engine = trainer(node, models["tied"], None)
    twin = trainer(Node(), models["tied"], None)
    for one in (engine, twin):
        step(one, 0)
        run(one.forward_backward("d", request("cross_entropy", sft(1)), False))
    engine.offload()
    extent = engine._home.seat.extent
    squatter = node.gate.seat(60, "squatter", type(extent)(extent.offset + extent.size // 2, extent.size))
    squatter.come()
    squatter.held()
    engine._home.seat.patience = 0.05
    engine.load_device()
    with pytest.raises(Held, match="squatter"):
        engine.optim_step("d", OPTIM)
    squatter.gone()
    assert engine.optim_step("d", OPTIM).body == twin.optim_step("d", OPTIM).body
    assert same(state(engine), state(twin))


def test_a_call_that_lacks_its_weights_leaves_gradients_as_they_were(models: dict[str, str]) -> None:
    node = Node()
    engine = trainer(node, models["tied"], None)
    run(engine.forward_backward("d", request("cross_entropy", sft(1)), False))
    kept = state(engine)
    engine.offload()
    extent = engine._home.seat.extent
    held = engine._deployments["d"].state.manifest
    last = next(bucket for bucket in held.buckets if bucket.name == "weights.0003")
    squatter = node.gate.seat(60, "squatter", type(extent)(last.offset, last.size))
    squatter.come()
    squatter.held()
    engine._home.seat.patience = 0.05
    engine.load_device()
    with pytest.raises(PlexrlError, match="squatter"):
        run(engine.forward_backward("d", request("cross_entropy", sft(2)), False))
    squatter.gone()
    assert same(state(engine), kept)


def test_who_came_waits_until_the_other_side_that_failed_has_ended(models: dict[str, str]) -> None:
    node = Node()
    engine = trainer(node, models["tied"], None)
    step(engine, 0)
    engine.offload()
    extent = engine._home.seat.extent
    broken = node.gate.seat(60, "broken", type(extent)(extent.offset + extent.size // 2, extent.size))
    broken.come()
    broken.held()
    broken.leave()
    broken.fail()
    engine.load_device()
    agent = threading.Timer(0.3, node.gate.clear, (60,))
    agent.start()
    engine.optim_step("d", OPTIM)
    agent.join()


def test_insisting_has_an_end() -> None:
    def pull() -> Moved:
        raise Withdrawn("it failed")

    begin = time.monotonic()
    with pytest.raises(Withdrawn):
        insist(pull, 0.2)
    assert time.monotonic() - begin >= 0.2


@KINDS
def test_a_spilled_deployment_is_refused_until_it_has_a_home_again(models: dict[str, str], rank: int | None) -> None:
    node = Node()
    engine = trainer(node, models["tied"], rank)
    step(engine, 0)
    kept = state(engine)
    with pytest.raises(BadInput, match="cannot be spilled"):
        engine.spill("d")
    engine.offload()
    old = engine._deployments["d"].slab
    outside = ArenaMap(node.arena_fd, node.size)
    copy = outside.view(old).clone()
    engine.spill("d")
    assert old not in node.map.mapped()
    outside.view(old).random_()
    with pytest.raises(BadInput, match="'d' is spilled"):
        engine.spill("d")
    if rank is None:
        with pytest.raises(BadInput, match="'d' is spilled"):
            engine.load_device()
        engine.undo()
        assert engine._home.seat.state == "free"
    else:
        engine.load_device()
        with pytest.raises(BadInput, match="'d' is spilled"):
            engine.optim_step("d", OPTIM)
        engine.create("e", node.state(models["tied"], rank), rank, 4, True, True, True)
        run(engine.forward_backward("e", request("cross_entropy", sft(1)), False))
        engine.offload()
    new = node.state(models["tied"], rank)
    outside.view(new).copy_(copy)
    engine.rehome("d", new)
    engine.load_device()
    assert same(state(engine), kept)
    engine.offload()
    engine.spill("d")
    engine.drop("d")
    assert "d" not in engine._deployments


@KINDS
def test_slabs_that_are_let_go_are_no_longer_mapped(models: dict[str, str], rank: int | None) -> None:
    """Of deployments that were dropped, of versions that were packed or are no longer drawn from."""
    node = Node(1 << 28)
    engine = trainer(node, models["tied"], rank)
    version = node.snapshot(models["tied"], rank)
    mapped = set(node.map.mapped())
    engine.publish("d", version, None)
    assert set(node.map.mapped()) == mapped
    engine.offload()
    sampler = node.join(models["tied"], Role.SAMPLE, "full" if rank is None else "lora")
    sampler.attach("v", version, rank, True, True, True)
    sampler.add("c", "v", ask([4, 5], max_tokens=2))
    drain(sampler)
    assert version in node.map.mapped()
    sampler.detach("v")
    assert version not in node.map.mapped()
    sampler.add("c", None, ask([4, 5], max_tokens=2))
    drain(sampler)
    engine.drop("d")
    assert engine._deployments == {}
    assert not any(slab.name.startswith("state") for slab in node.map.mapped())


def test_the_shared_base_cannot_be_written_to_by_who_filled_it(models: dict[str, str]) -> None:
    node = Node()
    engine = trainer(node, models["tied"], 4)
    base = engine._home.spec.base
    lines = Path("/proc/self/maps").read_text().splitlines()
    start = engine._home.base().data_ptr()
    assert [line.split()[1] for line in lines if line.startswith(f"{start:x}-")] == ["r--s"]
    assert (base, False) not in node.map._views


def test_a_thousand_switches_leave_nothing_behind(models: dict[str, str]) -> None:
    """Between a trainer, and a sampler with live sequences: descriptors, mappings, memory stay as they are."""
    node = Node()
    sampler = node.join(models["tied"], Role.SAMPLE, "lora")
    sampler.add("c", None, ask([4, 5, 6], 2, max_tokens=100))
    sampler.step()
    sampler.offload()
    engine = trainer(node, models["tied"], 4)
    process = psutil.Process()

    def switches(count: int) -> tuple[int, int, int]:
        for number in range(count):
            if number % 50 == 0:
                step(engine, number % 3)
            engine.offload()
            sampler.load_device()
            sampler.offload()
            engine.load_device()
        gc.collect()
        return process.num_fds(), len(Path("/proc/self/maps").read_text().splitlines()), process.memory_info().rss

    fds, mappings, memory = switches(100)
    more_fds, more_mappings, more_memory = switches(500)
    assert more_fds <= fds and more_mappings <= mappings + 5
    assert more_memory - memory < 8 << 20
    cross(engine, sampler)
    assert drain(sampler).keys() == {"c"}
