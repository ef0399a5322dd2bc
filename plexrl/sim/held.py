"""GPU time that belongs to somebody."""

from collections.abc import Iterable


class Held:
    """GPU time in which a GPU had at least one taker."""

    __slots__ = ("_count", "_since", "total_us")

    def __init__(self) -> None:
        self._count: dict[str, int] = {}
        self._since: dict[str, int] = {}
        self.total_us = 0

    def take(self, gpus: Iterable[str], now: int) -> None:
        """One more taker of these GPUs."""
        for gpu in gpus:
            count = self._count.get(gpu, 0)
            if not count:
                self._since[gpu] = now
            self._count[gpu] = count + 1

    def give(self, gpus: Iterable[str], now: int) -> None:
        """One taker less; without any, what has passed counts."""
        for gpu in gpus:
            self._count[gpu] -= 1
            if not self._count[gpu]:
                self.total_us += now - self._since[gpu]
