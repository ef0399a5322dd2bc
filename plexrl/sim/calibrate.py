"""A recorded run simulated again, under its own policy, and held against the record, job by job."""

from collections.abc import Sequence

import msgspec
from msgspec import Struct

from plexrl.scheduler.costs import SwitchModel
from plexrl.scheduler.policy import Policy
from plexrl.sim.fitted import Fit, fit, steps, workload
from plexrl.sim.run import run
from plexrl.sim.trace import Recording, Request
from plexrl.types import BadInput


def policy(recording: Recording) -> Policy:
    """The recorded one; without one, the default. Raises BadInput for one that does not exist any more."""
    try:
        return msgspec.convert(recording.header.policy, Policy)
    except msgspec.ValidationError as error:
        raise BadInput(f"the trace's policy: {error}", "Simulate it under another one") from error


class Row(Struct, frozen=True, kw_only=True):
    """A job, recorded against predicted. step_s: mean time of a step, seconds. wall_s: from its first request to its
    last result. busy: its share of the cluster's GPU time in that while. *_error: (predicted - recorded) / recorded."""

    job: str
    user: str
    steps: int
    calls: int
    step_s: float
    predicted_step_s: float
    step_error: float
    wall_s: float
    predicted_wall_s: float
    wall_error: float
    busy: float
    predicted_busy: float
    busy_error: float


class Calibration(Struct, frozen=True, kw_only=True):
    """rows: per job. fits: per group. switch: fitted. error: mean |step_error|."""

    rows: tuple[Row, ...]
    fits: tuple[Fit, ...]
    switch: SwitchModel
    error: float
    busy_error: float


def calibrate(recording: Recording) -> Calibration:
    """Simulate the recorded jobs under the recorded policy. Raises BadInput for a trace without jobs or policy."""
    fits = fit(recording)
    given = workload(recording, fits)
    result = run(given, policy(recording), compare_alone=False, virtual=recording.header.virtual)
    gpus = len(recording.header.gpus)
    jobs = {job.job: job for job in recording.jobs}
    found = {job.job: job for job in result.jobs}
    rows = []
    for plan in given.jobs:
        if plan.job not in found:
            raise BadInput(
                f"job {plan.job} found no place: {result.jobs_refused[plan.job]}", "Check the trace's header"
            )
        job, sim = jobs[plan.job], found[plan.job]
        mine = [call for call in recording.calls if call.job == plan.job]
        seen = _step_times(mine, steps(mine))
        told = [step.end_us - step.start_us for step in result.steps if step.job == plan.job]
        wall, predicted = job.ended_us - job.arrival_us, sim.end_us - sim.arrival_us
        rows.append(
            Row(
                job=plan.job,
                user=plan.user,
                steps=len(seen),
                calls=len(mine),
                step_s=_mean(seen) / 1e6,
                predicted_step_s=_mean(told) / 1e6,
                step_error=_off(_mean(told), _mean(seen)),
                wall_s=wall / 1e6,
                predicted_wall_s=predicted / 1e6,
                wall_error=_off(predicted, wall),
                busy=job.busy_us / (gpus * wall),
                predicted_busy=sim.busy_us / (gpus * predicted),
                busy_error=_off(sim.busy_us / predicted, job.busy_us / wall),
            )
        )
    return Calibration(
        rows=tuple(rows),
        fits=tuple(fits.values()),
        switch=given.switch,
        error=_mean([abs(row.step_error) for row in rows]),
        busy_error=_mean([abs(row.busy_error) for row in rows]),
    )


def _step_times(calls: Sequence[Request], numbers: Sequence[int]) -> list[int]:
    """From the first submission in each step to the last end."""
    spans: dict[int, tuple[int, int]] = {}
    for call, number in zip(calls, numbers, strict=True):
        start, end = spans.get(number, (call.accepted_us, call.ended_us))
        spans[number] = start, max(end, call.ended_us)
    return [end - start for start, end in spans.values()]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _off(predicted: float, seen: float) -> float:
    return predicted / seen - 1 if seen else 0.0
