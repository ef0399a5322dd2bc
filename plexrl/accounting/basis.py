"""What a job's baselines were made of, in few enough numbers to be published beside them; and how sure they are.

Four words say how sure, and figures of different words are never added without saying so:

- measured: the job was run both ways (`python -m bench.counterfactual`);
- replayed: its recorded calls through a fitted service model that predicts them well;
- estimated: the same, where the model predicts them badly or the cores were contended while it was recorded;
- declared: what somebody asked for, without proof.
"""

from collections.abc import Iterable, Mapping

from msgspec import Struct, structs

from plexrl.accounting.fit import Fit
from plexrl.accounting.replay import Leg, Replay
from plexrl.accounting.trace import Trace
from plexrl.types import Role

MEASURED, REPLAYED, ESTIMATED, DECLARED = "measured", "replayed", "estimated", "declared"
CONFIDENCES = (MEASURED, REPLAYED, ESTIMATED, DECLARED)
FIT_ERROR = 0.25  # ours: with a mean error per call above it a baseline is an estimate
CONTENTION = 1.25  # ours: pretend GPUs that worked longer than they computed by more than this were contended


class Group(Struct, frozen=True):
    """A worker group as a dedicated run would hold it. error: of its model; contention: worked over computed, None on
    real GPUs. service: the coefficients that are not 0, microseconds."""

    group: str
    role: Role
    base: str
    gang_size: int
    gangs: int
    build_us: int
    switch_us: int
    device_bytes: int
    calls: int
    error: float | None
    contention: float | None
    service: dict[str, float]


class Legs(Struct, frozen=True):
    """Sums over the chain of calls that a wall time consists of; with tail_us they are the wall time."""

    calls: int = 0
    think_us: int = 0
    wait_us: int = 0
    build_us: int = 0
    move_us: int = 0
    run_us: dict[str, int] = {}
    tail_us: int = 0


class Basis(Struct, frozen=True):
    """confidence: of the baselines, one of CONFIDENCES. error: mean of its groups' models, by calls."""

    confidence: str = ESTIMATED
    error: float | None = None
    groups: tuple[Group, ...] = ()
    colocated: Legs = Legs()
    split: Legs = Legs()
    split_wall_us: int = 0


def basis(trace: Trace, together: Replay, apart: Replay, models: Mapping[str, Fit], pretend: bool) -> Basis:
    """Out of a job's trace and its two replays. pretend: the GPUs are cores."""
    groups = tuple(_group(trace, name, models.get(name), pretend) for name in trace.needs)
    told = [group for group in groups if group.error is not None]
    calls = sum(group.calls for group in told)
    error = sum(group.error * group.calls for group in told) / calls if calls else None
    contended = any((group.contention or 0.0) > CONTENTION for group in told)
    sure = error is not None and error <= FIT_ERROR and not contended
    return Basis(
        confidence=REPLAYED if sure else ESTIMATED,
        error=error,
        groups=groups,
        colocated=added(together.legs),
        split=added(apart.legs),
        split_wall_us=apart.wall_us,
    )


def _group(trace: Trace, name: str, fit: Fit | None, pretend: bool) -> Group:
    need = trace.needs[name]
    known = fit is not None and fit.observed > 0
    return Group(
        group=name,
        role=need.role,
        base=need.base,
        gang_size=need.gang_size,
        gangs=need.gangs,
        build_us=need.build_us,
        switch_us=need.switch_us,
        device_bytes=need.device_bytes,
        calls=sum(1 for step in trace.steps if step.group == name and step.kind is not None),
        error=fit.error if known else None,
        contention=fit.served_us / fit.cpu_us if known and pretend and fit.cpu_us else None,
        service={key: value for key, value in structs.asdict(fit.service).items() if value} if known else {},
    )


def added(legs: Iterable[Leg]) -> Legs:
    """The sums of a chain."""
    legs = list(legs)
    run: dict[str, int] = {}
    for leg in legs:
        if leg.call:
            run[leg.kind] = run.get(leg.kind, 0) + leg.run_us
    calls = [leg for leg in legs if leg.call]
    return Legs(
        calls=len(calls),
        think_us=sum(leg.think_us for leg in calls),
        wait_us=sum(leg.wait_us for leg in calls),
        build_us=sum(leg.build_us for leg in calls),
        move_us=sum(leg.move_us for leg in calls),
        run_us=run,
        tail_us=sum(leg.think_us for leg in legs if not leg.call),
    )
