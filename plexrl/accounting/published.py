"""What the pool publishes for its reports: closed minutes, jobs, timeline. Whole for admins, cut down for each user."""

from collections.abc import Collection, Iterable, Iterator, Sequence

from msgspec import Struct, field, structs

from plexrl.accounting.basis import Basis, basis
from plexrl.accounting.busy import Busy
from plexrl.accounting.causes import causes
from plexrl.accounting.charges import MINUTE_US, Minute, charge
from plexrl.accounting.fit import Fit, fits
from plexrl.accounting.moves import Moves, moves
from plexrl.accounting.overlap import switch_totals
from plexrl.accounting.replay import Replay, colocated, separate
from plexrl.accounting.sweep import Segment, held, segments, spans
from plexrl.accounting.trace import Trace, traces
from plexrl.types import SpanClass
from plexrl.types import records as r

TIMELINE = 20_000  # bars; older ones are left out of the picture, never out of the sums
_SILENT_US = 60_000_000


class Bar(Struct, frozen=True):
    """A piece of the timeline. shares: (job, weight); "" stands for jobs that the reader may not see."""

    gpu: str
    start_us: int
    end_us: int
    kind: SpanClass | None
    shares: tuple[tuple[str, int], ...] = ()


class Job(Struct):
    """A logical job. minutes: (start, busy, switch, kept, dedicated, dedicated_split), GPU-microseconds; it is charged
    the first three.

    wall_us: in the shared pool, attachment to end; replayed_us: the same alone. wait_us: mean wait of a call for its
    turn. ended_us: its end, or the moment of publication when running. models: the base models that it used. basis:
    what its baselines were made of. declared_gpus: what its script asked Slurm for.
    """

    job: str
    slurm_id: int
    uid: int
    user: str
    account: str
    attached_us: int
    ended_us: int
    running: bool
    wall_us: int
    replayed_us: int
    gpus: int
    gpus_split: int
    calls: int
    wait_us: int
    minutes: list[tuple[int, int, int, int, int, int]] = field(default_factory=list)
    qos: str = ""
    partition: str = ""
    declared_gpus: int = 0
    models: tuple[str, ...] = ()
    basis: Basis = field(default_factory=Basis)


class Published(Struct):
    """The state of a pool's accounts at until_us. uid: who may read it, None for the whole; accounts: whose jobs that
    user sees beside the own ones.

    moves: by minute. running: a head was at work. slurm_jobs: the pool's own Slurm jobs. ideal_us: the least that any
    sharing of these jobs could have cost: their busy time, and no less than the largest of the dedicated runs.
    device_bytes: of a GPU; None where unknown. pretend: GPUs are cores, whose CPU seconds tell of contention. now_us:
    the moment of publication; what was recorded later is not in it. sure: GPU-microseconds of all jobs' dedicated
    runs, by confidence.
    """

    pool: str
    uid: int | None
    from_us: int
    until_us: int
    running: bool
    gpus: tuple[str, ...]
    slurm_jobs: tuple[int, ...]
    minutes: list[Minute]
    jobs: list[Job]
    timeline: list[Bar]
    notes: list[str]
    ideal_us: int
    device_bytes: int | None = None
    moves: list[Moves] = field(default_factory=list)
    accounts: tuple[str, ...] = ()
    pretend: bool = False
    switches: int = 0
    now_us: int = 0
    sure: dict[str, int] = field(default_factory=dict)


def horizon(records: Sequence[r.Record], intervals: Iterable[r.AgentInterval], now_us: int) -> tuple[int, bool]:
    """(up to when everything is told, whether a head is at work).

    While one is, the last spans are still open: what is told ends with the GPU whose last closed span is oldest. A pool
    whose agents have not reported for a minute is dead, whatever its records say.
    """
    started = max((i for i, x in enumerate(records) if isinstance(x, r.EpochStarted)), default=None)
    if started is None or any(isinstance(x, r.EpochEnded) for x in records[started:]):
        return now_us, False
    if now_us - max((i.now_us for i in intervals), default=0) > _SILENT_US:
        return now_us, False
    told = dict.fromkeys(records[started].gpus, records[started].now_us)
    for record in records[started:]:
        if isinstance(record, r.SpanClosed) and record.span.gpu in told:
            told[record.span.gpu] = max(told[record.span.gpu], record.span.end_us)
    return min([*told.values(), now_us]), True


