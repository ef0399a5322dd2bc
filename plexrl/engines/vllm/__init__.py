"""The vLLM engine: samples by vLLM's own scheduler and model code, in memory that we give it.

Imported by the head for its sizes: torch and vllm are imported when an engine is built, in the rank's process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from plexrl.types import BadInput, Role

if TYPE_CHECKING:
    from plexrl.engines.protocol import EngineSpec, SampleEngine
    from plexrl.memory.arena import ArenaMap
    from plexrl.memory.device import Device
    from plexrl.memory.gate import Seat


def build(spec: EngineSpec, device: Device, arena: ArenaMap, seat: Seat | None = None) -> SampleEngine:
    """One replica, on its device. Raises BadInput for what is missing, has another version, or cannot be served."""
    from plexrl.config.engines import mend_of, missing

    kind = "cuda" if getattr(device, "pins", None) is not None else "cpu"
    if lacking := missing("vllm", kind):
        raise BadInput(lacking, mend_of("vllm", kind))
    if spec.role != Role.SAMPLE:
        raise BadInput("engine vllm samples only", "Write train.engine: torch or deepspeed")
    from plexrl.engines.vllm.sample import Sampler

    return Sampler(spec, device, arena, seat)
