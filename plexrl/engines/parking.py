"""Whether a live sequence's keys and values are worth moving: parked in host memory, or dropped and read again."""

from __future__ import annotations

from msgspec import Struct

# Weight of all earlier measurements beside a new one: what a machine does changes, slowly.
_KEEP = 0.95


class Costs(Struct, frozen=True, kw_only=True):
    """What was measured. copy_bps: bytes per second between device and host, the slower direction; 0: not measured.

    read_fixed_s, read_token_s: seconds that reading a prefix takes, and those per token of it; 0 and 0: not measured.
    """

    copy_bps: float = 0.0
    read_fixed_s: float = 0.0
    read_token_s: float = 0.0


def keep(tokens: int, token_bytes: int, costs: Costs) -> bool:
    """Whether a sequence of so many tokens is parked: its bytes move twice, unless to read it again takes less time.

    What was not measured yet says nothing for reading again.
    """
    again = costs.read_fixed_s + tokens * costs.read_token_s
    if not costs.copy_bps or not again:
        return True
    return 2 * tokens * token_bytes / costs.copy_bps <= again


class Meter:
    """Measures both ways as the sampler works: copies of parked rows, prefixes read."""

    def __init__(self) -> None:
        self._copied = {"out": 0.0, "in": 0.0}
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)  # of 1, n, s, n * n, n * s over the prefixes read

    def copied(self, direction: str, size: int, seconds: float) -> None:
        """`size` bytes went "out" or "in" in so many seconds of copying."""
        if size and seconds > 0:
            last = self._copied[direction]
            self._copied[direction] = size / seconds if not last else 0.5 * last + 0.5 * size / seconds

    def read(self, tokens: int, seconds: float) -> None:
        """A prefix of so many tokens was read."""
        new = (1, tokens, seconds, tokens * tokens, tokens * seconds)
        self._sums = tuple(_KEEP * old + x for old, x in zip(self._sums, new, strict=True))

    @property
    def costs(self) -> Costs:
        """What is known now; the line through the prefixes is the least-squares one, never falling."""
        bandwidth = min((bps for bps in self._copied.values() if bps), default=0.0)
        count, n, s, nn, ns = self._sums
        if not count:
            return Costs(copy_bps=bandwidth)
        spread = count * nn - n * n
        slope = (count * ns - n * s) / spread if spread > 1e-6 * nn else s / n
        slope = min(max(slope, 0.0), s / n)
        return Costs(copy_bps=bandwidth, read_fixed_s=(s - slope * n) / count, read_token_s=slope)