def compute(
    records: Sequence[r.Record],
    intervals: Sequence[r.AgentInterval],
    now_us: int,
    device_bytes: int | None = None,
    pretend: bool = False,
) -> Published:
    """Everything that there is to report. Pure."""
    until, running = horizon(records, intervals, now_us)
    holding = held(intervals, until)
    laid = segments(spans(records, until), holding)
    charges = charge(laid, holding)
    jobs = []
    for trace, together, apart, models in dedicated(records, until, device_bytes, pretend):
        alone, split = per_minute(together), per_minute(apart)
        charged = charges.jobs.get(trace.job, {})
        minutes = sorted(charged.keys() | alone.keys() | split.keys())
        rows = [(at, *charged.get(at, (0, 0, 0)), alone.get(at, 0), split.get(at, 0)) for at in minutes]
        for at, *_, mine, mine_split in rows:
            minute = charges.minute(at)
            minute.dedicated_us += mine
            minute.split_us += mine_split
        jobs.append(_job(trace, running, together, apart, rows, basis(trace, together, apart, models, pretend)))
    sure: dict[str, int] = {}
    for job in jobs:
        if job.gpus:
            sure[job.basis.confidence] = sure.get(job.basis.confidence, 0) + job.gpus * job.replayed_us
    busy = sum(minute.classes.get(SpanClass.BUSY, 0) for minute in charges.minutes.values())
    epochs = [record for record in records if isinstance(record, r.EpochStarted)]
    return Published(
        pool=epochs[-1].pool if epochs else "",
        uid=None,
        from_us=min((start for pieces in holding.values() for start, _ in pieces), default=until),
        until_us=until if running else max((end for pieces in holding.values() for _, end in pieces), default=until),
        running=running,
        gpus=tuple(sorted(holding)),
        slurm_jobs=tuple(sorted(({e.slurm_job for e in epochs} | {i.slurm_job for i in intervals}) - {0})),
        minutes=[charges.minutes[at] for at in sorted(charges.minutes)],
        jobs=sorted(jobs, key=lambda job: job.attached_us),
        timeline=[Bar(s.gpu, s.start_us, s.end_us, s.kind, s.shares) for s in _newest(laid)],
        notes=causes(records, laid, holding),
        ideal_us=max([busy, *(job.gpus * job.replayed_us for job in jobs)]),
        device_bytes=device_bytes,
        moves=moves(records, laid, until),
        pretend=pretend,
        now_us=now_us,
        sure=sure,
        switches=switch_totals(record for record in records if record.now_us <= until)[0],
    )


def dedicated(
    records: Sequence[r.Record], until: int, device_bytes: int | None, pretend: bool = False
) -> Iterator[tuple[Trace, Replay, Replay, dict[str, Fit]]]:
    """Every job that attached, with its two baselines, colocated and split, and the models behind them."""
    told = [record for record in records if record.now_us <= until]
    models = fits(told, Busy(told), pretend)
    heard = max((record.now_us for record in records), default=until)
    for trace in traces(told, min(until, heard)).values():
        yield trace, colocated(trace, device_bytes, models), separate(trace, models), models


def _job(
    trace: Trace, running: bool, together: Replay, apart: Replay, minutes: list[tuple[int, ...]], made_of: Basis
) -> Job:
    attached = trace.attached
    return Job(
        job=trace.job,
        slurm_id=attached.slurm_job,
        uid=attached.uid,
        user=attached.user,
        account=attached.account,
        attached_us=attached.now_us,
        ended_us=trace.ended_us,
        running=running and trace.running,
        wall_us=trace.ended_us - attached.now_us,
        replayed_us=together.wall_us,
        gpus=together.gpus,
        gpus_split=apart.gpus,
        calls=trace.calls,
        wait_us=trace.waited_us // trace.calls if trace.calls else 0,
        minutes=minutes,
        qos=attached.qos,
        partition=attached.partition,
        declared_gpus=attached.declared_gpus,
        models=tuple(sorted({need.base for need in trace.needs.values()})),
        basis=made_of,
    )


def per_minute(replay: Replay) -> dict[int, int]:
    """The baseline's GPU-microseconds by the minute of the shared run in which the job came so far. Adds up."""
    out: dict[int, int] = {}
    for (start, begun), (end, done) in zip(replay.progress, replay.progress[1:], strict=False):
        given = 0
        while start < end:
            minute = start - start % MINUTE_US
            stop = min(end, minute + MINUTE_US)
            upto = (done - begun) if stop == end else given + (done - begun - given) * (stop - start) // (end - start)
            out[minute] = out.get(minute, 0) + replay.gpus * (upto - given)
            given, start = upto, stop
        if given < done - begun:  # no time passed in the shared run
            minute = start - start % MINUTE_US
            out[minute] = out.get(minute, 0) + replay.gpus * (done - begun - given)
    return out


def _newest(laid: Sequence[Segment]) -> list[Segment]:
    """At most TIMELINE segments, those that end last."""
    if len(laid) <= TIMELINE:
        return list(laid)
    since = sorted((s.end_us for s in laid), reverse=True)[TIMELINE]
    return [s for s in laid if s.end_us > since]


def for_reader(whole: Published, uid: int, accounts: Collection[str] = ()) -> Published:
    """What one user may read: own jobs and those of accounts that the user coordinates, their bars, and sums of the
    pool that name nobody."""
    jobs = [job for job in whole.jobs if job.uid == uid or job.account in accounts]
    mine = {job.job for job in jobs}
    timeline = []
    for bar in whole.timeline:
        own = tuple(share for share in bar.shares if share[0] in mine)
        if own:
            others = sum(weight for job, weight in bar.shares if job not in mine)
            timeline.append(structs.replace(bar, shares=(*own, ("", others)) if others else own))
    return structs.replace(
        whole, uid=uid, accounts=tuple(sorted(accounts)), jobs=jobs, timeline=timeline, device_bytes=None
    )
