"""A pool on a real Slurm: the service account runs it, users of other uids train on it through sbatch --plexrl-pool."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator

import pytest

from plexrl.pool.journal import replay
from plexrl.types import records
from tests.slurm.site import POOL, Site

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def site(cluster, tiny_model) -> Iterator[Site]:
    site = Site(cluster, tiny_model)
    site.plexrl("pool", "declare", POOL, "--config", str(site.config), "--fresh")
    yield site
    if (cluster.registry / f"{POOL}.live.json").exists():
        site.stop()


@pytest.fixture
def pool(site: Site) -> Site:
    """The site with its pool up; it stays up for the next test."""
    if not (site.cluster.registry / f"{POOL}.live.json").exists():
        site.start()
    return site


def test_a_job_waits_for_its_pool_and_then_runs_unchanged(site):
    job = site.submit("alice", "everything.py")
    site.wait_until("the job waits for the licence", lambda: site.cluster.slurm().job(job).reason == "Licenses", 20)
    site.start()
    seen = site.result("alice", job)
    assert seen["models"] == ["tiny"] and seen["is_lora"] and seen["reloaded_trains_equal"]
    info = site.cluster.slurm().sacct([job])[-1]
    assert info.gpus == 0


def test_the_pool_runs_as_the_service_account_and_root_is_refused(pool):
    done = subprocess.run(
        ["plexrl", "pool", "head", POOL], env=pool.cluster.env(), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "does not run as root" in done.stderr
    assert pool.head().username() == "plexrl"


def test_two_users_share_and_full_parameters_work(pool):
    lora = pool.submit("alice", "sft.py", "--steps", "6", "--rank", "4")
    full = pool.submit("bob", "sft.py", "--steps", "6", "--rank", "0", "--lr", "1e-3")
    for user, job in (("alice", lora), ("bob", full)):
        losses = pool.result(user, job)["losses"]
        assert sum(losses[-1]) < sum(losses[0])


def test_export_none_works(pool):
    job = pool.submit("alice", "sft.py", "--steps", "1", options=("--export=NONE",))
    assert pool.result("alice", job)["checkpoint"].startswith("tinker://")


def test_one_user_cannot_touch_what_is_anothers(pool):
    job = pool.submit("alice", "sft.py", "--steps", "400", "--think", "0.05")
    name = f"{job}.0"

    def model() -> list[str]:
        kept = [r for r in replay(pool.state / "journal") if isinstance(r, records.ModelCreated)]
        return [r.model for r in kept if r.job == name]

    pool.wait_until("alice trains", lambda: bool(model()))
    theirs = model()[0]
    earlier = [r for r in replay(pool.state / "journal") if isinstance(r, records.CallAccepted)]
    saved = next(str(r.work["path"]) for r in earlier if r.call.kind == "save_state" and r.uid != 0)
    answers = pool.result("bob", pool.submit("bob", "trespass.py", theirs, saved))
    pool.cluster.slurm().cancel(job)
    for what in ("get_info", "optim_step", "unload"):
        status, body = answers[what]
        assert status == 404, (what, body)
    for what in ("load", "sample"):
        status, body = answers[what]
        assert status == 400 and "of yours" in body["detail"], (what, body)
    assert answers["retrieve"][0] == 410
    assert answers["forged_key"][0] == 401


def test_a_foreign_job_id_is_not_believed(pool):
    job = pool.submit("alice", "sft.py", "--steps", "400", "--think", "0.05")
    pool.wait_until("the job runs", lambda: pool.state_of(job) == "RUNNING")
    done = pool.cluster.run(
        "bob",
        ["plexrl", "attach", "--pool", POOL, "--deadline", "20", "--", "true"],
        env={"SLURM_JOB_ID": str(job)},
        check=False,
    )
    pool.cluster.slurm().cancel(job)
    assert done.returncode != 0
    assert f"job {job} is not of uid" in done.stderr


def test_why_a_job_waits_is_told_to_itself_and_to_the_pools_account(pool):
    """Inside the job by its environment; from outside to root and the service account, and not to its own user."""
    said = f"{pool.programs.parent / 'venv' / 'bin' / 'plexrl'} explain && sleep 60"
    options = ["--parsable", f"--plexrl-pool={POOL}", "--output=%j.out", f"--wrap={said}"]
    job = int(pool.cluster.run("alice", ["sbatch", *options]).stdout)
    pool.wait_until("the job is told", lambda: f"{job}.0" in pool.output("alice", job))
    for user in ("root", "plexrl"):
        pool.wait_until("the head has said so", lambda u=user: _explained(pool, job, u).returncode == 0)
        assert f"{job}.0" in _explained(pool, job, user).stdout
    for user in ("alice", "bob"):
        refused = _explained(pool, job, user)
        assert refused.returncode == 2 and not refused.stdout
        assert "only root and the account of a pool" in refused.stderr
    pool.cluster.slurm().cancel(job)


def _explained(pool: Site, job: int, user: str) -> subprocess.CompletedProcess[str]:
    return pool.plexrl("explain", str(job), user=user, check=False)


def test_an_account_that_may_not_use_the_model_is_told_so(pool):
    job = pool.submit("carol", "sft.py", "--steps", "1")
    pool.wait_until("the job ends", lambda: pool.state_of(job) not in ("PENDING", "RUNNING", "COMPLETING"))
    assert pool.state_of(job) == "FAILED"
    assert "base model 'tiny' is not one of this pool's for account 'chem'" in pool.output("carol", job)


def test_a_killed_head_comes_back_and_the_job_goes_on(pool):
    job = pool.submit("alice", "sft.py", "--steps", "30", "--think", "0.1")
    pool.wait_until("the job trains", lambda: "optim_step" in _kinds(pool, job))
    os.kill(pool.head().pid, signal.SIGKILL)
    assert len(pool.result("alice", job)["losses"]) == 30
    ended = [r for r in replay(pool.state / "journal") if isinstance(r, records.CallEnded) and r.ok]
    assert len({r.id for r in ended}) == len(ended)


def _kinds(pool: Site, job: int) -> set[str]:
    accepted = [r for r in replay(pool.state / "journal") if isinstance(r, records.CallAccepted)]
    return {r.call.kind for r in accepted if r.call.job == f"{job}.0"}


def test_stop_ends_everything_and_the_accounts_agree(pool):
    slurm_job = pool.live()["slurm_job"]
    pool.stop()
    pool.wait_until("nothing of the service account is left", lambda: not pool.processes("plexrl"), 30)
    report = json.loads(pool.plexrl("report", "--pool", POOL, "--json").stdout)
    apart = report["charged_gpu_seconds"] + report["overhead_gpu_seconds"] - report["sacct_gpu_seconds"]
    assert abs(apart) <= 2 * report["gpus"], report
    assert pool.cluster.slurm().sacct([slurm_job])[-1].gpus == 2
    mine = json.loads(pool.plexrl("report", "--pool", POOL, "--json", user="alice").stdout)
    assert {job["user"] for job in mine["jobs"]} == {"alice"}
    assert {job["user"] for job in report["jobs"]} >= {"alice", "bob"}
    command = [str(pool.cluster.opt / "venv" / "bin" / "plexrl"), "report", "--pool", POOL]
    stranger = subprocess.run(
        command, env=pool.cluster.env(), user="nobody", cwd="/", capture_output=True, text=True, timeout=60
    )
    assert stranger.returncode == 4 and "has no report that uid" in stranger.stderr
    job = pool.submit("alice", "sft.py")
    pool.wait_until("new jobs wait", lambda: pool.cluster.slurm().job(job).reason == "Licenses", 20)
    pool.cluster.slurm().cancel(job)
