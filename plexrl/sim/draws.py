"""What one step of a job turns out to be: the lengths and stalls of its samples, drawn from its plan.

Generator (facts 7.2, a suggestion there, not a published fit): length = mean * drift(step) * prompt factor * sample
factor, both factors log-normal with mean 1, cut at max_tokens; a few runaways make up the share at the cap. The drift
is exp(x), x an AR(1) series. Normal variates come from a table of 4,096 equally likely quantiles: fast, and the same
on every machine. A step depends on (seed, job, step) alone, so jobs draw the same work under every policy.
"""

from collections.abc import Iterator
from functools import lru_cache
from math import exp, log, sqrt
from random import Random
from statistics import NormalDist

from plexrl.sim.workload import JobPlan, Lengths, Rollout, SamplePlan, SampleWork, Stalls, StepWork

_NORMAL = NormalDist()
_QUANTILES = tuple(_NORMAL.inv_cdf((i + 0.5) / 4096) for i in range(4096))


def draw(plan: JobPlan, step: int, seed: int) -> StepWork:
    """The work of a step, from 0. Independent of what else was drawn, and when."""
    return StepWork(*_draw(plan.job, plan.rollout, plan.sample, step, seed), plan.reward_us)


@lru_cache(4096)  # every policy of a comparison draws the same steps
def _draw(job: str, rollout: Rollout, sample: SamplePlan, step: int, seed: int) -> tuple[tuple[SampleWork, ...], int]:
    """The samples, and the tokens that they are trained on."""
    rng = Random(f"{seed}/{job}/{step}")
    factor = exp(_drift(seed, job, rollout.lengths, step))
    tokens = _lengths(rollout, factor, rng)
    stalls = _stalls(rollout.stalls, _slowness(seed, job, rollout.stalls), len(tokens), rng)
    prompt = rollout.lengths.prompt_tokens
    replicas = min(sample.replicas, len(tokens))
    calls = min(rollout.calls, len(tokens) // replicas)
    shares = []
    for replica in range(replicas):
        part = slice(len(tokens) * replica // replicas, len(tokens) * (replica + 1) // replicas)
        if stalls is None:
            ordered = [(length, length, 0) for length in sorted(tokens[part])]
        else:
            step_us = sample.service.step_us(part.stop - part.start)
            ordered = sorted(
                (length * step_us + stall, length, stall)
                for length, stall in zip(tokens[part], stalls[part], strict=True)
            )
        shares.append(_cut(ordered, calls, prompt))
    samples = [share[i] for i in range(calls) for share in shares]
    return tuple(samples), sum(tokens) + prompt * len(tokens)


def _lengths(rollout: Rollout, factor: float, rng: Random) -> list[int]:
    """Tokens of every sample, prompt by prompt."""
    lengths = rollout.lengths
    by_prompt, by_sample = _factors(lengths.sigma_prompt), _factors(lengths.sigma_sample)
    mean, cap, runaways = lengths.mean_tokens * factor, lengths.max_tokens, _runaways(lengths)
    drawn = []
    for prompt in rng.choices(by_prompt, k=rollout.prompts):
        for sample in rng.choices(by_sample, k=rollout.group):
            length = int(mean * prompt * sample) + 1
            drawn.append(length if length < cap else cap)
    if runaways:
        random = rng.random
        drawn = [cap if random() < runaways else length for length in drawn]
    return drawn


def _stalls(stalls: Stalls, slowness: float, samples: int, rng: Random) -> list[float] | None:
    """Microseconds that each sample waits for tools; None without tools."""
    if not stalls.turns_max:
        return None
    return [total * slowness for total in rng.choices(_totals(stalls), k=samples)]


def _cut(ordered: list[tuple[float, int, float]], calls: int, prompt: int) -> list[SampleWork]:
    """A replica's (end, tokens, stall), by end, in `calls` equal parts."""
    works = []
    for i in range(calls):
        part = ordered[len(ordered) * i // calls : len(ordered) * (i + 1) // calls]
        _, tokens, stall = part[-1]
        works.append(SampleWork(prompt * len(part), tokens, len(part), round(stall), sum(x[1] for x in part)))
    return works


@lru_cache(256)
def _factors(sigma: float) -> tuple[float, ...]:
    """Equally likely values of a log-normal variable with mean 1."""
    return tuple(exp(sigma * z - sigma * sigma / 2) for z in _QUANTILES)


@lru_cache(256)
def _runaways(lengths: Lengths) -> float:
    """The share of samples that must be sent to the cap so that at_cap of all are there."""
    sigma = sqrt(lengths.sigma_prompt**2 + lengths.sigma_sample**2)
    if not sigma:
        return lengths.at_cap
    cut = 1 - _NORMAL.cdf((log(lengths.max_tokens / lengths.mean_tokens) + sigma * sigma / 2) / sigma)
    return max(0.0, (lengths.at_cap - cut) / (1 - cut))


def _drift(seed: int, job: str, lengths: Lengths, step: int) -> float:
    if not lengths.drift:
        return 0.0
    values, source = _series(seed, job, lengths.memory)
    while len(values) <= step:
        values.append(next(source))
    return lengths.drift * values[step]


@lru_cache(4096)
def _series(seed: int, job: str, memory: float) -> tuple[list[float], Iterator[float]]:
    """A stationary AR(1) series with standard deviation 1: what is known of it, and the rest. A series that fell out
    of the cache is computed again, to the same values."""
    return [], _walk(Random(f"{seed}/{job}/drift"), memory)


def _walk(rng: Random, memory: float) -> Iterator[float]:
    value, scale = rng.choice(_QUANTILES), sqrt(1 - memory * memory)
    while True:
        yield value
        value = memory * value + scale * rng.choice(_QUANTILES)


@lru_cache(4096)
def _slowness(seed: int, job: str, stalls: Stalls) -> float:
    """By how much a job's tools are slower than others': log-normal, median 1."""
    return exp(stalls.spread * Random(f"{seed}/{job}/tools").choice(_QUANTILES))


@lru_cache(64)
def _totals(stalls: Stalls) -> tuple[float, ...]:
    """2,048 equally likely sums over a sample's turns, drawn once from a fixed seed."""
    rng = Random("stalls")
    factors = [exp(stalls.sigma * z) for z in _QUANTILES]
    totals = []
    for _ in range(2048):
        total = 0.0
        for factor in rng.choices(factors, k=rng.randint(stalls.turns_min, max(stalls.turns_min, stalls.turns_max))):
            kind = rng.random()
            if kind < stalls.quick_share:
                total += stalls.quick_us * factor
            elif kind < stalls.quick_share + stalls.slow_share:
                total += stalls.slow_us * factor
            else:
                total += rng.uniform(*stalls.stuck_us)
        totals.append(total)
    return tuple(totals)
