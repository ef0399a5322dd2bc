"""What plexrl.yaml says reaches the scheduler."""

from pathlib import Path

import pytest

from plexrl.config import PoolConfig
from plexrl.pool.rules import policy_of, roles_of, scheduler_of, set_shares, tenant_of
from plexrl.scheduler import Policy
from plexrl.types import BadInput, GpuRole, JobClass, Tenant, records


def config(tmp_path: Path, **sections: object) -> PoolConfig:
    models = {"none": {"path": str(tmp_path), "engine": "noop"}}
    return PoolConfig.model_validate({"state_dir": str(tmp_path), "models": models, **sections})


def attached(account: str) -> records.JobAttached:
    return records.JobAttached(now_us=1, job="7.0", slurm_job=7, uid=5, user="u", account=account)


def test_defaults_are_the_schedulers_own(tmp_path):
    assert policy_of(config(tmp_path)) == Policy()


def test_every_knob_is_passed_on(tmp_path):
    told = {
        "placement": "spread_backfill",
        "order": "fair",
        "anticipation": "1ms",
        "gradient_anticipation": "2ms",
        "quantum": "3ms",
        "sample_quantum": "6ms",
        "min_turn_factor": 1.5,
        "starvation": "4ms",
        "admission_patience": "7ms",
        "half_life": "5ms",
        "max_stretch": {"interactive": 1.5, "normal": 2.5, "scavenger": 3.5},
        "interactive_switches_per_hour": 6,
        "gather_share": 0.7,
        "backfill": False,
        "prefetch": False,
        "paranoid": True,
    }
    assert policy_of(config(tmp_path, scheduler=told)) == Policy(
        placement="spread_backfill",
        order="fair",
        anticipation_us=1000,
        gradient_anticipation_us=2000,
        quantum_us=3000,
        sample_quantum_us=6000,
        min_turn_factor=1.5,
        starvation_us=4000,
        admission_patience_us=7000,
        half_life_us=5000,
        max_stretch={JobClass.INTERACTIVE: 1.5, JobClass.NORMAL: 2.5, JobClass.SCAVENGER: 3.5},
        interactive_switches_per_hour=6,
        gather_share=0.7,
        backfill=False,
        prefetch=False,
        paranoid=True,
    )


def test_roles_of_nodes_that_are_there(tmp_path):
    some = config(tmp_path, device={"roles": {"a": ["train", "any"], "elsewhere": ["sample"]}})
    assert roles_of(some, ["a:0", "a:1", "b:0"]) == {"a:0": GpuRole.TRAIN, "a:1": GpuRole.ANY}
    assert scheduler_of(some, ["a:0", "a:1", "b:0"]).floor.gpus.keys() == {"a:0", "a:1", "b:0"}
    with pytest.raises(BadInput, match="a:1"):
        roles_of(some, ["a:0", "b:0"])


def test_shares(tmp_path):
    some = config(tmp_path, shares={"ml": {"shares": 3, "users": {"alice": 3}}, "bio": {}})
    scheduler = scheduler_of(some, ["a:0"])
    scheduler.start(0)
    set_shares(some, scheduler, 0)
    for account, user in (("ml", "alice"), ("ml", "bob"), ("bio", "carol")):
        scheduler.shares.charge(0, account, user, 1000)
    # Three shares of four for two thirds of the use, one of four for a third.
    assert scheduler.shares.level(0, "ml", "bob")[0] == 9 / 8
    assert scheduler.shares.level(0, "bio", "carol")[0] == 3 / 4
    assert scheduler.shares.level(0, "ml", "alice")[1] == 3 * scheduler.shares.level(0, "ml", "bob")[1]


def test_a_job_stands_as_its_account_does(tmp_path):
    some = config(tmp_path, tenants={"bio": {"class": "scavenger", "priority": -2, "deadline": "1m"}})
    assert tenant_of(some, attached("ml")) == Tenant(job="7.0", account="ml", user="u")
    assert tenant_of(some, attached("bio")) == Tenant(
        job="7.0", account="bio", user="u", kind=JobClass.SCAVENGER, priority=-2, deadline_us=60_000_000
    )
