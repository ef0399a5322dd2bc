"""Rule 11: every GPU-microsecond in exactly one span."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from msgspec import Struct

from plexrl.types import Call, Span, SpanClass


class Use(Struct, frozen=True):
    """What a GPU does now. job: who pays; "" where the work done decides (busy) or nobody does."""

    kind: SpanClass
    gang: str = ""
    job: str = ""


@dataclass(slots=True)
class Work:
    """Units in the busy span of a gang that is open now: of its ended calls by job, and of those under way."""

    ended: dict[str, int] = field(default_factory=dict)
    running: dict[str, tuple[str, int]] = field(default_factory=dict)

    def shares(self) -> tuple[tuple[str, int], ...]:
        """Units by job."""
        shares = dict(self.ended)
        for job, units in self.running.values():
            shares[job] = shares.get(job, 0) + units
        return tuple(sorted(shares.items()))


class Meter:
    """Open spans of all GPUs. Closed ones gather in `closed` until the scheduler hands them out."""

    def __init__(self, gpus: Iterable[str], now: int, use: Use) -> None:
        self.start_us = now
        self.open: dict[str, tuple[int, Use]] = dict.fromkeys(gpus, (now, use))
        self.total: dict[str, int] = dict.fromkeys(self.open, 0)
        self.closed: list[Span] = []
        self._work: dict[str, Work] = {}

    def update(self, now: int, uses: Mapping[str, Use]) -> None:
        """Close the spans of the GPUs whose use changes, and open the next. All of a gang's GPUs change together."""
        self._turn_over(now, {gpu: use for gpu, use in uses.items() if use != self.open[gpu][1]})

    def cut(self, now: int, gpus: Iterable[str]) -> None:
        """Close the spans of these GPUs and go on with the same use."""
        self._turn_over(now, {gpu: self.open[gpu][1] for gpu in gpus})

    def started(self, now: int, gpus: tuple[str, ...], gang: str, call: Call, alone: bool) -> None:
        """A call begins on the gang. alone: it has the gang to itself, so another job's call begins another span."""
        work = self._work.setdefault(gang, Work())
        if alone and work.ended and call.job not in work.ended:
            # Not so while the GPUs still show what they did before this gang's turn.
            if self.open[gpus[0]][1] == Use(SpanClass.BUSY, gang):
                self.cut(now, gpus)
            else:
                work.ended.clear()
        work.running[call.id] = (call.job, max(1, call.units))

    def stopped(self, gang: str, call: Call, units: int) -> None:
        """A call ended or was paused after so many units."""
        work = self._work.get(gang)
        if work and work.running.pop(call.id, None):
            work.ended[call.job] = work.ended.get(call.job, 0) + max(1, units)

    def forget(self, gang: str) -> None:
        """The gang is no more."""
        self._work.pop(gang, None)

    def _turn_over(self, now: int, uses: Mapping[str, Use]) -> None:
        gangs = set()
        for gpu, use in uses.items():
            since, old = self.open[gpu]
            self.open[gpu] = (now, use)
            shares: tuple[tuple[str, int], ...] = ((old.job, 1),) if old.job else ()
            if old.kind is SpanClass.BUSY:
                gangs.add(old.gang)
                shares = self._work[old.gang].shares()
            if now > since:
                self.total[gpu] += now - since
                self.closed.append(Span(gpu, since, now, old.kind, old.gang, shares))
        # A gang is busy on all its GPUs at once, so all of them have closed with the same shares by now.
        for gang in gangs:
            self._work[gang].ended.clear()
