"""Accounts get the parts of a pool that their shares say while all of them want more: the live scheduler, simulated."""

import os
from collections import Counter

import pytest

from plexrl.scheduler import Policy
from plexrl.scheduler.costs import ServiceModel, SwitchModel
from plexrl.sim.run import run
from plexrl.sim.workload import Cluster, JobPlan, Lengths, Rollout, SamplePlan, TrainPlan, Workload
from plexrl.types import JobClass

S = 1_000_000
HOUR_US = 3600 * S
SHARES = {"ml": 50.0, "bio": 30.0, "chem": 20.0}
# `make soak` sets PLEXRL_SEEDS, and then it is a week.
HOURS = 168 if "PLEXRL_SEEDS" in os.environ else 6
ALIKE = {"-a": 1.0, "-b": 1.0}


def saturating(account: str, user: str, number: int) -> JobPlan:
    """Trains and samples all the time but for a few seconds of reward: alone it would fill a GPU."""
    gib = 1 << 30
    return JobPlan(
        job=f"{account}-{number}",
        account=account,
        user=user,
        steps=100_000,
        reward_us=5 * S,
        train=TrainPlan(
            gpus=1, device_bytes=8 * gib, host_bytes=8 * gib, residual_bytes=0, build_us=S, publish_us=S, calls=2,
            service=ServiceModel(train_us_per_token=(1 + number % 2) * 1000.0),
        ),
        sample=SamplePlan(
            replicas=1, gpus=1, device_bytes=6 * gib, host_bytes=6 * gib, residual_bytes=0, build_us=S,
            service=ServiceModel(decode_base_us=20_000.0),
        ),
        rollout=Rollout(prompts=4, group=4, calls=2, lengths=Lengths(max_tokens=4000, mean_tokens=1500.0)),
    )  # fmt: skip


def parts(
    order: str, hours: int, shares: dict[str, float], users: dict[str, float] = ALIKE, gpus: int = 2, each: int = 1
) -> dict[str, float]:
    """Who had which part of the GPU time that was charged within so many hours, by account and by user.

    each: jobs of a user.
    """
    jobs = [
        saturating(account, f"{account}{user}", number)
        for account in SHARES
        for number, user in enumerate(user for user in users for _ in range(each))
    ]
    workload = Workload(
        name="saturated",
        gpus=Cluster(nodes=1, per_node=gpus, bytes=20 << 30, host_bytes=0),
        jobs=tuple(jobs),
        switch=SwitchModel(gbps_in=20.0, gbps_out=20.0, overhead_us=S // 5),
    )
    anyone = dict.fromkeys(JobClass, float("inf"))
    # Who has waited for `starvation` goes before shares: with many jobs on few GPUs that must be long.
    policy = Policy(order=order, placement="spread", max_stretch=anyone, starvation_us=each * 3600 * S)
    told = {
        account: (part, {f"{account}{user}": one for user, one in users.items()}) for account, part in shares.items()
    }
    found = run(workload, policy, compare_alone=False, shares=told, until_us=hours * HOUR_US)
    charged: Counter[str] = Counter()
    for job in found.jobs:
        used = job.busy_us + job.switch_us + job.kept_us
        charged[job.account] += used
        charged[job.user] += used
    whole = sum(charged[account] for account in SHARES)
    assert whole > 0.9 * gpus * hours * HOUR_US, "the jobs do not saturate the pool"
    return {name: used / whole for name, used in charged.items()}


@pytest.mark.timeout(600)
def test_accounts_get_their_shares():
    found = parts("fair", HOURS, SHARES)
    assert {account: found[account] for account in SHARES} == pytest.approx(
        {account: part / 100 for account, part in SHARES.items()}, abs=0.05
    )


def test_other_shares_other_parts():
    """The same jobs under another file; an account without a share gets what nobody else wants."""
    found = parts("fair", 3, {"ml": 1.0, "bio": 1.0, "chem": 2.0})
    assert [found[account] for account in SHARES] == pytest.approx([0.25, 0.25, 0.5], abs=0.05)
    found = parts("fair", 3, {"ml": 1.0, "bio": 1.0, "chem": 0.0})
    assert found["chem"] < 0.2 < 0.4 < found["ml"]


def test_users_get_their_shares_of_the_account():
    found = parts("fair", 6, SHARES, {"-a": 3.0, "-b": 1.0}, gpus=1, each=3)
    for account in SHARES:
        assert found[f"{account}-a"] / found[account] == pytest.approx(0.75, abs=0.1)


def test_hrrs_leans_towards_shares():
    """Its factor is one of three: who has waited longer than the work is worth goes first whatever they have used."""
    found = parts("hrrs", 3, SHARES)
    assert found["ml"] > found["bio"] > found["chem"]
