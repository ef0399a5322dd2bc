"""A job alone on GPUs of its own, trainer and sampler apart: in closed form, without a scheduler or a clock.

The same draws and the same service times as in a simulated cluster, so that the ratio of the two walls is what sharing
costs. A test holds it against the simulator.
"""

from functools import lru_cache
from heapq import heapify, heappop, heappush

from msgspec import Struct, structs

from plexrl.scheduler.costs import ServiceModel, SwitchModel
from plexrl.sim.draws import draw
from plexrl.sim.program import GAP_US
from plexrl.sim.workload import JobPlan, SampleWork, StepWork


class Alone(Struct, frozen=True):
    """wall_us: from placement to the end, builds included. train_us: the trainer's busy time; sample_us: the replicas',
    added up. least_us: GPU time that no schedule can do without (see `metrics.lower_bound`), by trainer and sampler.
    """

    wall_us: int
    train_us: int
    sample_us: int
    replicas: int
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


def alone(plan: JobPlan, seed: int, switch: SwitchModel) -> Alone:
    """A drawn job alone. Raises ValueError for a recorded one: that is simulated."""
    if plan.recorded is not None:
        raise ValueError(f"job {plan.job} is recorded")
    # Who runs it and when it comes changes nothing: jobs under several policies are computed once.
    return _alone(structs.replace(plan, arrival_us=0, account="", user=""), seed, switch)


@lru_cache(20_000)
def _alone(plan: JobPlan, seed: int, switch: SwitchModel) -> Alone:
    built = max(plan.train.build_us, plan.sample.build_us)
    refresh_us = switch.in_us(plan.sample.host_bytes or plan.sample.device_bytes)
    service = plan.train.service
    rolled = float(built)  # end of the last rollout
    train_us = sample_us = least_sample = 0.0
    versions: list[float] = []  # when each publication was there
    version = 0
    for step in range(plan.steps):
        work = draw(plan, step, seed)
        begin = rolled + (GAP_US if step else 0)
        if step > plan.lag:
            begin = max(begin, versions[step - plan.lag - 1] + GAP_US)
        newest = sum(at <= begin for at in versions[-2:]) + max(0, len(versions) - 2)
        busy = [
            replica_us(plan.sample.service, share, refresh_us if newest != version else 0) for share in deal(plan, work)
        ]
        version = newest
        rolled = begin + max(busy)
        sample_us += sum(busy)
        least_sample += _least_us(plan, work)
        learn = rolled + work.reward_us
        if versions:
            learn = max(learn, versions[-1] + GAP_US)
        tokens = [
            work.train_tokens * (i + 1) // plan.train.calls - work.train_tokens * i // plan.train.calls
            for i in range(plan.train.calls)
        ]
        training = sum(service.train_us(n) for n in tokens) + service.step_optimizer_us() + plan.train.publish_us
        train_us += training
        versions.append(learn + training + GAP_US)
    return Alone(
        wall_us=round(versions[-1]),
        train_us=round(train_us),
        sample_us=round(sample_us),
        replicas=plan.sample.replicas,
        least_train_us=int(train_us) * plan.train.gpus,
        least_sample_us=int(least_sample * plan.sample.gpus),
    )


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


def replica_us(service: ServiceModel, calls: list[SampleWork], refresh_us: int = 0) -> float:
    """From submission of these calls to one replica until the last has ended; refresh_us: new weights come in first."""
    prompts = sum(call.prompt_tokens for call in calls)
    now = service.call_us * len(calls) + refresh_us + service.prefill_us_per_token * prompts
    base, each = service.decode_base_us, service.decode_us_per_sequence
    # (position of the next stop, tie, call, whether its wait is behind it)
    stops = [(c.tokens / 2 if c.stall_us else c.tokens, i, c, not c.stall_us) for i, c in enumerate(calls)]
    heapify(stops)
    waits: list[tuple[float, int, SampleWork]] = []
    batch, position = sum(call.sequences for call in calls), 0.0
    while stops or waits:
        rate = base + each * batch
        stop = now + (stops[0][0] - position) * rate if stops else None
        if waits and (stop is None or waits[0][0] < stop):
            at, i, call = heappop(waits)
            if stops:
                position += (at - now) / rate
            now = at
            batch += call.sequences
            heappush(stops, (position + call.tokens / 2, i, call, True))
            continue
        position, i, call, waited = heappop(stops)
        now = stop
        batch -= call.sequences
        if not waited:
            heappush(waits, (now + call.stall_us, i, call))
    return now


def _least_us(plan: JobPlan, work: StepWork) -> float:
    """Time of one replica that no schedule of this rollout can do without: all calls in one batch, however large."""
    service = plan.sample.service
    sequences = sum(call.tokens * call.sequences for call in work.samples)
    prompts = sum(call.prompt_tokens for call in work.samples)
    longest = max(call.tokens for call in work.samples)
    return (
        service.decode_us_per_sequence * sequences
        + service.prefill_us_per_token * prompts
        + service.decode_base_us * longest
    )
