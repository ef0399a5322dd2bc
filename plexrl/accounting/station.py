"""GPUs of a dedicated run, on which one worker group works at a time. Times are microseconds of the replay."""

from collections import deque
from collections.abc import Mapping, Sequence
from heapq import heappop, heappush

from msgspec import Struct

from plexrl.accounting.fit import MODELLED, Fit
from plexrl.accounting.trace import Need, Step
from plexrl.types import CallKind, Role


class Ran(Struct):
    """When a step was submitted, taken up and done, alone. moved: of the time in between, what building its group and
    moving state took."""

    arrived: float
    started: float = 0.0
    ended: float = 0.0
    built: float = 0.0
    moved: float = 0.0


class _Gang:
    """One gang at work. A trainer works through its calls one by one; a replica decodes all its sequences together, and
    reads a new prompt while the others wait."""

    def __init__(self, fit: Fit | None) -> None:
        self._fit = fit
        self._at = 0.0
        self._ready = 0.0  # prompts are being read until then
        self._steps = 0.0  # decode steps so far: sequences under way advance together
        self._live = 0
        self._active: list[tuple[float, int, Step]] = []  # (decode steps at its end, tie, step)
        self._number = 0
        self.load = 0

    def add(self, now: float, step: Step) -> None:
        """Take up a step at `now`."""
        self._advance(now)
        prefill, length = self._work(step)
        self._ready = max(self._ready, now) + prefill
        self._number += 1
        self._live += step.sequences
        self.load += step.tokens
        heappush(self._active, (self._steps + length, self._number, step))

    def next_end(self) -> float | None:
        """When the next step is done, unless another comes before."""
        if not self._active:
            return None
        return max(self._at, self._ready) + max(0.0, self._active[0][0] - self._steps) * self._step_us()

    def end(self, now: float) -> Step:
        """The step that is done at `now` = next_end()."""
        self._at = now
        self._steps, _, step = heappop(self._active)
        self._live -= step.sequences
        self.load -= step.tokens
        return step

    def _advance(self, now: float) -> None:
        working = max(0.0, now - max(self._at, self._ready))
        if self._active and working:
            each = self._step_us()
            self._steps += working / each if each else 0.0
        self._at = now

    def _step_us(self) -> float:
        return self._fit.service.step_us(self._live) if self._fit else 0.0

    def _work(self, step: Step) -> tuple[float, float]:
        """(what it keeps the gang for at once, decode steps)."""
        fit = self._fit
        if fit is None or step.kind is None or (step.kind not in MODELLED and step.kind not in fit.other_us):
            return step.ran_us, 0.0
        if step.kind is not CallKind.SAMPLE:
            return fit.call_us(step.kind, step.tokens), 0.0
        first = 0.0 if self._active else fit.service.call_us  # overhead of a burst
        return first + fit.service.prefill_us_per_token * step.prompt_tokens, step.tokens / max(1, step.sequences)


class Station:
    """Groups on the same GPUs exclude one another, first come first served; samples that come for the group at work
    join it while nobody else waits. The first call of a group waits for its build; fits: whether all lie beside one
    another in memory, else each hand-over costs the measured time to move the one in and the other out."""

    def __init__(self, needs: Sequence[Need], fits: bool, models: Mapping[str, Fit]) -> None:
        self._needs = {need.group: need for need in needs}
        self._fits = fits
        self._gangs = {need.group: [_Gang(models.get(need.group)) for _ in range(_count(need))] for need in needs}
        self._built: set[str] = set()
        self._current: Need | None = None
        self._ready = 0.0  # the current group's build or hand-over ends
        self._queue: deque[Step] = deque()
        self._work = 0
        self.ran: dict[str, Ran] = {}

    def serves(self, group: str) -> bool:
        """Whether this group lives here."""
        return group in self._needs

    def arrive(self, now: float, step: Step) -> None:
        """A step is submitted at `now`, which is not before the last event."""
        self.ran[step.id] = Ran(now)
        self._queue.append(step)
        self._start(now)

    def next_end(self) -> float | None:
        """When the next step is done, unless another arrives before."""
        found = self._next()
        return found[0] if found else None

    def end(self, now: float) -> str:
        """The step that is done at `now` = next_end()."""
        _, gang = self._next()
        step = gang.end(now)
        self._work -= 1
        self.ran[step.id].ended = now
        self._start(now)
        return step.id

    def _next(self) -> tuple[float, _Gang] | None:
        if self._current is None:
            return None
        ends = [(at, gang) for gang in self._gangs[self._current.group] if (at := gang.next_end()) is not None]
        return min(ends, key=lambda end: end[0], default=None)

    def _start(self, now: float) -> None:
        if not self._work and self._queue:
            first = self._queue[0]
            self._hand_over(now, self._needs[first.group], self.ran[first.id])
            self._take(now)
        if self._current is not None and self._current.role is Role.SAMPLE:
            while self._queue and self._queue[0].group == self._current.group:
                self._take(now)

    def _hand_over(self, now: float, need: Need, ran: Ran) -> None:
        if need is self._current:
            return
        if need.group not in self._built:
            ran.built = need.build_us
            self._built.add(need.group)
        if not self._fits and self._current is not None and not ran.built:
            ran.moved = (need.switch_us + self._current.switch_us) // 2
        self._ready = now + ran.built + ran.moved
        self._current = need

    def _take(self, now: float) -> None:
        step = self._queue.popleft()
        ran = self.ran[step.id]
        ran.started = max(now, self._ready)
        gang = min(self._gangs[step.group], key=lambda gang: gang.load)
        gang.add(ran.started, step)
        self._work += 1


def _count(need: Need) -> int:
    return need.gangs if need.role is Role.SAMPLE else 1
