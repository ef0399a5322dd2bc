"""A recorded run as a workload: service and switch models fitted to it, its calls with their causal edges.

Only the edges, the think times and each call's tokens are taken from the record. How long calls take, who waits for
whom and when state moves is the simulator's.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate

from msgspec import Struct, structs

from plexrl.scheduler.costs import SWITCH_PRIOR, Observation, ServiceModel, SwitchModel
from plexrl.sim.trace import Group, Move, Recording, Request
from plexrl.sim.workload import Cluster, JobPlan, Recorded, RecordedCall, SamplePlan, TrainPlan, Workload
from plexrl.types import BadInput, CallKind, Role

_MODELLED = (CallKind.SAMPLE, CallKind.FORWARD, CallKind.FORWARD_BACKWARD, CallKind.OPTIM_STEP)


class Fit(Struct, frozen=True, kw_only=True):
    """A worker group's service model. error: mean |predicted - seen| / seen over its calls. other_us: mean time of the
    kinds of calls that the model has nothing for."""

    group: str
    calls: int
    service: ServiceModel
    error: float
    other_us: dict[str, int]

    def call_us(self, call: Request) -> int:
        """What the call takes alone on its gang."""
        match call.kind:
            case CallKind.SAMPLE:
                return round(call.units * self.service.step_us(1))
            case kind if kind in _MODELLED:
                return _predicted(self.service, Observation(kind=kind, tokens=call.units, seconds_us=0))
        return self.other_us[call.kind]


def fit(recording: Recording) -> dict[str, Fit]:
    """By group. A sample's units are taken as its decode steps: the record does not part prompts from answers."""
    by_group: dict[str, list[Request]] = defaultdict(list)
    for call in recording.calls:
        if call.served_us > 0:
            by_group[call.group].append(call)
    return {group: _fit(group, calls) for group, calls in by_group.items()}


