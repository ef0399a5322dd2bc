"""The embedded engine: transformers causal models, trained and sampled in the worker group's own processes."""

from __future__ import annotations

from plexrl.engines.protocol import EngineSpec, SampleEngine, TrainEngine
from plexrl.memory.arena import ArenaMap
from plexrl.memory.device import Device
from plexrl.memory.gate import Seat
from plexrl.types import Role


def build(spec: EngineSpec, device: Device, arena: ArenaMap, seat: Seat | None = None) -> TrainEngine | SampleEngine:
    """The engine of one rank, on its device. Raises BadInput for a model that it cannot run."""
    if spec.role == Role.TRAIN:
        from plexrl.engines.torch.train import Trainer

        return Trainer(spec, device, arena, seat)
    from plexrl.engines.torch.sample import Sampler

    return Sampler(spec, device, arena, seat)
