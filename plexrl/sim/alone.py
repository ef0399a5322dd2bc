"""A job alone on GPUs of its own, trainer and sampler apart: in closed form, without a scheduler or a clock.

The same draws and the same service times as in a simulated cluster, so that the ratio of the two walls is what sharing
costs. A test holds it against the simulator. Jobs with tools and recorded jobs have no closed form: `run.alone_in`.
"""

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from heapq import heappop, heappush
from itertools import pairwise
from math import ceil

from msgspec import Struct, structs

from plexrl.scheduler.costs import ServiceModel, SwitchModel
from plexrl.sim.draws import draw
from plexrl.sim.engine import ADAPTER_SHARE
from plexrl.sim.program import GAP_US
from plexrl.sim.workload import JobPlan, SampleWork, StepWork

STAYS = 0.8  # of a rollout's calls end where they began, at least: Policy.gather_share allows the others to move


class Alone(Struct, frozen=True):
    """wall_us: from placement to the end, builds included. train_us: the trainer's busy time; sample_us: the replicas',
    added up. least_wall_us, least_train_us, least_sample_us: what no schedule can do without, wall from arrival on and
    GPU time of trainer and sampler; see `metrics.lower_bound`.
    """

    wall_us: int
    train_us: int
    sample_us: int
    replicas: int
    least_wall_us: int
    least_train_us: int
    least_sample_us: int

    @property
    def train_duty(self) -> float:
        """Share of its time that the trainer is busy."""
        return self.train_us / self.wall_us

    @property
    def sample_duty(self) -> float:
        """Share of its time that a replica is busy, on average."""
        return self.sample_us / self.replicas / self.wall_us


class _Step(Struct):
    """One step's phases, in microseconds."""

    rollout: float
    reward: int
    training: int


def alone(plan: JobPlan, seed: int, switch: SwitchModel) -> Alone:
    """A job without tools, drawn, alone; computed once for all policies."""
    return _alone(anonymous(plan), seed, switch)


def anonymous(plan: JobPlan) -> JobPlan:
    """The plan without what changes nothing when it runs alone: whose it is, and when it comes."""
    return structs.replace(plan, arrival_us=0, account="", user="")


@lru_cache(20_000)
def _alone(plan: JobPlan, seed: int, switch: SwitchModel) -> Alone:
    built = max(plan.train.build_us, plan.sample.build_us)
    state = plan.sample.host_bytes or plan.sample.device_bytes
    refresh_us = switch.in_us(int(state * ADAPTER_SHARE) if plan.base else state)
    steps, sampling, least = [], 0.0, 0.0
    for step in range(plan.steps):
        work = draw(plan, step, seed)
        shares = deal(plan, work)
        busy = [replica_us(plan.sample.service, share) for share in shares]
        steps.append(_Step(max(busy), work.reward_us, training_us(plan, work)))
        sampling += sum(busy)
        least += least_us(plan, work, shares)
    wall, refreshes = _walk(steps, plan.lag, built, refresh_us)
    # Jobs of a base may find its engines built; a load for another reason may bring the new weights.
    least_wall, _ = _walk(steps, plan.lag, 0 if plan.base else built, 0)
    trained = sum(step.training for step in steps)
    return Alone(
        wall_us=round(wall),
        train_us=trained,
        sample_us=round(sampling + refreshes * refresh_us * min(plan.sample.replicas, len(shares))),
        replicas=plan.sample.replicas,
        least_wall_us=int(least_wall),
        least_train_us=trained * plan.train.gpus,
        least_sample_us=int(least * plan.sample.gpus),
    )


def _walk(steps: Sequence[_Step], lag: int, begin: float, refresh_us: int) -> tuple[float, int]:
    """The end of the last step, and how many rollouts took new weights in first."""
    published: list[float] = []
    rolled, version, refreshes = begin, 0, 0
    for number, step in enumerate(steps):
        if number:
            rolled += GAP_US
        if number > lag:
            rolled = max(rolled, published[number - lag - 1] + GAP_US)
        newest = bisect_right(published, rolled)
        refreshes += newest != version
        rolled += step.rollout + (refresh_us if newest != version else 0)
        version = newest
        learn = rolled + step.reward
        if published:
            learn = max(learn, published[-1] + GAP_US)
        published.append(learn + step.training + GAP_US)
    return published[-1], refreshes


