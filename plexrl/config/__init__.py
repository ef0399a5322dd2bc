"""plexrl.yaml: what a pool serves and how it shares its GPUs."""

from plexrl.config.load import load
from plexrl.config.quantities import parse_duration, parse_size
from plexrl.config.schema import (
    Device,
    Host,
    Limits,
    Lora,
    MaxStretch,
    Model,
    Nvme,
    PoolConfig,
    Sample,
    SchedulerPolicy,
    Share,
    Standing,
    Train,
)

__all__ = [
    "Device",
    "Host",
    "Limits",
    "Lora",
    "MaxStretch",
    "Model",
    "Nvme",
    "PoolConfig",
    "Sample",
    "SchedulerPolicy",
    "Share",
    "Standing",
    "Train",
    "load",
    "parse_duration",
    "parse_size",
]
