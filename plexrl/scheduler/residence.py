"""Who is on which GPU, who comes in, and who has to leave for it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from plexrl.scheduler.gang import GangState, rivals
from plexrl.types import Residency

if TYPE_CHECKING:
    from plexrl.scheduler.turn import OpenTurn

_HOST = Residency.HOST


@dataclass(eq=False, slots=True)
class Arrival:
    """A gang comes in, others leave for it. job: pays. turn: that waits for it; None for a prefetch so far.

    evicting: those that leave. ending: those whose engines end, perhaps when they have left.
    """

    state: GangState
    begun_us: int
    job: str
    evicting: list[GangState] = field(default_factory=list)
    ending: list[GangState] = field(default_factory=list)
    turn: OpenTurn | None = None


class Leave(NamedTuple):
    """Who makes room: `evict` leaves the device; the engines of `end`, which sleep or will have left, are ended."""

    evict: list[GangState]
    end: list[GangState]


class Residence:
    """The bytes of all GPUs, as the residencies of gangs say. Every change of a residency goes through `move`.

    used: GPU -> bytes of those that are, or may be, on it, and residual bytes of those that sleep. While somebody comes
    in, both it and those that leave for it count: they cross.
    """

    def __init__(self, gpus: Mapping[str, int]) -> None:
        self._bytes = dict(gpus)
        self.used: dict[str, int] = dict.fromkeys(gpus, 0)
        self.on: dict[str, dict[str, GangState]] = {gpu: {} for gpu in gpus}
        self.there: dict[str, dict[str, GangState]] = {gpu: {} for gpu in gpus}

    def add(self, state: GangState) -> None:
        """A gang was placed."""
        if state.gang.extents[0].offset is not None:
            near = {other.id: other for gpu in state.gpus for other in self.on[gpu].values()}
            for other in near.values():
                if rivals(state.gang, other.gang):
                    state.rivals[other.id] = other
                    other.rivals[state.id] = state
        held = _held(state)
        for gpu in state.gpus:
            self.on[gpu][state.id] = state
            if state.occupies:
                self.there[gpu][state.id] = state
            self.used[gpu] += held

    def discard(self, state: GangState) -> None:
        """A gang is gone."""
        held = _held(state)
        for gpu in state.gpus:
            del self.on[gpu][state.id]
            self.there[gpu].pop(state.id, None)
            self.used[gpu] -= held
        for rival in state.rivals.values():
            del rival.rivals[state.id]

    def move(self, state: GangState, to: Residency) -> None:
        """The gang's state is elsewhere now."""
        before, was_there = _held(state), state.occupies
        state.move(to)
        change = _held(state) - before
        if state.occupies != was_there:
            for gpu in state.gpus:
                if was_there:
                    del self.there[gpu][state.id]
                else:
                    self.there[gpu][state.id] = state
        if change:
            for gpu in state.gpus:
                self.used[gpu] += change

    def needs(self, members: Iterable[GangState]) -> list[GangState]:
        """Those of a turn's gangs that have to come in."""
        return [state for state in members if state.residency is not Residency.DEVICE]

    def victims(
        self,
        coming: Sequence[GangState],
        now: int,
        keep: Collection[GangState],
        lazy: bool = True,
        ends: bool = True,
    ) -> Leave | None:
        """Who makes room so that all of `coming` fit, the furthest next use first; None while it is not possible.

        keep: gangs that must stay: those of the turn itself, those at work, a reservation's holder. lazy: only who has
        to; else everybody whom the rules let go. ends: engines of those that sleep may be ended where the devices have
        no room for what they keep, and nothing that was begun is lost by it.
        """
        chosen: dict[str, GangState] = {}
        ended: dict[str, GangState] = {}
        for state in coming:
            for rival in state.rivals.values():
                if rival.occupies:
                    if not _may_leave(rival, keep):
                        return None
                    chosen[rival.id] = rival
        for gpu, short in self._lack(coming).items():
            short -= sum(_gain(state) for state in chosen.values() if gpu in state.gpus)
            short -= sum(state.spec.residual_bytes for state in ended.values() if gpu in state.gpus)
            if short <= 0:
                continue
            leavers = [s for s in self.there[gpu].values() if s.id not in chosen and _may_leave(s, keep)]
            leavers.sort(key=lambda s: (-s.next_use(now), s.used, s.id))
            for leaver in leavers:
                if leaver in coming:
                    continue
                chosen[leaver.id] = leaver
                short -= _gain(leaver)
                if short <= 0:
                    break
            if short > 0 and ends:
                # Only what would be missing if nobody else were awake: for the rest it is enough to wait.
                others = [s for s in self.on[gpu].values() if s.id not in ended and s not in coming]
                stay = sum(_held(s) if s in keep else _kept(s) for s in others)
                over = stay + sum(s.size for s in coming if gpu in s.gpus) - self._bytes[gpu]
                asleep = [s for s in others if _may_end(s, keep) and (s.residency is _HOST or s.id in chosen)]
                asleep.sort(key=lambda s: (-s.next_use(now), s.used, s.id))
                while over > 0 and asleep:
                    sleeper = asleep.pop(0)
                    ended[sleeper.id] = sleeper
                    over -= sleeper.spec.residual_bytes
                    short -= sleeper.spec.residual_bytes
            if short > 0:
                return None
        if not lazy:
            self._sweep(coming, keep, chosen)
        return Leave(self._by_use(chosen, now), self._by_use(ended, now))

    def _lack(self, coming: Sequence[GangState]) -> dict[str, int]:
        """GPU -> bytes that are missing there if all of `coming` are there (negative: to spare)."""
        lack: dict[str, int] = {}
        for state in coming:
            for gpu in state.gpus:
                base = lack.get(gpu)
                if base is None:
                    base = self.used[gpu] - self._bytes[gpu]
                    if state.gang.extents[0].offset is not None:
                        base -= self._crossed(gpu)
                lack[gpu] = base + state.size - _held(state)
        return lack

    def _crossed(self, gpu: str) -> int:
        """Bytes that `used` counts twice: of those that come and what leaves for them no more than the larger is there.

        Where extents are fixed a third may come beside them, for the gates keep their bytes apart.
        """
        twice = 0
        for state in self.on[gpu].values():
            if state.arrival:
                ending = state.arrival.ending
                away = [s for s in {*state.arrival.evicting, *ending} if gpu in s.gpus]
                free = sum(_held(s) - (0 if s in ending else s.spec.residual_bytes) for s in away)
                twice += min(state.size, free)
        return twice

    def _sweep(self, coming: Sequence[GangState], keep: Collection[GangState], chosen: dict[str, GangState]) -> None:
        for state in coming:
            for gpu in state.gpus:
                for other in self.on[gpu].values():
                    if other.residency is Residency.DEVICE and _may_leave(other, keep) and other not in coming:
                        chosen[other.id] = other

    def _by_use(self, chosen: Mapping[str, GangState], now: int) -> list[GangState]:
        return sorted(chosen.values(), key=lambda s: (-s.next_use(now), s.used, s.id))


def _may_leave(state: GangState, keep: Collection[GangState]) -> bool:
    return state.arrival is None and state.evictor is None and state not in keep and not state.moving


def _may_end(state: GangState, keep: Collection[GangState]) -> bool:
    """Whether nothing is lost with its engine once it sleeps: no call is half done there, nobody uses it.

    What was drawn of samples is taken out before.
    """
    idle = state.ending is None and not state.active and not (state.trains and state.begun)
    return idle and bool(state.spec.residual_bytes) and _may_leave(state, keep)


def _held(state: GangState) -> int:
    """Bytes of the gang on each of its GPUs."""
    return state.size if state.occupies else _kept(state)


def _kept(state: GangState) -> int:
    """Bytes that the gang keeps on each of its GPUs whether or not it is there."""
    return 0 if state.residency in (Residency.COLD, Residency.LOST) else state.spec.residual_bytes


def _gain(state: GangState) -> int:
    return state.size - state.spec.residual_bytes
