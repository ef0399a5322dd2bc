"""A pool's ledger as a trace that the simulator reads: jobs, groups, switches, calls with their causal edges."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from msgspec import structs

from plexrl.accounting.busy import Busy
from plexrl.accounting.trace import Trace, traces
from plexrl.scheduler.bandwidth import Link
from plexrl.sim import trace as t
from plexrl.types import BadInput, Call, SpanClass
from plexrl.types import records as r


def export(
    records: Sequence[r.Record],
    *,
    user: str | None = None,
    policy: Mapping[str, object] | None = None,
    gpu_bytes: int = 0,
    host_bytes: int = 0,
    links: Mapping[str, Link] | None = None,
) -> t.Recording:
    """The ledger's records as a trace. links: of nodes, as the pool has learned them. user: only this user's jobs,
    their calls and groups; the classes are the pool's. Calls that never ran (refused, cancelled in the queue) and those
    of jobs that never attached are left out. Raises BadInput when nothing is left.
    """
    epochs = [record for record in records if isinstance(record, r.EpochStarted)]
    if not epochs:
        raise BadInput("the ledger has no epoch", "Start the pool first")
    until = max(record.now_us for record in records)
    jobs = {
        name: trace
        for name, trace in traces(records, until).items()
        if trace.steps and user in (None, trace.attached.user, str(trace.attached.uid))
    }
    spans = _Spans(records)
    accepted = {record.call.id: record.call for record in records if isinstance(record, r.CallAccepted)}
    ended = {record.id: record for record in records if isinstance(record, r.CallEnded) and record.gang}
    calls = [call for trace in jobs.values() for call in _calls(trace, accepted, ended, spans)]
    if not calls:
        whose = f" of user {user}" if user else ""
        raise BadInput(f"the ledger has no call{whose} that ran", "Let a job of the pool finish a call")
    zero = min(trace.steps[0].accepted_us for trace in jobs.values())
    calls.sort(key=lambda call: call.accepted_us)
    used = {call.group for call in calls}
    placed = {x.spec.group: x for x in records if isinstance(x, r.GroupPlaced)}
    groups = [group for name, group in placed.items() if name in used]
    return t.Recording(
        header=t.Header(
            version=t.VERSION,
            pool=epochs[-1].pool,
            from_us=zero,
            until_us=until - zero,
            gpus=tuple(dict.fromkeys(gpu for epoch in epochs for gpu in epoch.gpus)),
            gpu_bytes=gpu_bytes,
            host_bytes=host_bytes,
            policy=dict(policy or {}),
            virtual=any(
                extent.offset is None for group in groups for gang in group.placement.gangs for extent in gang.extents
            ),
            classes={str(kind): us for kind, us in sorted(spans.classes.items())},
        ),
        jobs=[_job(trace, spans, zero) for trace in jobs.values()],
        groups=[_group(group, spans) for group in groups],
        links=[_link(node, link) for node, link in sorted((links or {}).items())],
        moves=[_move(move, zero) for move in spans.moves if move.gang.rpartition("/")[0] in used],
        calls=[_shifted(call, zero) for call in calls],
    )


class _Spans(Busy):
    """The closed spans, by class, by job, by gang."""

    def __init__(self, records: Sequence[r.Record]) -> None:
        super().__init__(records)
        self.classes: dict[SpanClass, int] = defaultdict(int)
        self.charged: dict[tuple[str, SpanClass], int] = defaultdict(int)
        self.moves = [record for record in records if isinstance(record, r.Switched)]
        for record in records:
            if isinstance(record, r.SpanClosed):
                span = record.span
                us = span.end_us - span.start_us
                self.classes[span.kind] += us
                weights = sum(weight for _, weight in span.shares)
                for job, weight in span.shares:
                    self.charged[job, span.kind] += us * weight // weights if weights else 0

    def seat(self, gang: str, gpus: tuple[str, ...]) -> t.Seat:
        """A gang's switches: the first is its build."""
        build, *later = [end - start for start, end in self.switch[gang]] or [0]
        return t.Seat(gang=gang, gpus=gpus, build_us=build, switches=len(later), switch_us=sum(later))


