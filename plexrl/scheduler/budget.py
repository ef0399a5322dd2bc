"""How often interactive calls may break off others' turns."""

_HOUR_US = 3_600_000_000


class Budget:
    """A token bucket: `per_hour` preemptions an hour, up to a tenth of that (at least one) at once."""

    def __init__(self, per_hour: int) -> None:
        self._every_us = _HOUR_US // per_hour if per_hour else 0
        self._burst = max(1, per_hour // 10)
        self._full_us = 0  # when the bucket is full again

    def next_us(self, now: int) -> int:
        """When the next preemption may be; long from now when there is no budget at all."""
        if not self._every_us:
            return 1 << 62
        return max(now, self._full_us - (self._burst - 1) * self._every_us)

    def take(self, now: int) -> None:
        """One was used."""
        self._full_us = max(now, self._full_us) + self._every_us
