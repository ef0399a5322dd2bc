"""What a GPU-microsecond went to."""

from enum import StrEnum

from msgspec import Struct


class SpanClass(StrEnum):
    """One class per GPU-microsecond; listed by precedence."""

    BUSY = "busy"
    SWITCH = "switch"
    KEPT = "kept"
    STARTUP = "startup"
    DRAIN = "drain"
    IDLE = "idle"


class Span(Struct, frozen=True):
    """A closed interval [start_us, end_us) of one GPU. shares: (job, weight) pairs among which it is split."""

    gpu: str
    start_us: int
    end_us: int
    kind: SpanClass
    gang: str
    shares: tuple[tuple[str, int], ...]