def _calls(
    trace: Trace, accepted: Mapping[str, Call], ended: Mapping[str, r.CallEnded], spans: _Spans
) -> list[t.Request]:
    """In the order of submission, times as in the ledger. Results of steps that are left out count for nobody."""
    kept = [step for step in trace.steps if step.id in accepted and step.id in ended]
    names = {step.id for step in kept}
    given, before = {}, [0]  # before[n]: how many of the first n results are those of kept calls
    last: list[str] = [""]  # last[n]: the last of them
    for at, id in trace.delivered:
        if id in names:
            given[id] = at
        before.append(before[-1] + (id in names))
        last.append(id if id in names else last[-1])
    calls = []
    for step in kept:
        call, end = accepted[step.id], ended[step.id]
        start = max(step.accepted_us, end.now_us - end.wall_us)
        calls.append(
            t.Request(
                id=call.id,
                job=call.job,
                group=call.group,
                deployment=call.deployment,
                kind=call.kind,
                seq=call.seq,
                accepted_us=step.accepted_us,
                started_us=start,
                ended_us=end.now_us,
                served_us=min(spans.served(end.gang, start, end.now_us), end.now_us - start),
                delivered_us=given.get(call.id),
                units=max(1, end.units or call.units),
                cpu_us=end.cpu_us,
                gang=end.gang,
                seen=before[step.seen],
                think_us=step.think_us,
                after=last[step.seen],
            )
        )
    return calls


def _shifted(call: t.Request, zero: int) -> t.Request:
    times = {name: getattr(call, name) - zero for name in ("accepted_us", "started_us", "ended_us")}
    given = None if call.delivered_us is None else call.delivered_us - zero
    return structs.replace(call, **times, delivered_us=given)


def _job(trace: Trace, spans: _Spans, zero: int) -> t.Job:
    charged = {name: spans.charged[trace.job, SpanClass(name)] for name in ("busy", "switch", "kept")}
    last = max([at for at, _ in trace.delivered], default=trace.ended_us)
    return t.Job(
        job=trace.job,
        account=trace.attached.account,
        user=trace.attached.user,
        arrival_us=trace.steps[0].accepted_us - zero,
        ended_us=last - zero,
        busy_us=charged["busy"],
        switch_us=charged["switch"],
        kept_us=charged["kept"],
    )


def _group(placed: r.GroupPlaced, spans: _Spans) -> t.Group:
    gangs = {gang.id for gang in placed.placement.gangs}
    moved = [m.moved for m in spans.moves if m.gang in gangs]
    state = max((m.bytes_in + m.bytes_out + m.bytes_clean for m in moved), default=0)
    return t.Group(
        group=placed.spec.group,
        role=placed.spec.role,
        base=placed.base,
        shared=placed.kind == "lora",
        device_bytes=placed.spec.device_bytes,
        host_bytes=placed.spec.host_bytes or state,
        residual_bytes=placed.spec.residual_bytes,
        seats=tuple(spans.seat(gang.id, gang.gpus) for gang in placed.placement.gangs),
    )


def _link(node: str, link: Link) -> t.Link:
    return t.Link(
        node=node,
        gbps_in=link.gbps_in,
        gbps_out=link.gbps_out,
        gbps_refill=link.gbps_refill,
        gbps_spill=link.gbps_spill,
        overhead_us=link.overhead_us,
    )


def _move(record: r.Switched, zero: int) -> t.Move:
    moved = record.moved
    return t.Move(
        gang=record.gang,
        gpu=record.gpu,
        at_us=record.now_us - zero,
        incoming=record.incoming,
        bytes_in=moved.bytes_in,
        bytes_out=moved.bytes_out,
        bytes_clean=moved.bytes_clean,
        took_us=round(moved.seconds * 1e6),
        waited_us=round(moved.waited_s * 1e6),
    )
