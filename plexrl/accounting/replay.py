"""A job alone on its own GPUs: its recorded calls again, each submitted when what it waited for is there.

A step is submitted think_us after the last of the results that its job had been given before it. How long it takes is
the fitted model's word (`fit`), by the tokens in it and by what else its own job has under way; the recorded seconds,
which contention and bunching distort, enter only through the fit. The first call of a group waits for its build.

A program that keeps calls in flight may in truth submit before a result that this waits for: for it this is a bound.
"""

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush

from msgspec import Struct

from plexrl.accounting.fit import Fit
from plexrl.accounting.station import Ran, Station
from plexrl.accounting.trace import Step, Trace


class Leg(Struct, frozen=True):
    """A piece of the chain of calls that the wall time consists of, in whole microseconds.

    think_us: of the program, before it submitted the call; wait_us: for its own earlier calls to get off the GPUs;
    build_us, move_us: of the engine and of state; run_us: the call. The last leg has no call, only the program's end.
    """

    call: str
    kind: str
    think_us: int
    wait_us: int = 0
    build_us: int = 0
    move_us: int = 0
    run_us: int = 0

    @property
    def us(self) -> int:
        """All of it."""
        return self.think_us + self.wait_us + self.build_us + self.move_us + self.run_us


class Replay(Struct, frozen=True):
    """gpus held for wall_us. progress: (unix us in the shared run, replayed us), both rising, from (attached, 0) on.

    legs: what the wall time consists of, first things first: their sum is wall_us.
    """

    gpus: int
    wall_us: int
    progress: tuple[tuple[int, int], ...]
    legs: tuple[Leg, ...] = ()

    @property
    def gpu_us(self) -> int:
        """The baseline: GPUs times replayed wall."""
        return self.gpus * self.wall_us


def colocated(trace: Trace, device_bytes: int | None, models: Mapping[str, Fit]) -> Replay:
    """Trainer and samplers take turns on the larger of them. device_bytes: of one GPU; when they do not fit beside each
    other, each hand-over costs the measured time to move the one in and the other out. None: they fit."""
    needs = list(trace.needs.values())
    fits = device_bytes is None or sum(need.device_bytes for need in needs) <= device_bytes
    stations = [Station(needs, fits, models)] if needs else []
    return _run(trace, stations, max((need.gpus for need in needs), default=0))


def separate(trace: Trace, models: Mapping[str, Fit]) -> Replay:
    """Trainer and samplers have GPUs of their own."""
    needs = list(trace.needs.values())
    return _run(trace, [Station([need], True, models) for need in needs], sum(need.gpus for need in needs))


def _run(trace: Trace, stations: Sequence[Station], gpus: int) -> Replay:
    released: dict[int, list[Step]] = {}
    for step in trace.steps:
        released.setdefault(step.seen, []).append(step)
    arrivals: list[tuple[float, int, Step]] = []
    ended: dict[str, float] = {}
    because: dict[str, str] = {}  # step -> the result that let it be submitted
    progress = [(trace.attached.now_us, 0)]
    now = seen_at = 0.0
    seen = order = 0
    last = ""  # the result that came at seen_at

    def release() -> None:
        nonlocal order
        for step in released.pop(seen, ()):
            order += 1
            because[step.id] = last
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
                seen += 1
                if ended[id] >= seen_at:
                    seen_at, last = ended[id], id
                progress.append((at, round(seen_at)))
                release()
        else:
            break
    wall = max(round(now), round(seen_at) + trace.tail_us)
    progress.append((trace.ended_us, wall))
    ran = {id: each for station in stations for id, each in station.ran.items()}
    if round(now) > round(seen_at) + trace.tail_us:  # a result that nobody asked for came last of all
        last = max(ended, key=lambda id: ended[id])
    return Replay(gpus, wall, tuple(progress), tuple(_legs(trace, ran, because, last, wall)))


def _legs(trace: Trace, ran: Mapping[str, Ran], because: Mapping[str, str], last: str, wall: int) -> list[Leg]:
    """From the end backwards: each call's result, and the one that it had waited for."""
    kinds = {step.id: step.kind for step in trace.steps}
    legs = [Leg("", "end", wall - (round(ran[last].ended) if last else 0))]
    while last:
        before = because[last]
        began = round(ran[before].ended) if before else 0
        legs.append(_leg(last, str(kinds[last] or "create"), ran[last], began))
        last = before
    return legs[::-1]


def _leg(id: str, kind: str, ran: Ran, began: int) -> Leg:
    arrived, started, ended = round(ran.arrived), round(ran.started), round(ran.ended)
    built, moved = round(ran.built), round(ran.moved)
    return Leg(id, kind, arrived - began, started - arrived - built - moved, built, moved, ended - started)
