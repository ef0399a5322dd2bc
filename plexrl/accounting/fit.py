"""How long calls take alone on their gang, fitted to what was recorded: `scheduler.costs`' model, by worker group.

Seconds are those that the gang worked on the call, without what it moved for it and without the time in which others
had the GPUs. Training calls are observed one by one. Samples overlap, and each one's time depends on the others: what
is observed there is a *burst*, from the first sample under way to the last, with all the work in it.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from msgspec import Struct, structs

from plexrl.accounting.busy import Busy
from plexrl.accounting.trace import worked
from plexrl.scheduler.costs import Observation, ServiceModel
from plexrl.types import Call, CallKind
from plexrl.types import records as r

MODELLED = (CallKind.SAMPLE, CallKind.FORWARD, CallKind.FORWARD_BACKWARD, CallKind.OPTIM_STEP)


class Fit(Struct, frozen=True, kw_only=True):
    """A worker group's service model. observed: calls or bursts. error: mean |predicted - seen| / seen over them.

    other_us: mean time of the kinds of calls that the model has nothing for. served_us, cpu_us: of what was observed,
    how long gangs worked and the busiest process computed; on pretend GPUs the ratio tells how contended cores were.
    """

    group: str
    calls: int
    observed: int
    service: ServiceModel
    error: float
    other_us: dict[str, int] = {}
    served_us: int = 0
    cpu_us: int = 0

    def call_us(self, kind: CallKind, tokens: int) -> int:
        """What a call other than a sample takes alone on its gang."""
        match kind:
            case CallKind.FORWARD:
                return self.service.forward_us(tokens)
            case CallKind.FORWARD_BACKWARD:
                return self.service.train_us(tokens)
            case CallKind.OPTIM_STEP:
                return self.service.step_optimizer_us()
        return self.other_us.get(kind, 0)


class Done(Struct, frozen=True):
    """A call that ran: [start_us, end_us) on its gang, of which served_us were work on it."""

    call: Call
    gang: str
    tokens: int
    start_us: int
    end_us: int
    served_us: int
    cpu_us: int


def done(records: Sequence[r.Record], busy: Busy) -> list[Done]:
    """Every call that ended well on a gang. tokens: drawn, of a sample; else worked on."""
    accepted = {record.call.id: record.call for record in records if isinstance(record, r.CallAccepted)}
    found = []
    for end in records:
        if isinstance(end, r.CallEnded) and end.ok and end.gang and end.id in accepted:
            call = accepted[end.id]
            start = end.now_us - end.wall_us
            served = busy.served(end.gang, start, end.now_us) or end.wall_us
            tokens = worked(call.kind, end.units or call.units, call.prompt_tokens, call.sequences)
            found.append(Done(call, end.gang, tokens, start, end.now_us, max(0, served - end.moved_us), end.cpu_us))
    return found


def fits(records: Sequence[r.Record], busy: Busy, pretend: bool = False) -> dict[str, Fit]:
    """By worker group, of those that worked. pretend: GPUs are cores, and CPU seconds tell how contended these were."""
    by_group: dict[str, list[Done]] = defaultdict(list)
    for each in done(records, busy):
        by_group[each.call.group].append(each)
    return {group: _fit(group, mine, busy, pretend) for group, mine in by_group.items()}


def _fit(group: str, mine: Sequence[Done], busy: Busy, pretend: bool) -> Fit:
    told = list(_bursts([each for each in mine if each.call.kind is CallKind.SAMPLE], busy))
    others: dict[str, list[int]] = defaultdict(list)
    for each in mine:
        if each.call.kind in MODELLED and each.call.kind is not CallKind.SAMPLE:
            one = Observation(kind=each.call.kind, tokens=each.tokens, seconds_us=each.served_us)
            told.append((one, each.cpu_us))
        elif each.call.kind not in MODELLED:
            others[each.call.kind].append(each.served_us)
    told = [(one, cpu_us) for one, cpu_us in told if one.seconds_us > 0]
    seen = _uncontended(told) if pretend else [one for one, _ in told]
    service = _scaled(ServiceModel.fit(seen)[0], seen) if seen else ServiceModel()
    return Fit(
        group=group,
        calls=len(mine),
        observed=len(seen),
        service=service,
        error=sum(abs(_predicted(service, one) / one.seconds_us - 1) for one in seen) / len(seen) if seen else 0.0,
        other_us={kind: sum(times) // len(times) for kind, times in others.items()},
        served_us=sum(one.seconds_us for one, _ in told),
        cpu_us=sum(cpu_us for _, cpu_us in told),
    )


def _uncontended(told: Sequence[tuple[Observation, int]]) -> list[Observation]:
    """On cores that somebody else uses too, work takes longer than it would alone, and a baseline made of it would grow
    with the contention. So nothing counts for longer than its CPU seconds times what the group's least contended tenth
    took for one of them."""
    ratios = sorted(one.seconds_us / cpu_us for one, cpu_us in told if cpu_us)
    if not ratios:
        return [one for one, _ in told]
    least = max(1.0, ratios[(len(ratios) - 1) // 10])
    return [
        structs.replace(one, seconds_us=min(one.seconds_us, round(least * cpu_us))) if cpu_us else one
        for one, cpu_us in told
    ]


def _bursts(samples: Sequence[Done], busy: Busy) -> Iterable[tuple[Observation, int]]:
    """Per gang and stretch of time without a gap: all prompts, the decode steps, how many sequences a step had; and the
    CPU time, microseconds."""
    by_gang: dict[str, list[Done]] = defaultdict(list)
    for each in samples:
        by_gang[each.gang].append(each)
    for gang, mine in by_gang.items():
        burst: list[Done] = []
        upto = 0
        for each in sorted(mine, key=lambda each: each.start_us):
            if burst and each.start_us >= upto:
                yield _burst(gang, burst, busy)
                burst = []
            burst.append(each)
            upto = max(upto, each.end_us) if len(burst) > 1 else each.end_us
        yield _burst(gang, burst, busy)


def _burst(gang: str, burst: Sequence[Done], busy: Busy) -> tuple[Observation, int]:
    start, end = burst[0].start_us, max(each.end_us for each in burst)
    drawn = sum(each.tokens for each in burst)
    lengths = [each.tokens / max(1, each.call.sequences) for each in burst]
    # Sequence-microseconds over microseconds: how many sequences were under way, on average.
    batch = sum((each.end_us - each.start_us) * each.call.sequences for each in burst) / max(1, end - start)
    steps = max(max(lengths), drawn / max(1.0, batch))
    moved = sum(max(0, busy.served(gang, each.start_us, each.end_us) - each.served_us) for each in burst)
    observed = Observation(
        kind=CallKind.SAMPLE,
        prompt_tokens=sum(each.call.prompt_tokens for each in burst),
        tokens=round(steps),
        batch=drawn / steps,
        seconds_us=max(0, (busy.served(gang, start, end) or end - start) - moved),
    )
    return observed, sum(each.cpu_us for each in burst)


def _scaled(service: ServiceModel, seen: Sequence[Observation]) -> ServiceModel:
    """All coefficients times one factor, so that the calls take as long together as they did: least squares on relative
    errors come out low."""
    predicted = sum(_predicted(service, one) for one in seen)
    factor = sum(one.seconds_us for one in seen) / predicted if predicted else 1.0
    return ServiceModel(**{name: value * factor for name, value in structs.asdict(service).items()})


def _predicted(service: ServiceModel, one: Observation) -> int:
    match one.kind:
        case CallKind.SAMPLE:
            return service.sample_us(one.prompt_tokens, one.tokens, one.batch)
        case CallKind.FORWARD:
            return service.forward_us(one.tokens)
        case CallKind.FORWARD_BACKWARD:
            return service.train_us(one.tokens)
    return service.step_optimizer_us()
