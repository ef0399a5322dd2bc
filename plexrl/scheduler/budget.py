"""How often interactive calls may break off others' turns."""

from collections import deque

_HOUR_US = 3_600_000_000
_NEVER = 1 << 62


class Budget:
    """At most `per_hour` preemptions in any hour."""

    def __init__(self, per_hour: int) -> None:
        self._taken: deque[int] = deque(maxlen=per_hour)

    def next_us(self, now: int) -> int:
        """When the next preemption may be; long from now when there is no budget at all."""
        taken = self._taken
        if len(taken) < taken.maxlen:
            return now
        return max(now, taken[0] + _HOUR_US + 1) if taken else _NEVER

    def take(self, now: int) -> None:
        """One was used."""
        self._taken.append(now)

    def resize(self, per_hour: int) -> None:
        """Another number from now on; the newest that were taken count."""
        self._taken = deque(self._taken, maxlen=per_hour)
