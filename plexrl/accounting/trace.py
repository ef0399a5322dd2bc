"""What one job asked of the pool and when, out of the ledger: the input of the baseline's replay."""

from collections.abc import Iterable

from msgspec import Struct, field

from plexrl.types import CallKind, Role, SpanClass
from plexrl.types import records as r


class Step(Struct):
    """A call, or the creation of a model, which has no kind.

    seen: how many results the job had been given before it submitted this. think_us: from the last of them (or, with
    none, from the job's attachment) to the submission, outages of the head left out. tokens: drawn by all sequences of
    a sample, else worked on. ran_us: as recorded, without the state that the call moved itself.
    """

    id: str
    group: str
    seen: int
    think_us: int
    accepted_us: int
    kind: CallKind | None = None
    prompt_tokens: int = 0
    sequences: int = 1
    tokens: int = 0
    ran_us: int = 0
    ended: bool = False


class Need(Struct):
    """What a dedicated run would have to hold of one worker group.

    gangs: replicas that the job really used. build_us: what building it took. switch_us: mean time to bring it onto its
    gang and off it again. device_bytes: per GPU. base: the model's name.
    """

    group: str
    role: Role
    gang_size: int
    gangs: int
    build_us: int
    switch_us: int
    device_bytes: int
    base: str = ""

    @property
    def gpus(self) -> int:
        """GPUs that it would hold alone."""
        return self.gang_size * self.gangs


class Trace(Struct):
    """One logical job. delivered: (unix us, id), results in the order in which they were given to the job.

    ended_us: when its last session was closed, else when its end was noticed, else the moment up to which is counted.
    running: it has not ended by then. tail_us: from its last result to its end. waited_us: sum over `calls` calls of
    the time from acceptance to the end that they did not run.
    """

    job: str
    attached: r.JobAttached
    ended_us: int
    running: bool = True
    steps: list[Step] = field(default_factory=list)
    delivered: list[tuple[int, str]] = field(default_factory=list)
    needs: dict[str, Need] = field(default_factory=dict)
    tail_us: int = 0
    calls: int = 0
    waited_us: int = 0


def traces(records: Iterable[r.Record], until_us: int) -> dict[str, Trace]:
    """The trace of every job that attached. Records up to until_us, in the order in which they were written."""
    reader = _Reader(until_us)
    for record in records:
        reader.take(record)
    return reader.close()


