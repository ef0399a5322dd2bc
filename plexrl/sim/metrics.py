"""What the results of simulations are judged by. Times in microseconds, GPU time in GPU-microseconds; pure functions.

Names with a source: relative completion (PlexRL, arXiv 2605.20863), finish-time fairness (Themis, NSDI '20), Jain's
index (DEC TR-301, 1984). Where a definition is ours, it says so.
"""

from collections.abc import Iterable, Sequence
from math import ceil, sqrt
from statistics import fmean, stdev

from msgspec import Struct

from plexrl.sim.nodes import gpus_of
from plexrl.sim.result import JobResult, Result
from plexrl.sim.run import alone_in
from plexrl.sim.workload import Workload
from plexrl.types import BadInput, GpuRole

HOUR_US = 3_600_000_000
# Student's t at 97.5 %, by degrees of freedom from 1; beyond 30 the normal value is 2 % off at most.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
_T += (2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086)
_T += (2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042)


class Interval(Struct, frozen=True):
    """A mean over seeds and half the width of its 95 % interval; 0 for one seed, where nothing can be said."""

    mean: float
    half: float


def interval(values: Sequence[float]) -> Interval:
    """Student's 95 % interval of the mean. Raises BadInput without values."""
    if not values:
        raise BadInput("a mean of no values", "Run at least one seed")
    if len(values) == 1:
        return Interval(values[0], 0.0)
    t = _T[len(values) - 2] if len(values) <= 31 else 1.96
    return Interval(fmean(values), t * stdev(values) / sqrt(len(values)))


def gpu_hours_per_step(result: Result) -> float:
    """GPU-hours that jobs held, per training step. A GPU that several jobs share is held once."""
    return result.held_us / HOUR_US / _steps(result)


def pool_gpu_hours_per_step(result: Result) -> float:
    """The same with all GPUs of the cluster, from 0 to the last job's end: what a pool of that size costs."""
    return result.wall_us * result.gpus / HOUR_US / _steps(result)


def relative_completion(result: Result, isolated: Result) -> float:
    """The run's wall over that of the same workload with every job on GPUs of its own: total completion time.

    Raises BadInput when they are not of the same jobs.
    """
    _same_jobs(result, isolated)
    return result.wall_us / isolated.wall_us


def duty_cycle(result: Result) -> float:
    """Busy share of the time in which a GPU belonged to at least one job, placed and not ended (ours).

    A GPU that nobody has, because the queue is empty or its head does not fit there, does not count; see `use`.
    """
    return result.classes["busy"] / result.held_us if result.held_us else 0.0


def use(result: Result) -> float:
    """Busy share of all GPU time from 0 to the last job's end."""
    return result.classes["busy"] / (result.wall_us * result.gpus)


def bubble_ratio(result: Result) -> float:
    """Share of the time in which a GPU belonged to a trainer and no trainer computed on it.

    The paper's is the "share of time not computing"; of which GPUs is not known, so this reading is ours.
    """
    return 1.0 - result.train_busy_us / result.train_held_us if result.train_held_us else 0.0


def stretches(result: Result) -> list[float]:
    """Of each job: from arrival to end, its wait for a place included, over its wall alone. Needs `compare_alone`.

    Raises BadInput where the wall alone was not computed.
    """
    return [(job.end_us - job.arrival_us) / _alone_us(job) for job in result.jobs]


def slowdowns(result: Result) -> list[float]:
    """As stretches, from placement on: what sharing costs those that share."""
    return [(job.end_us - job.placed_us) / _alone_us(job) for job in result.jobs]


def queue_waits(result: Result) -> list[int]:
    """How long each job waited for a place."""
    return [job.wait_us for job in result.jobs]


def p95(values: Sequence[float]) -> float:
    """The smallest value that at least 95 % do not exceed. Raises BadInput without values."""
    if not values:
        raise BadInput("a percentile of no values", "Let at least one job run")
    return sorted(values)[ceil(0.95 * len(values)) - 1]


def switches_per_hour(result: Result) -> float:
    """Loads of gangs in turns of their own, in the whole cluster, per hour of the run."""
    return result.switches / (result.wall_us / HOUR_US)


def jain(result: Result) -> float:
    """Jain's index over the jobs' speeds, 1 / stretch: 1 when all are slowed alike, 1/n when one has it all."""
    speeds = [1 / stretch for stretch in stretches(result)]
    return sum(speeds) ** 2 / (len(speeds) * sum(speed * speed for speed in speeds))


def finish_time_fairness(result: Result, isolated: Result) -> list[float]:
    """Themis's rho of each job: from arrival to end, over the same where every job has GPUs of its own, queue included.

    Above 1: the job would rather not share. Raises BadInput when they are not of the same jobs.
    """
    _same_jobs(result, isolated)
    there = {job.job: job.end_us - job.arrival_us for job in isolated.jobs}
    return [(job.end_us - job.arrival_us) / there[job.job] for job in result.jobs]


def correlation(result: Result, bins: int = 512) -> float | None:
    """Mean Pearson correlation of two jobs' busy series, over all pairs that are there at once; below 0: they fill each
    other's gaps (ours: equal bins of the wall, each pair over the bins in which both were placed).

    None without a timeline, or without a pair both of which vary.
    """
    if not result.timeline:
        return None
    width = result.wall_us / bins
    series: dict[str, list[float]] = {job.job: [0.0] * bins for job in result.jobs}
    for bar in result.timeline:
        if bar.kind != "busy" or bar.job not in series:
            continue
        row = series[bar.job]
        for index in range(int(bar.start_us / width), min(bins - 1, int(bar.end_us / width)) + 1):
            begin, end = max(bar.start_us, index * width), min(bar.end_us, (index + 1) * width)
            row[index] += max(0.0, end - begin)
    found = []
    for i, one in enumerate(result.jobs):
        for other in result.jobs[:i]:
            first = ceil(max(one.placed_us, other.placed_us) / width)
            last = int(min(one.end_us, other.end_us) / width)
            value = _pearson(series[one.job][first:last], series[other.job][first:last])
            if value is not None:
                found.append(value)
    return fmean(found) if found else None


