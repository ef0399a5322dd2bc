"""The line: gangs that wait for GPUs, and the reservations of those that wait for the rest of theirs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from plexrl.scheduler.gang import GangState
from plexrl.types import Tenant


@dataclass(eq=False, slots=True)
class Waiter:
    """A gang in line, as its calls were when it was put there or one came or went.

    tenant: for whom it would run. ticket: its number in order of arrival. since_us: since when it could have run.
    due_us: the deadline of its first call. gpus: what its turn needs. rank: of its class. service_us: how long its turn
    is expected to last.
    """

    state: GangState
    tenant: Tenant
    ticket: int
    since_us: int
    due_us: int | None
    gpus: tuple[str, ...]
    rank: int
    service_us: int


class Line:
    """Who waits, by gang and by GPU.

    reserved: GPU -> the waiter for whom it is kept free. A waiter has reservations on all its GPUs or on none, and
    keeps them until it is granted, leaves, or a starving one takes them over (rule 4).
    """

    def __init__(self, gpus: Iterable[str]) -> None:
        self.on: dict[str, dict[str, Waiter]] = {gpu: {} for gpu in gpus}
        self.reserved: dict[str, Waiter] = {}
        self.ranks = [0, 0, 0]
        self._all: dict[str, Waiter] = {}

    def get(self, gang: str) -> Waiter | None:
        """The gang's place; None when it does not wait."""
        return self._all.get(gang)

    def put(self, waiter: Waiter) -> None:
        """Let a gang wait that does not yet."""
        self._all[waiter.state.id] = waiter
        self.ranks[waiter.rank] += 1
        for gpu in waiter.gpus:
            self.on[gpu][waiter.state.id] = waiter

    def discard(self, gang: str) -> None:
        """The gang waits no longer. Its reservations are to be released before."""
        waiter = self._all.pop(gang, None)
        if waiter:
            self.ranks[waiter.rank] -= 1
            for gpu in waiter.gpus:
                del self.on[gpu][gang]

    def holds(self, waiter: Waiter) -> bool:
        """Whether it has reservations."""
        return self.reserved.get(waiter.gpus[0]) is waiter

    def reserve(self, waiter: Waiter) -> None:
        """Keep all its GPUs free for it."""
        for gpu in waiter.gpus:
            self.reserved[gpu] = waiter

    def release(self, waiter: Waiter) -> None:
        """Give its reservations up."""
        if self.holds(waiter):
            for gpu in waiter.gpus:
                del self.reserved[gpu]

    def others(self, waiter: Waiter) -> list[Waiter]:
        """Whose reservations are in its way."""
        found = {id(other): other for gpu in waiter.gpus if (other := self.reserved.get(gpu)) is not None}
        found.pop(id(waiter), None)
        return list(found.values())

    def __iter__(self) -> Iterator[Waiter]:
        return iter(self._all.values())

    def __len__(self) -> int:
        return len(self._all)
