"""DeepSpeed's ZeRO stages 1, 2 and 3 as a train engine. Importing this imports neither torch nor DeepSpeed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plexrl.engines.protocol import EngineSpec, TrainEngine
from plexrl.types import BadInput

if TYPE_CHECKING:
    from plexrl.memory.arena import ArenaMap
    from plexrl.memory.device import Device
    from plexrl.memory.gate import Seat


def build(spec: EngineSpec, device: Device, arena: ArenaMap, seat: Seat | None = None) -> TrainEngine:
    """The engine of one rank, on its device; a collective of the gang.

    Raises BadInput for a model or stage that it does not serve, and when DeepSpeed is missing or another version.
    """
    if spec.zero_stage not in (1, 2, 3):
        raise BadInput(f"zero_stage {spec.zero_stage} is not served", "Use 1, 2 or 3, or the torch engine")
    from plexrl.engines.deepspeed.form import ZeroForm
    from plexrl.engines.torch.train import Trainer

    return Trainer(spec, device, arena, seat, ZeroForm)