def _fit(group: str, calls: Sequence[Request]) -> Fit:
    batches = _batches(calls)
    seen = [
        Observation(
            kind=call.kind,
            tokens=call.units,
            batch=batch if call.kind is CallKind.SAMPLE else 1,
            seconds_us=call.served_us,
        )
        for call, batch in zip(calls, batches, strict=True)
        if call.kind in _MODELLED
    ]
    service = ServiceModel.fit(seen)[0] if seen else ServiceModel()
    samples = [o.tokens for o in seen if o.kind is CallKind.SAMPLE]
    if samples and not service.step_us(1):  # calls of one length: a time per call is as good as a time per step
        each = service.call_us * len(samples) / sum(samples)
        service = structs.replace(service, decode_base_us=each, call_us=0.0)
    service = _scaled(service, seen)
    error = sum(abs(_predicted(service, o) / o.seconds_us - 1) for o in seen) / len(seen) if seen else 0.0
    others: dict[str, list[int]] = defaultdict(list)
    for call in calls:
        if call.kind not in _MODELLED:
            others[call.kind].append(call.served_us)
    means = {kind: sum(times) // len(times) for kind, times in others.items()}
    return Fit(group=group, calls=len(calls), service=service, error=error, other_us=means)


def _scaled(service: ServiceModel, seen: Sequence[Observation]) -> ServiceModel:
    """All coefficients times one factor, so that the calls take as long together as they did: least squares on relative
    errors come out low."""
    predicted = sum(_predicted(service, o) for o in seen)
    factor = sum(o.seconds_us for o in seen) / predicted if predicted else 1.0
    return ServiceModel(**{name: value * factor for name, value in structs.asdict(service).items()})


def _predicted(service: ServiceModel, o: Observation) -> int:
    match o.kind:
        case CallKind.SAMPLE:
            return service.sample_us(0, o.tokens, o.batch)
        case CallKind.FORWARD:
            return service.forward_us(o.tokens)
        case CallKind.FORWARD_BACKWARD:
            return service.train_us(o.tokens)
    return service.step_optimizer_us()


def _batches(calls: Sequence[Request]) -> list[float]:
    """How many calls of its gang ran, on average, while each call did."""
    found = dict.fromkeys((call.id for call in calls), 1.0)
    by_gang: dict[str, list[Request]] = defaultdict(list)
    for call in calls:
        by_gang[call.gang].append(call)
    for mine in by_gang.values():
        steps = Counter(call.started_us for call in mine)
        steps.subtract(Counter(call.ended_us for call in mine))
        times = sorted(steps)
        live = list(accumulate(steps[at] for at in times))
        area = [0, *accumulate(n * (b - a) for n, a, b in zip(live, times, times[1:], strict=False))]
        for call in mine:
            if call.ended_us > call.started_us:
                sum_ = area[bisect_left(times, call.ended_us)] - area[bisect_left(times, call.started_us)]
                found[call.id] = sum_ / (call.ended_us - call.started_us)
    return [found[call.id] for call in calls]


def fit_switch(recording: Recording) -> SwitchModel:
    """As the pool had learned its links: their mean over the nodes that were seen; who comes and who leaves cross.

    A trace without links: bandwidths from the copies; the overhead is what the switches took beyond them, one half
    after the other. Without copies: the prior's.
    """
    if recording.links:
        return SwitchModel(
            gbps_in=_mean([link.gbps_in for link in recording.links]) or SWITCH_PRIOR.gbps_in,
            gbps_out=_mean([link.gbps_out for link in recording.links]) or SWITCH_PRIOR.gbps_out,
            overhead_us=sum(link.overhead_us for link in recording.links) // len(recording.links),
            exchange=True,
        )
    leads = {seat.gang: seat.gpus[0] for group in recording.groups for seat in group.seats}
    seats = [seat for group in recording.groups for seat in group.seats]
    switches = sum(seat.switches for seat in seats)
    incoming = [move for move in recording.moves if move.bytes_in and move.took_us]
    outgoing = [move for move in recording.moves if move.bytes_out and move.took_us]
    copies = sum(move.took_us for move in recording.moves if leads.get(move.gang) == move.gpu)
    overhead = max(0, sum(seat.switch_us for seat in seats) - copies) // switches if switches else None
    return SwitchModel(
        gbps_in=_rate(incoming) or SWITCH_PRIOR.gbps_in,
        gbps_out=_rate(outgoing) or SWITCH_PRIOR.gbps_out,
        overhead_us=SWITCH_PRIOR.overhead_us if overhead is None else overhead,
        exchange=False,
    )


def _mean(rates: Sequence[float]) -> float:
    """Of those that were seen."""
    seen = [rate for rate in rates if rate]
    return sum(seen) / len(seen) if seen else 0.0


def _rate(moves: Sequence[Move]) -> float:
    """GB per second."""
    took = sum(move.took_us for move in moves)
    return sum(move.bytes_in + move.bytes_out for move in moves) / took / 1e3 if took else 0.0


def workload(recording: Recording, fits: dict[str, Fit] | None = None) -> Workload:
    """The recorded jobs, submitting the same calls after the same results. fits: `fit(recording)`, if it is at hand.

    A job that used several groups of one role is taken to have used the busiest. Jobs share a group where they did,
    if they shared both. Raises BadInput when no job is left.
    """
    fits = fit(recording) if fits is None else fits
    groups = {group.group: group for group in recording.groups}
    calls: dict[str, list[Request]] = defaultdict(list)
    for call in recording.calls:
        calls[call.job].append(call)
    plans = []
    for job in sorted(recording.jobs, key=lambda job: job.arrival_us):
        mine = calls[job.job]
        if not mine:
            continue
        numbers = steps(mine)
        used = {
            role: _busiest(call.group for call in mine if groups[call.group].role is role)
            for role in (Role.TRAIN, Role.SAMPLE)
        }
        train, sample = (groups.get(used[role]) for role in (Role.TRAIN, Role.SAMPLE))
        shared = train is not None and train.shared and (sample is None or sample.shared)
        plans.append(
            JobPlan(
                job=job.job,
                account=job.account,
                user=job.user,
                arrival_us=job.arrival_us,
                steps=numbers[-1] + 1,
                reward_us=0,
                model=(train or sample).base,
                base=f"{used[Role.TRAIN]} {used[Role.SAMPLE]}" if shared else "",
                train=_train(train, fits),
                sample=_sample(sample, fits),
                recorded=_recorded(mine, numbers, groups, fits),
            )
        )
    if not plans:
        raise BadInput("the trace has no job with a call", "Export it when a job has done something")
    cluster = _cluster(recording)
    return Workload(
        name=recording.header.pool or "trace", gpus=cluster, jobs=tuple(plans), switch=fit_switch(recording)
    )


def _busiest(groups: Iterable[str]) -> str:
    most = Counter(groups).most_common(1)
    return most[0][0] if most else ""


def _train(group: Group | None, fits: dict[str, Fit]) -> TrainPlan:
    if group is None:  # a job that only samples: a trainer that weighs nothing and is never called
        return TrainPlan(gpus=1, device_bytes=1, residual_bytes=0, build_us=0, service=ServiceModel())
    return TrainPlan(
        gpus=len(group.seats[0].gpus),
        device_bytes=group.device_bytes,
        host_bytes=group.host_bytes,
        residual_bytes=group.residual_bytes,
        build_us=max(seat.build_us for seat in group.seats),
        service=fits[group.group].service if group.group in fits else ServiceModel(),
    )


def _sample(group: Group | None, fits: dict[str, Fit]) -> SamplePlan:
    if group is None:
        return SamplePlan(replicas=1, gpus=1, device_bytes=1, residual_bytes=0, build_us=0, service=ServiceModel())
    return SamplePlan(
        replicas=len(group.seats),
        gpus=len(group.seats[0].gpus),
        device_bytes=group.device_bytes,
        host_bytes=group.host_bytes,
        residual_bytes=group.residual_bytes,
        build_us=max(seat.build_us for seat in group.seats),
        service=fits[group.group].service if group.group in fits else ServiceModel(),
    )


def steps(calls: Sequence[Request]) -> list[int]:
    """The training step of each call, from 0. A step ends with its publication; in jobs that publish at most once, with
    its optim_step."""
    ends = CallKind.PUBLISH if sum(call.kind is CallKind.PUBLISH for call in calls) > 1 else CallKind.OPTIM_STEP
    before = [0, *accumulate(int(call.kind is ends) for call in calls)]
    return before[:-1]


def _recorded(
    calls: Sequence[Request], numbers: Sequence[int], groups: dict[str, Group], fits: dict[str, Fit]
) -> Recorded:
    delivered = sorted((call.delivered_us, index) for index, call in enumerate(calls) if call.delivered_us is not None)
    return Recorded(
        calls=tuple(
            RecordedCall(
                kind=call.kind,
                role=groups[call.group].role,
                seen=call.seen,
                think_us=call.think_us,
                service_us=fits[call.group].call_us(call) if call.served_us else 0,
                units=call.units,
                step=number,
            )
            for call, number in zip(calls, numbers, strict=True)
        ),
        delivered=tuple(index for _, index in delivered),
    )


def _cluster(recording: Recording) -> Cluster:
    header = recording.header
    nodes = Counter(gpu.rpartition(":")[0] for gpu in header.gpus)
    held: Counter[str] = Counter()
    for group in recording.groups:
        for seat in group.seats:
            for gpu in seat.gpus:
                held[gpu] += group.device_bytes + group.residual_bytes
    return Cluster(
        nodes=len(nodes),
        per_node=max(nodes.values()),
        bytes=header.gpu_bytes or max(held.values()),
        host_bytes=header.host_bytes,
    )
