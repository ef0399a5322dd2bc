"""plexrl.yaml: what a pool serves and how it shares its GPUs."""

from plexrl.config.engines import Choice, Problem, choices
from plexrl.config.load import load, read
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
    "Choice",
    "Device",
    "Host",
    "Limits",
    "Lora",
    "MaxStretch",
    "Model",
    "Nvme",
    "PoolConfig",
    "Problem",
    "Sample",
    "SchedulerPolicy",
    "Share",
    "Standing",
    "Train",
    "choices",
    "load",
    "parse_duration",
    "parse_size",
    "read",
]
