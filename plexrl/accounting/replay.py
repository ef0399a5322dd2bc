"""A job alone on its own GPUs: its recorded calls again, each submitted when what it waited for is there.

A step is submitted think_us after the last of the results that its job had been given before it. Service is the
recorded CPU time. A trainer works through its calls one by one; the samples under way share their replicas' time, none
faster than one replica alone. Groups on one station (colocated) exclude one another, first come first served; calls
that come for the group at work join it while nobody else waits. The first call of a group waits for its build.

A program that keeps calls in flight may in truth submit before a result that this waits for: for it this is a bound.
"""

from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush

from msgspec import Struct

from plexrl.accounting.trace import Need, Step, Trace
from plexrl.types import Role


class Replay(Struct, frozen=True):
    """gpus held for wall_us. progress: (unix us in the shared run, replayed us), both rising, from (attached, 0) on."""

    gpus: int
    wall_us: int
    progress: tuple[tuple[int, int], ...]

    @property
    def gpu_us(self) -> int:
        """The baseline: GPUs times replayed wall."""
        return self.gpus * self.wall_us


def colocated(trace: Trace, device_bytes: int | None) -> Replay:
    """Trainer and samplers take turns on the larger of them. device_bytes: of one GPU; when they do not fit beside each
    other, each hand-over costs the measured time to move the one in and the other out. None: they fit."""
    needs = list(trace.needs.values())
    fits = device_bytes is None or sum(need.device_bytes for need in needs) <= device_bytes
    stations = [_Station(needs, fits)] if needs else []
    return _run(trace, stations, max((need.gpus for need in needs), default=0))


def separate(trace: Trace) -> Replay:
    """Trainer and samplers have GPUs of their own."""
    needs = list(trace.needs.values())
    return _run(trace, [_Station([need], True) for need in needs], sum(need.gpus for need in needs))


class _Station:
    """GPUs on which one group works at a time. Times in microseconds of the replay."""

    def __init__(self, needs: Sequence[Need], fits: bool) -> None:
        self._needs = {need.group: need for need in needs}
        self._fits = fits
        self._built: set[str] = set()
        self._current: Need | None = None
        self._ready_at = 0.0  # the current group's build or hand-over ends
        self._queue: deque[Step] = deque()
        self._active: list[tuple[float, int, str]] = []  # (work done per call at its end, tie, id)
        self._done = 0.0  # work done per call so far: calls under way advance together
        self._at = 0.0
        self._number = 0

    def serves(self, group: str) -> bool:
        return group in self._needs

    def arrive(self, now: float, step: Step) -> None:
        """A step is submitted at `now`, which is not before the last event."""
        self._advance(now)
        self._queue.append(step)
        self._start()

    def next_end(self) -> float | None:
        """When the next call ends, unless another arrives before."""
        if not self._active:
            return None
        return max(self._at, self._ready_at) + max(0.0, self._active[0][0] - self._done) / self._rate()

    def end(self, now: float) -> str:
        """The call that ends at `now` = next_end()."""
        self._advance(now)
        self._done, _, id = heappop(self._active)
        self._start()
        return id

    def _rate(self) -> float:
        return min(1.0, self._current.gangs / len(self._active)) if self._current.role is Role.SAMPLE else 1.0

    def _advance(self, now: float) -> None:
        if self._active:
            self._done += max(0.0, now - max(self._at, self._ready_at)) * self._rate()
        self._at = now

    def _start(self) -> None:
        if not self._active and self._queue:
            self._hand_over(self._needs[self._queue[0].group])
            self._activate()
        if self._current is not None and self._current.role is Role.SAMPLE:
            while self._queue and self._queue[0].group == self._current.group:
                self._activate()

    def _hand_over(self, need: Need) -> None:
        if need is not self._current:
            moved = 0 if self._fits or self._current is None else (need.switch_us + self._current.switch_us) // 2
            self._ready_at = self._at + (moved if need.group in self._built else need.build_us)
            self._built.add(need.group)
            self._current = need

    def _activate(self) -> None:
        step = self._queue.popleft()
        self._number += 1
        heappush(self._active, (self._done + step.service_us, self._number, step.id))


def _run(trace: Trace, stations: Sequence[_Station], gpus: int) -> Replay:
    released: dict[int, list[Step]] = {}
    for step in trace.steps:
        released.setdefault(step.seen, []).append(step)
    arrivals: list[tuple[float, int, Step]] = []
    ended: dict[str, float] = {}
    progress = [(trace.attached.now_us, 0)]
    now = seen_at = 0.0
    seen = order = 0

    def release() -> None:
        nonlocal order
        for step in released.pop(seen, ()):
            order += 1
            heappush(arrivals, (seen_at + step.think_us, order, step))

    release()
    while True:
        ends = [(at, index) for index, station in enumerate(stations) if (at := station.next_end()) is not None]
        end = min(ends, default=None)
        if arrivals and (end is None or arrivals[0][0] < end[0]):
            now, _, step = heappop(arrivals)
            next(station for station in stations if station.serves(step.group)).arrive(now, step)
        elif end is not None:
            now = end[0]
            ended[stations[end[1]].end(now)] = now
            while seen < len(trace.delivered) and trace.delivered[seen][1] in ended:
                at, id = trace.delivered[seen]
                seen, seen_at = seen + 1, max(seen_at, ended[id])
                progress.append((at, round(seen_at)))
                release()
        else:
            break
    wall = max(round(now), round(seen_at) + trace.tail_us)
    progress.append((trace.ended_us, wall))
    return Replay(gpus, wall, tuple(progress))
