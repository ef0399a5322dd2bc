"""A rank's place on a real GPU, over virtual memory of the host; what an engine does there stays in step with it."""

import os

import pytest
import torch

from plexrl.engines.protocol import build
from plexrl.memory import cuda, cuda_tensor
from plexrl.memory.cuda import CudaDevice
from plexrl.memory.cuda_seat import BackedSeat
from plexrl.memory.device import CpuDevice
from plexrl.pool import rankplace
from plexrl.pool.enginehost import Settings
from plexrl.types import Role
from tests.unit.engines import test_exchange as exchange
from tests.unit.engines.conftest import Node, _one_core, models
from tests.unit.memory.hostvmm import GRAIN, Card, HostVmm, LateMover

__all__ = ["_one_core", "models"]  # the fixtures


def settings(node: Node, gpu: str) -> Settings:
    return Settings(
        gang="g/0", build="b", node="n", first_on_node=True, engine={}, ready=None, wait_for_base=False, gpu=gpu,
        device_fd=-1 if gpu else node.device_fd, arena_fd=node.arena_fd, arena_bytes=node.size, gate_fd=node.gate_fd,
        gate_seat=0, lifeline_fd=-1, control="", keys="", paranoid=False,
    )  # fmt: skip


@pytest.fixture
def card(monkeypatch) -> Card:
    """In the place of the GPU that `cuda_device` would open."""
    card = Card(1 << 26)

    def opened(index: int, size: int) -> CudaDevice:
        assert index == 0 and os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-7"
        return CudaDevice(size, HostVmm(card), LateMover(), kind=cuda_tensor.CPU, context=12345, chunk=2 * GRAIN)

    monkeypatch.setattr(cuda, "cuda_device", opened)
    for name in rankplace.gpus.environment("GPU-7"):
        monkeypatch.setenv(name, "as before")
    return card


def test_a_trainer_on_a_real_gpu_s_place(models, card):
    want = exchange.trainer(Node(), models["tied"], None)
    losses = [exchange.step(want, i) for i in range(3)]
    node = Node()
    spec = node.spec(models["tied"], Role.TRAIN, "full", micro_batch_tokens=24)
    place = rankplace.take(settings(node, "GPU-7"), spec)
    assert isinstance(place.device, CudaDevice) and isinstance(place.seat, BackedSeat)
    engine = build(spec, *place)
    # What the process costs beside its extent: its context, and the chunk's grain that the extent is rounded up to.
    assert 12345 <= rankplace.kept(place, spec) < 12345 + GRAIN
    engine.create("d", node.state(models["tied"], None), None, 3, True, True, True)
    assert place.device.pins.bytes > 0 and place.arena.registrations.count > 0
    for i in range(3):
        assert exchange.step(engine, i) == losses[i]
        left = engine.offload()
        assert card.used == 0 and left.residual_bytes == 12345
        engine.load_device()


def test_a_pretend_gpu_keeps_nothing(models):
    node = Node()
    spec = node.spec(models["tied"], Role.TRAIN, "full")
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    place = rankplace.take(settings(node, ""), spec)
    engine = build(spec, *place)
    assert isinstance(place.device, CpuDevice) and rankplace.kept(place, spec) == 0
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == before
    assert engine.offload().residual_bytes == 0
    assert torch.equal(place.arena.view(spec.base), node.map.view(spec.base))
