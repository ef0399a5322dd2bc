"""Policies of a pool on a real Slurm: shares and budgets of its associations, plexrl.yaml read anew, logs of a job."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from plexrl.slurm.tree import shares_of
from tests.slurm.jobs import sbatch, until
from tests.slurm.site import POOL, Site

pytestmark = pytest.mark.timeout(400)


def account(cluster, name: str, **limits: str) -> None:
    """Change an account's association."""
    told = [f"{key}={value}" for key, value in limits.items()]
    cluster.run("root", ["sacctmgr", "-i", "modify", "account", name, "set", *told])


@pytest.fixture(scope="module")
def site(cluster, tiny_model) -> Iterator[Site]:
    site = Site(cluster, tiny_model)
    account(cluster, "bio", GrpTRESMins="gres/gpu=0")
    site.config.write_text(site.config.read_text() + "shares_from: slurm\nbudgets: {from_slurm: true, grace: 0s}\n")
    site.plexrl("pool", "declare", POOL, "--config", str(site.config), "--fresh")
    site.start()
    yield site
    site.stop()
    account(cluster, "bio", GrpTRESMins="gres/gpu=-1")


def test_what_slurm_says_of_accounts_and_a_jobs_output(cluster, tmp_path):
    slurm = cluster.slurm()
    account(cluster, "chem", GrpTRESMins="gres/gpu=77")
    try:
        told = {(each.account, each.user): each for each in slurm.associations()}
        assert told["chem", ""].grp_tres_mins == {"gres/gpu": "77"} and told["chem", ""].parent == "root"
        assert all(seconds > 0 and seconds % 60 == 0 for seconds in slurm.gpu_seconds().values())
        shares = shares_of(slurm.associations())
        assert shares["ml"][0] / shares["bio"][0] == pytest.approx(50 / 30) and shares["chem"][1] == {"carol": 1}
    finally:
        account(cluster, "chem", GrpTRESMins="gres/gpu=-1")
    pattern = "%x-%j-%u-%A.%%.txt"
    job = sbatch(cluster, "alice", "echo out; echo err >&2; sleep 60", "--job-name=a b", f"--output={pattern}")
    try:
        info = until(lambda: (now := slurm.job(job)).state == "RUNNING" and now)
        assert info.qos == "normal"
        found = slurm.output(job)
        home = cluster.directory / "home" / "alice"
        # The path that Slurm itself writes to; its own `scontrol show job` leaves some patterns as they are.
        assert until(lambda: list(home.glob("a b-*.txt"))) == [found.stdout] == [found.stderr]
        assert until(lambda: Path(found.stdout).read_text()) and slurm.output(999_999) is None
        shown = cluster.run("alice", ["plexrl", "logs", str(job), "--json"])
        assert json.loads(shown.stdout)[0] | {"lines": []} == {
            "what": "stdout", "path": str(found.stdout), "lines": [], "error": "",
        }  # fmt: skip
    finally:
        slurm.cancel(job)


def test_a_budget_of_slurm_that_is_used_up_lets_nobody_in(site):
    job = site.submit("bob", "sft.py", "--steps", "1")
    site.wait_until("the job ends", lambda: site.state_of(job) == "FAILED", 60)
    said = site.output("bob", job)
    assert "the GPU budget of account 'bio' is used up: GrpTRESMins" in said, said
    account(site.cluster, "bio", GrpTRESMins="gres/gpu=1000")
    assert "has taken" in site.plexrl("pool", "reload", POOL).stdout  # asks Slurm at once
    assert site.result("bob", site.submit("bob", "sft.py", "--steps", "1"))["losses"]


def test_a_file_that_cannot_be_taken_up_changes_nothing(site):
    before = site.config.read_text()
    site.config.write_text(before.replace("128MiB", "256MiB") + "policies: {users: {alice: {jobs: 1}}}\n")
    done = site.plexrl("pool", "reload", POOL, check=False)
    assert done.returncode == 2 and "host cannot change while the pool runs" in done.stderr
    status = site.plexrl("pool", "status", POOL).stdout
    assert "plexrl.yaml was not taken up" in status.replace("\n", " ")
    site.config.write_text(before + "nonsense: 1\n")
    done = site.plexrl("pool", "reload", POOL, check=False)
    assert done.returncode == 2 and "nonsense: unknown key" in done.stderr
    site.config.write_text(before)
    site.plexrl("pool", "reload", POOL)


def test_a_budget_that_runs_out_ends_a_job_that_runs(site):
    before = site.config.read_text()
    job = site.submit("alice", "sft.py", "--steps", "100000")
    (pool,) = json.loads(site.plexrl("shares", "--json").stdout)
    parts = {each["account"]: each["account_shares"] for each in pool["users"]}
    assert [parts[name] / parts["chem"] for name in ("ml", "bio")] == pytest.approx([50 / 20, 30 / 20])
    site.wait_until("the job trains", lambda: _models(site), 60)
    site.config.write_text(before.replace("grace: 0s", "grace: 0s, accounts: {ml: {gpu_time: 0}}"))
    site.plexrl("pool", "reload", POOL)
    site.wait_until("the job ends", lambda: site.state_of(job) == "FAILED", 90)
    said = site.output("alice", job)
    assert "the GPU budget of account 'ml' is used up: budgets.accounts.ml allows 0.00 GPU hours" in said, said[-2000:]
    site.config.write_text(before)
    site.plexrl("pool", "reload", POOL)


def _models(site: Site) -> list[str]:
    jobs = json.loads(site.plexrl("jobs", "--json").stdout)
    return [model for job in jobs for model in job["models"]]