def ideal_bound(k: int, sample_gpus: int, train_gpus: int) -> float:
    """The largest saving in GPU time per step when k jobs share a training pool and keep their rollout GPUs.

    (k-1)/k * T/(R+T), facts 1.9: k jobs hold kR+T GPUs instead of k(R+T), and none runs faster than alone.
    """
    return (k - 1) / k * train_gpus / (sample_gpus + train_gpus)


def lower_bound(workload: Workload) -> int:
    """A wall that no schedule of the workload can beat, not even one that knows all draws beforehand. The largest of

    - each job's arrival + its wall alone: its steps follow one another, and no call takes less time beside others;
    - for every arrival time t: t + (GPU time that the jobs arriving at t or later need at least) / GPUs: none of it can
      be done before t, and no GPU does more than one GPU-second per second;
    - the same for the trainers' work on the GPUs that may train, and for the samplers' on those that may sample.

    The least GPU time of a job: its training calls, which cannot be batched; of its rollouts, the prefill of prompts,
    each sequence's part of its decode steps, and the base cost of as many decode steps as each replica must make when
    the best fifth of the calls moves into other replicas' batches (Policy.gather_share of 0.8 or more; a call is dealt
    to a replica when it is submitted). Switches, new weights and recomputed prefixes are left out, and for jobs of one
    base the builds and the decode steps' base cost, which they may share: a smaller bound is still one. For recorded
    jobs batching is not known, so only the training counts.
    """
    founds = [(plan, alone_in(workload, plan)) for plan in workload.jobs]
    bound = max((plan.arrival_us + found.least_wall_us for plan, found in founds), default=0)
    gpus, roles, _ = gpus_of(workload.gpus)
    trains = sum(roles.get(gpu) is not GpuRole.SAMPLE for gpu in gpus)
    samples = sum(roles.get(gpu) is not GpuRole.TRAIN for gpu in gpus)
    train = sample = 0
    for plan, found in sorted(founds, key=lambda it: -it[0].arrival_us):
        train += found.least_train_us
        sample += found.least_sample_us
        work = max((train + sample) / len(gpus), train / trains if trains else 0, sample / samples if samples else 0)
        bound = max(bound, plan.arrival_us + int(work))
    return bound


def figures(result: Result, isolated: Result | None = None) -> dict[str, float | None]:
    """The figures of one run, by the names that tables and JSON use. isolated: the reference of two of them."""
    stretch, slow, waits = stretches(result), slowdowns(result), queue_waits(result)
    return {
        "gpu_hours_per_step": gpu_hours_per_step(result),
        "pool_gpu_hours_per_step": pool_gpu_hours_per_step(result),
        "relative_completion": relative_completion(result, isolated) if isolated else None,
        "duty_cycle": duty_cycle(result),
        "use": use(result),
        "bubble_ratio": bubble_ratio(result),
        "stretch_mean": fmean(stretch),
        "stretch_p95": p95(stretch),
        "slowdown_mean": fmean(slow),
        "slowdown_p95": p95(slow),
        "queue_wait_mean_s": fmean(waits) / 1e6,
        "queue_wait_p95_s": p95(waits) / 1e6,
        "switches_per_hour": switches_per_hour(result),
        "jain": jain(result),
        "finish_time_fairness": fmean(finish_time_fairness(result, isolated)) if isolated else None,
        "finish_time_fairness_worst": max(finish_time_fairness(result, isolated)) if isolated else None,
        "correlation": correlation(result),
    }


def _steps(result: Result) -> int:
    steps = sum(job.steps for job in result.jobs)
    if not steps:
        raise BadInput(f"run {result.policy} of {result.workload} made no training step", "Let at least one job run")
    return steps


def _alone_us(job: JobResult) -> int:
    if not job.alone_us:
        raise BadInput(f"the wall of job {job.job} alone was not computed", "Run with compare_alone")
    return job.alone_us


def _same_jobs(result: Result, other: Result) -> None:
    if {job.job for job in result.jobs} != {job.job for job in other.jobs}:
        raise BadInput(f"runs {result.policy} and {other.policy} are of different jobs", "Compare runs of one workload")


def _pearson(one: Sequence[float], other: Sequence[float]) -> float | None:
    """None for fewer than three pairs, or a series that does not vary."""
    if len(one) < 3:
        return None
    a, b = fmean(one), fmean(other)
    xx = sum((x - a) ** 2 for x in one)
    yy = sum((y - b) ** 2 for y in other)
    if not xx or not yy:
        return None
    return sum((x - a) * (y - b) for x, y in zip(one, other, strict=True)) / sqrt(xx * yy)


def mean_interval(rows: Iterable[dict[str, float | None]]) -> dict[str, Interval | None]:
    """Each figure over seeds; None where a seed has none."""
    columns: dict[str, list[float | None]] = {}
    for row in rows:
        for name, value in row.items():
            columns.setdefault(name, []).append(value)
    return {
        name: None if any(value is None for value in values) else interval([v for v in values if v is not None])
        for name, values in columns.items()
    }
