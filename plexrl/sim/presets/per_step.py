"""GPU time per training step of jobs that share, beside the same steps without sharing.

Measured from the first arrival until the first job has made all its steps; a step that is under way then counts by its
share of time. As no job runs faster beside others than alone, the saving cannot exceed the bound 1 - N/(k G), N the
GPUs of k jobs that share and G those of one alone (ours; facts 1.9 have it for a shared training pool).
"""

from bisect import bisect_right
from statistics import fmean

from msgspec import Struct

from plexrl.sim.result import Result


class Layout(Struct, frozen=True):
    """GPUs of a run and who holds them. shared: by all jobs; private: by each job from its arrival on."""

    shared: int
    private: int

    def held(self, k: int) -> int:
        """GPUs that k jobs hold together."""
        return self.shared + k * self.private


class Ends:
    """When each job of a run had made its steps, from its own arrival on. runs: several if each job ran apart."""

    def __init__(self, *runs: Result) -> None:
        self._arrivals = {job.job: job.arrival_us for run in runs for job in run.jobs}
        self.ends: dict[str, list[int]] = {name: [0] for name in self._arrivals}
        for span in sorted((span for run in runs for span in run.steps), key=lambda span: (span.job, span.step)):
            self.ends[span.job].append(span.end_us - self._arrivals[span.job])
        self.until_us = min(self._arrivals[name] + ends[-1] for name, ends in self.ends.items())

    def present(self, job: str) -> int:
        """From a job's arrival until the first of all jobs had made its steps, in microseconds."""
        return self.until_us - self._arrivals[job]

    def made(self) -> dict[str, float]:
        """Steps of each job until then; the one under way by its share of time."""
        done = {}
        for name, ends in self.ends.items():
            at, after = self.present(name), bisect_right(ends, self.present(name))
            under_way = 0.0 if after == len(ends) else (at - ends[after - 1]) / (ends[after] - ends[after - 1])
            done[name] = after - 1 + under_way
        return done

    def took(self, job: str, steps: float) -> float:
        """Microseconds from the job's arrival until it had made so many steps."""
        ends, whole = self.ends[job], int(steps)
        if whole + 1 >= len(ends):
            return ends[-1]
        return ends[whole] + (steps - whole) * (ends[whole + 1] - ends[whole])


def spent(ends: Ends, layout: Layout) -> float:
    """GPU-microseconds that the layout held until the first job had made its steps."""
    return layout.shared * ends.until_us + layout.private * sum(ends.present(job) for job in ends.ends)


def saving(ends: Ends, layout: Layout, baseline: Ends, gpus: int) -> float:
    """1 - (GPU time of the layout) / (GPU time of the baseline, with so many GPUs per job, for the same steps)."""
    alone = sum(gpus * baseline.took(job, steps) for job, steps in ends.made().items())
    return 1.0 - spent(ends, layout) / alone


def stretch(ends: Ends, baseline: Ends) -> float:
    """How much longer the jobs took than in the baseline for the same steps, mean over jobs."""
    return fmean(ends.present(job) / baseline.took(job, steps) for job, steps in ends.made().items())
