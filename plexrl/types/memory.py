"""Places and movements of bytes."""

from msgspec import Struct


class Slab(Struct, frozen=True):
    """A named piece of a node's host arena. owner: the uid whose bytes it holds, -1 for shared read-only state.

    numa: the NUMA node whose memory it is.
    """

    name: str
    offset: int
    size: int
    owner: int
    numa: int = 0


class Moved(Struct, frozen=True, kw_only=True):
    """What one switch moved on one GPU, measured: bytes in each direction, bytes skipped as clean, seconds.

    seconds: the whole. waited_s: of these, at the gate for another's bytes, so `seconds - waited_s` were copying.
    residual_bytes: what stays on the device after an offload (contexts, graphs, communicators).
    """

    bytes_out: int = 0
    bytes_in: int = 0
    bytes_clean: int = 0
    seconds: float = 0.0
    waited_s: float = 0.0
    residual_bytes: int = 0
