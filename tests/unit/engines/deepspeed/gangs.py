"""Gangs of real processes for DeepSpeed: the process that runs the tests never becomes a rank itself."""

from __future__ import annotations

import json
import multiprocessing
import os
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from msgspec import structs
from safetensors.torch import load_file

from plexrl.engines import footprint
from plexrl.engines.protocol import TrainEngine, build
from plexrl.engines.torch.home import manifest
from plexrl.memory.device import CpuDevice
from plexrl.types import PlexrlError, Role, Slab
from tests.unit.engines.conftest import Node, loss, request, sft

STEPS = (
    {"learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "grad_clip_norm": 1.0},
    {"learning_rate": 5e-4, "beta1": 0.8, "beta2": 0.9, "eps": 1e-6},
    {"learning_rate": 2e-3, "grad_clip_norm": 100.0},
)
Task = Callable[["Rank"], object]


class Rank:
    """One rank's place in a gang that a test started: its pretend GPU, and the node's arena. number: of the gang."""

    def __init__(self, number: int, world: int, node: Node, base: Slab, slabs: list[Slab], folder: Path) -> None:
        self.number = number
        self.world = world
        self.node = node
        self.folder = folder
        self._base = base
        self._slabs = slabs
        self._count = 0
        self._gangs = 0

    def slab(self, size: int) -> Slab:
        """The next of the rank's own, cut to this size."""
        slab = structs.replace(self._slabs[self._count], size=size)
        self._count += 1
        self.node.map.view(slab).zero_()
        return slab

    def engine(self, model_dir: str, kind: str, **more: object) -> tuple[TrainEngine, Slab]:
        """A trainer of this rank in place of the one before, and a slab for one deployment.

        LoRA rank 4, or all parameters.
        """
        self._count = 0
        self._gangs += 1
        draft = self.node.spec(model_dir, Role.TRAIN, kind, base=self._base, **self._settings(more))
        use = footprint.use_of(draft)
        spec = structs.replace(draft, base=structs.replace(self._base, size=footprint.group(use).base_bytes))
        made = build(spec, CpuDevice(self.node.device_fd, self.node.size), self.node.map)
        trained = footprint.Trained(lora_rank=None if kind == "full" else 4, attn=True, mlp=True, unembed=True)
        return made, self.slab(footprint.state(use, trained))

    def _settings(self, more: dict[str, object]) -> dict[str, object]:
        meet = str(self.folder / f"store{self._gangs}") if self.world > 1 else ""
        return {
            "engine": "deepspeed",
            "rank": self.number,
            "world": self.world,
            "rendezvous": meet,
            "micro_batch_tokens": 24,
            "base_fill": self.number == 0,
        } | more


def gang(world: int, task: Task, folder: Path) -> list[object]:
    """What the task says on each rank, by rank."""
    folder.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    nodes = [Node(1 << 25) for _ in range(world)]
    first = nodes[0]
    for other in nodes[1:]:
        other.arena_fd, other.map = first.arena_fd, first.map
    base = first.arena.alloc("base", 1 << 20, -1)
    places = []
    for number, node in enumerate(nodes):
        own = [first.arena.alloc(f"own{number}.{n}", 1 << 21, 1) for n in range(4)]
        places.append(Rank(number, world, node, base, own, folder))
    ranks = [context.Process(target=_child, args=(place, task, queue), daemon=True) for place in places]
    for process in ranks:
        process.start()
    found = dict(queue.get(timeout=200) for _ in ranks)
    for process in ranks:
        process.join(20)
        assert process.exitcode == 0
    for answer in found.values():
        assert not (isinstance(answer, str) and answer.startswith("Traceback")), answer
    return [found[number] for number in range(world)]


def _child(place: Rank, task: Task, queue) -> None:
    torch.set_num_threads(1)
    try:
        queue.put((place.number, task(place)))
    except BaseException:
        queue.put((place.number, traceback.format_exc()))
    queue.close()
    queue.join_thread()
    os._exit(0)  # as the nursery ends a rank: torch's threads abort now and then in an ordinary exit


def optim(step: int) -> bytes:
    """The body of a step; its settings differ from step to step."""
    return json.dumps({"adam_params": STEPS[step % len(STEPS)]}).encode()


def leave(engine) -> None:
    """Off the device, somebody else there, and back."""
    engine.offload()
    engine._home.region.buffer.random_(generator=torch.Generator().manual_seed(1))
    engine.load_device()


def train(engine, name: str = "d", switching: bool = False, first: int = 0, steps: int = 3) -> list[float]:
    """Losses and norms. Each step gathers the gradients of two calls, of which the first has one sequence only."""
    found: list[float] = []
    for step in range(first, first + steps):
        for data in (sft(2 * step)[:1], sft(2 * step + 1)):
            generator = engine.forward_backward(name, request("cross_entropy", data), False)
            while True:
                try:
                    next(generator)
                except StopIteration as stop:
                    found.append(loss(stop.value.body) if stop.value.body else 0.0)
                    break
                if switching:
                    leave(engine)
            if switching:
                leave(engine)
        answer = engine.optim_step(name, optim(step)).body
        found.append(json.loads(answer)["metrics"]["grad_norm"] if answer else 0.0)
        if switching:
            leave(engine)
    return found


def make(engine, slab: Slab, kind: str, name: str = "d", seed: int = 3) -> None:
    """A deployment in the slab."""
    engine.create(name, slab, None if kind == "full" else 4, seed, True, True, True)


def not_finite() -> bytes:
    """A request whose loss overflows on one sequence, so on one rank only."""
    data = [
        {
            "tokens": item["tokens"],
            "target_tokens": item["target_tokens"],
            "advantages": np.ones(len(item["tokens"]), np.float32),
            "logprobs": np.full(len(item["tokens"]), -200.0 if len(item["tokens"]) == 5 else -6.0, np.float32),
        }
        for item in sft(0)
    ]
    return request("importance_sampling", data)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All of a saved state."""
    return {name: t for path in sorted(folder.glob("*.safetensors")) for name, t in load_file(path).items()}


def weight_specs(engine) -> list:
    """What its one deployment trains."""
    home, shape = engine._home, engine._deployments["d"].shape
    return home.base_specs if shape is None else home.adapter_specs(shape)


def snapshot(engine, memory: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors of a version."""
    return manifest({"weights": weight_specs(engine)}).views(memory)["weights"]


def refused(action: Callable[[], object]) -> str:
    """What it says when it refuses; empty when it does not."""
    try:
        action()
    except PlexrlError as error:
        return str(error)
    return ""
