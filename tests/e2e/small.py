"""Pools on which jobs get into each other's way as often as can be."""

from pathlib import Path

from plexrl.engines import sizing
from plexrl.types import Role

LORA_RANK = 8
# Turns as short as they get: a switch whenever another job waits, with gradients live, and in the middle of calls.
RESTLESS = {
    "anticipation": "1ms",
    "gradient_anticipation": "1ms",
    "quantum": "10ms",
    "min_turn_factor": 1.0,
    "paranoid": True,
}


def device_for_one(model: Path) -> int:
    """Device bytes on which a full-parameter or a LoRA trainer fits, and not both."""
    full, lora = (
        sizing.sizes(str(model), "float32", Role.TRAIN, kind, 1, LORA_RANK, 0).device_bytes for kind in ("full", "lora")
    )
    return -(-(max(full, lora) + min(full, lora) // 2) // 4096) * 4096
