"""Policies and budgets in plexrl.yaml: read as written, faults with file, line, key and mend; what a reload changes."""

from pathlib import Path

import pytest

from plexrl.config import load
from plexrl.config.reload import kept
from plexrl.types import BadInput

HEAD = "state_dir: /var/lib/plexrl/lab\nmodels:\n  none: {path: MODEL, engine: noop}\n"


@pytest.fixture
def write(tmp_path: Path):
    def write(text: str = "", name: str = "plexrl.yaml", head: str = HEAD) -> Path:
        path = tmp_path / name
        path.write_text((head + text).replace("MODEL", str(tmp_path)))
        return path

    return write


ALL = """\
policies:
  accounts:
    ml: {jobs: 8, worker_groups: 6, gang_size: 4, host_bytes: 64GiB, checkpoint_bytes: 1TiB, checkpoint_age: 90d}
    "*": {gpu_time: 100h, window: 30d}
  users: {alice: {class: interactive, priority: 3, deadline: 10m}}
  qos: {long: {class: scavenger, jobs: 1}}
budgets:
  {from_slurm: true, since: 2026-01-31, grace: 0s, accounts: {ml: {gpu_time: 1000h}}, users: {bob: {gpu_time: 0}}}
shares_from: slurm
slurm_backend: pyslurm
"""


def test_everything_written_out(write):
    config = load(write(ALL))
    ml, rest = config.policies.accounts["ml"], config.policies.accounts["*"]
    assert (ml.jobs, ml.worker_groups, ml.gang_size, ml.host_bytes) == (8, 6, 4, 64 * 2**30)
    assert (ml.checkpoint_bytes, ml.checkpoint_age_us) == (2**40, 90 * 86_400_000_000)
    assert (rest.gpu_time_us, rest.window_us, rest.jobs) == (360_000_000_000, 30 * 86_400_000_000, None)
    alice = config.policies.users["alice"]
    assert (alice.kind, alice.priority, alice.deadline_us) == ("interactive", 3, 600_000_000)
    assert config.policies.qos["long"].kind == "scavenger"
    assert (config.budgets.from_slurm, config.budgets.since, config.budgets.grace_us) == (True, "2026-01-31", 0)
    assert config.budgets.users["bob"].gpu_time_us == 0
    assert (config.shares_from, config.slurm_backend) == ("slurm", "pyslurm")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("policies:\n  accounts:\n    ml: {job: 8}\n", r":6: policies.accounts.ml.job: unknown key.*`jobs`"),
        ("policies:\n  users:\n    al: {jobs: 0}\n", r":6: policies.users.al.jobs: too small"),
        ("policies:\n  qos:\n    x: {checkpoint_age: 1d}\n", r":6: policies.qos.x.checkpoint_age: unknown key"),
        ("policies:\n  qos:\n    x: {window: 7d}\n", r":6: policies.qos.x.window: a window without gpu_time"),
        ("policies:\n  qos:\n    x: {gpu_time: 1h, window: 5m}\n", r":6: policies.qos.x.window: too small"),
        ("policies:\n  qos:\n    x: {class: fast}\n", r":6: policies.qos.x.class: not a known value"),
        ("budgets:\n  since: yesterday\n", r":5: budgets.since: 'yesterday' is not a day such as 2026-01-31"),
        ("budgets:\n  accounts: {ml: {}}\n", r":5: budgets.accounts.ml.gpu_time: this key is required"),
        ("budgets:\n  accounts: {ml: 5}\n", r":5: budgets.accounts.ml: not a section"),
        ("shares_from: sacct\n", r":4: shares_from: not a known value. Write 'file' or 'slurm'"),
        ("shares_from: slurm\nshares: {ml: {}}\n", r":5: shares: Slurm's shares are read, and these are too"),
    ],
)
def test_faults_name_line_key_and_mend(write, text, told):
    with pytest.raises(BadInput, match=told):
        load(write(text))


def test_what_a_running_head_takes_up(write):
    old = load(write())
    more = "limits: {models_per_job: 9}\ntenants: {ml: {priority: 1}}\nscheduler: {order: fair, half_life: 1d}\n"
    head = HEAD.replace("noop}", "noop, accounts: [ml]}")
    assert kept(old, load(write(ALL.replace("slurm_backend: pyslurm\n", "") + more, "new.yaml", head))) == []


@pytest.mark.parametrize(
    ("head", "text", "stays"),
    [
        (HEAD.replace("lab", "other"), "", ["state_dir"]),
        (HEAD + "  more: {path: MODEL, engine: noop}\n", "", ["models.more"]),
        (HEAD.replace("noop}", "noop, train: {gpus: 2}}"), "", ["models.none.train"]),
        (HEAD, "device: {bytes: 1GiB}\nscheduler: {placement: isolated}\n", ["device", "scheduler.placement"]),
        (HEAD, "limits: {body_bytes: 1MiB, models_per_job: 3}\n", ["limits.body_bytes"]),
        (HEAD, "slurm_backend: pyslurm\n", ["slurm_backend"]),
    ],
)
def test_what_stays_until_the_pool_starts_again(write, head, text, stays):
    assert kept(load(write()), load(write(text, "new.yaml", head))) == stays
