"""Where a rank works: its GPU or pretend GPU, its seat at that one's gate, the node's arena as it maps it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

from plexrl.pool import gpus
from plexrl.types import Extent

if TYPE_CHECKING:
    from plexrl.engines.protocol import EngineSpec
    from plexrl.memory.arena import ArenaMap
    from plexrl.memory.device import Device
    from plexrl.memory.gate import Seat
    from plexrl.pool.enginehost import Settings


class RankPlace(NamedTuple):
    """What `engines.protocol.build` wants beside the spec."""

    device: Device
    arena: ArenaMap
    seat: Seat


def take(settings: Settings, spec: EngineSpec) -> RankPlace:
    """Open all three, in the process that will use them: nothing of CUDA outlives a fork.

    Raises Unavailable without the GPU, DoesNotFit when it is smaller than device.bytes.
    """
    from plexrl.memory.arena import ArenaMap
    from plexrl.memory.device import CpuDevice
    from plexrl.memory.gate import Gate

    extent = Extent(spec.extent_offset, spec.extent_size)
    seat = Gate(settings.gate_fd).seat(settings.gate_seat, settings.gang, extent)
    if not settings.gpu:
        device = CpuDevice(settings.device_fd, spec.device_bytes, settings.paranoid)
        return RankPlace(device, ArenaMap(settings.arena_fd, settings.arena_bytes), seat)
    os.environ.update(gpus.environment(settings.gpu))

    from plexrl.memory import cuda, cuda_seat

    device = cuda.cuda_device(0, spec.device_bytes)
    pins = device.pins
    arena = ArenaMap(settings.arena_fd, settings.arena_bytes, pins.register, pins.unregister)
    return RankPlace(device, arena, cuda_seat.BackedSeat(seat, device))


def kept(place: RankPlace, spec: EngineSpec) -> int:
    """Device bytes that the process holds beside its extent, once it is built and on its device. 0 on a cpu device."""
    return max(place.device.residual_bytes() - spec.extent_size, 0)