class _Reader:
    def __init__(self, until_us: int) -> None:
        self._until_us = until_us
        self._jobs: dict[str, Trace] = {}
        self._steps: dict[str, tuple[Trace, Step]] = {}
        self._given: set[str] = set()
        self._placed: dict[str, r.GroupPlaced] = {}
        self._used: dict[tuple[str, str], set[str]] = {}  # (job, group) -> gangs
        self._building: dict[str, tuple[int, int]] = {}  # gang -> its first unbroken switch
        self._moves: dict[tuple[str, bool], list[int]] = {}  # (gang, incoming) -> microseconds
        self._outages: list[tuple[int, int]] = []
        self._sessions: dict[str, str] = {}  # open session -> job
        self._closed: dict[str, int] = {}  # job -> when its last session was closed
        self._last_us = 0
        self._ran = False

    def take(self, record: r.Record) -> None:
        match record:
            case r.EpochStarted():
                if self._ran:
                    self._outages.append((self._last_us, record.now_us))
                self._ran = True
            case r.JobAttached():
                self._jobs.setdefault(record.job, Trace(record.job, record, self._until_us))
            case r.JobEnded() if record.job in self._jobs:
                trace = self._jobs[record.job]
                silent = trace.job in self._sessions.values()
                trace.ended_us = record.now_us if silent else self._closed.get(trace.job, record.now_us)
                trace.running = False
            case r.SessionOpened():
                self._sessions[record.session] = record.job
            case r.SessionEnded() if record.session in self._sessions:
                self._closed[self._sessions.pop(record.session)] = record.now_us
            case r.GroupPlaced():
                self._placed[record.spec.group] = record
            case r.ModelCreated():
                self._step(record.job, f"{record.model}:0", record.group, record.now_us)
            case r.CallAccepted():
                self._deliver(record.after, record.now_us)
                call = record.call
                step = self._step(call.job, call.id, call.group, record.now_us)
                if step is not None:
                    step.kind, step.prompt_tokens = call.kind, call.prompt_tokens
                    step.sequences, step.tokens = call.sequences, call.units
            case r.CallEnded() if record.id in self._steps:
                trace, step = self._steps[record.id]
                step.ended = True
                if record.gang:
                    step.ran_us = max(0, record.wall_us - record.moved_us)
                    step.tokens = worked(step.kind, record.units or step.tokens, step.prompt_tokens, step.sequences)
                    trace.calls += 1
                    trace.waited_us += max(0, record.now_us - step.accepted_us - record.wall_us)
                    self._used.setdefault((trace.job, step.group), set()).add(record.gang)
            case r.Delivered():
                self._deliver(record.id, record.now_us)
            case r.SpanClosed() if record.span.kind is SpanClass.SWITCH:
                start, end = record.span.start_us, record.span.end_us
                first = self._building.setdefault(record.span.gang, (start, end))
                if first[1] == start:
                    self._building[record.span.gang] = first[0], end
            case r.Switched():
                us = round((record.moved.seconds - record.moved.waited_s) * 1e6)
                self._moves.setdefault((record.gang, record.incoming), []).append(us)
        self._last_us = max(self._last_us, record.now_us)

    def _step(self, job: str, id: str, group: str, now_us: int) -> Step | None:
        trace = self._jobs.get(job)
        if trace and group in self._placed and id not in self._steps:
            step = Step(id, group, len(trace.delivered), self._think(trace, now_us), now_us)
            trace.steps.append(step)
            self._steps[id] = trace, step
            return step
        return None

    def _deliver(self, id: str, now_us: int) -> None:
        """Once; also when only a later call tells of it, because the record itself was lost with a head."""
        if id in self._steps and id not in self._given and self._steps[id][1].ended:
            self._given.add(id)
            self._steps[id][0].delivered.append((now_us, id))

    def _think(self, trace: Trace, now_us: int) -> int:
        since = trace.delivered[-1][0] if trace.delivered else trace.attached.now_us
        return max(0, now_us - since - self._down(since, now_us))

    def _down(self, start: int, end: int) -> int:
        return sum(max(0, min(end, b) - max(start, a)) for a, b in self._outages)

    def close(self) -> dict[str, Trace]:
        for trace in self._jobs.values():
            waits = any(not step.ended for step in trace.steps)
            trace.tail_us = 0 if waits else self._think(trace, trace.ended_us)
            trace.steps = [step for step in trace.steps if step.ended]
            for group in dict.fromkeys(step.group for step in trace.steps):
                trace.needs[group] = self._need(trace.job, group)
        return self._jobs

    def _need(self, job: str, group: str) -> Need:
        placed = self._placed[group]
        gangs = [gang.id for gang in placed.placement.gangs]
        builds = [self._building[gang] for gang in gangs if gang in self._building]
        moves = [[self._moves[gang, way] for gang in gangs if (gang, way) in self._moves] for way in (True, False)]
        return Need(
            group=group,
            role=placed.spec.role,
            gang_size=placed.spec.gang_size,
            gangs=len(self._used.get((job, group), ())) or 1,
            build_us=max((end - start for start, end in builds), default=0),
            switch_us=sum(_mean([us for part in way for us in part]) for way in moves),
            device_bytes=placed.spec.device_bytes,
            base=placed.base,
        )


def worked(kind: CallKind | None, units: int, prompt_tokens: int, sequences: int) -> int:
    """Of the tokens that an engine counted, those that a sample drew (one a sequence at least), or all."""
    return max(sequences, units - prompt_tokens) if kind is CallKind.SAMPLE else units


def _mean(values: list[int]) -> int:
    return sum(values) // len(values) if values else 0