def least_wall_us(plan: JobPlan, works: Sequence[StepWork]) -> float:
    """The wall of a job with tools that no schedule can beat: as if each call had a replica to itself."""
    service, steps = plan.sample.service, []
    for work in works:
        longest = max(
            service.sample_us(call.prompt_tokens, call.tokens, call.sequences) + call.stall_us for call in work.samples
        )
        steps.append(_Step(longest, work.reward_us, training_us(plan, work)))
    built = 0 if plan.base else max(plan.train.build_us, plan.sample.build_us)
    return _walk(steps, plan.lag, built, 0)[0]


def training_us(plan: JobPlan, work: StepWork) -> int:
    """A step's training calls, one after the other."""
    train, total = plan.train, work.train_tokens
    ends = [total * i // train.calls for i in range(train.calls + 1)]
    passes = sum(train.service.train_us(end - begin) for begin, end in pairwise(ends))
    return passes + train.service.step_optimizer_us() + train.publish_us


def deal(plan: JobPlan, work: StepWork) -> list[list[SampleWork]]:
    """The calls of a rollout on its replicas: each to the one with the fewest outstanding sequences, as the scheduler
    does when all are submitted at once. Replicas that get none are left out."""
    shares: list[list[SampleWork]] = [[] for _ in range(plan.sample.replicas)]
    mean = plan.rollout.lengths.mean_tokens
    units = [(0, i) for i in range(plan.sample.replicas)]
    for call in work.samples:
        given, i = units[0]
        shares[i].append(call)
        heappop(units)
        heappush(units, (given + max(1, int(mean * call.sequences)), i))
    return [share for share in shares if share]


def replica_us(service: ServiceModel, calls: Sequence[SampleWork]) -> float:
    """From submission of these calls to one replica until the last has ended: all decode together, each to its end."""
    prompts = sum(call.prompt_tokens for call in calls)
    now = service.call_us * len(calls) + service.prefill_us_per_token * prompts
    batch, position = sum(call.sequences for call in calls), 0
    for call in sorted(calls, key=lambda call: call.tokens):
        now += (call.tokens - position) * service.step_us(batch)
        position = call.tokens
        batch -= call.sequences
    return now


def least_us(plan: JobPlan, work: StepWork, shares: Sequence[Sequence[SampleWork]]) -> float:
    """Time of one replica that no schedule of this rollout can do without. shares: its calls by replica.

    Prefill and each sequence's part of its decode steps, and the base of each replica's decode steps: as many as the
    longest call that stays there, or as the longest of all on one replica. Calls of other jobs of a base could be in
    the same batch, so then no base is counted.
    """
    service = plan.sample.service
    sequences = sum(call.tokens * call.sequences for call in work.samples)
    prompts = sum(call.prompt_tokens for call in work.samples)
    each = service.decode_us_per_sequence * sequences + service.prefill_us_per_token * prompts
    if plan.base:
        return each
    moved = len(work.samples) - ceil(STAYS * len(work.samples))
    longest = max(call.tokens for call in work.samples)
    return each + service.decode_base_us * max(longest, least_steps(shares, moved))


def least_steps(shares: Sequence[Sequence[SampleWork]], moved: int) -> float:
    """Decode steps of all replicas together when `moved` calls, whichever are best, are in others' batches.

    A replica makes as many as its longest call that stays. Which ones to move is a knapsack; its fractional relaxation
    is solved (greedily, on the convex hull of each replica's gains), so the true minimum is not below this.
    """
    total, gains = 0.0, []
    for share in shares:
        longest = sorted((call.tokens for call in share), reverse=True)
        total += longest[0]
        corners = [(0, longest[0])]
        for point in enumerate([*longest[1:], 0], start=1):
            while len(corners) > 1 and _above(corners[-2], corners[-1], point):
                corners.pop()
            corners.append(point)
        gains += [((a[1] - b[1]) / (b[0] - a[0]), b[0] - a[0]) for a, b in pairwise(corners)]
    for gain, calls in sorted(gains, reverse=True):
        taken = min(calls, moved)
        total -= gain * taken
        moved -= taken
    return total


def _above(a: tuple[int, int], b: tuple[int, int], c: tuple[int, int]) -> bool:
    """Whether b is not below the line from a to c."""
    return (b[1] - a[1]) * (c[0] - a[0]) >= (c[1] - a[1]) * (b[0] - a[0])
