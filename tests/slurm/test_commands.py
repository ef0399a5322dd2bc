"""The adapter over Slurm's commands, against a real Slurm."""

import json
import pwd
from pathlib import Path

import pytest

from plexrl.slurm import SlurmCommands
from plexrl.slurm.commands import expand
from plexrl.slurm.devcluster import SERVICE, Cluster
from plexrl.types import BadInput, Unavailable
from plexrl.wire.registry import Declared, Registry
from tests.slurm.jobs import finished, sbatch, until


def test_a_user_cannot_write_into_what_the_adapter_reads(cluster: Cluster):
    """Name and comment that look like fields, lines and other jobs."""
    lie = "x\n4242 UserId=root(0) AdminComment=PXL1:{} Account=ml\nJobId=1"
    job = sbatch(cluster, "bob", "sleep 60", f"--job-name={lie}", f"--comment={lie}", "--gpus=1")
    slurm = cluster.slurm()
    try:
        found = until(lambda: (now := slurm.job(job)).state == "RUNNING" and now)
        assert (found.id, found.user, found.uid, found.account) == (job, "bob", pwd.getpwnam("bob").pw_uid, "bio")
        assert (found.admin_comment, found.gpus, found.restart_count, found.partition) == ("", 1, 0, "gpu")
        assert found.start_time > 1_700_000_000 and found.nodes and found.licenses == {}
        assert set(slurm.jobs([job, 999_999, 999_998])) == {job}
        assert slurm.job(999_999) is None and slurm.jobs([]) == {} and job in slurm.active()
    finally:
        slurm.cancel(job)
    until(lambda: slurm.job(job).state == "CANCELLED")
    slurm.cancel(job, 999_999)  # what has ended is no error
    (row,) = until(lambda: [row for row in slurm.sacct([job]) if row.end])
    assert (row.job, row.user, row.state, row.gpus) == (job, "bob", "CANCELLED", 1)


def test_a_signal_reaches_the_batch_script_alone(cluster: Cluster):
    script = "trap 'echo got it; exit 0' USR1\nsrun sleep 60 &\nwait\n"
    job = sbatch(cluster, "alice", script)
    slurm = cluster.slurm()
    until(lambda: f"{job}.0" in cluster.run("alice", ["squeue", "-hs", "-j", str(job)]).stdout)
    slurm.cancel(job, signal="USR1", batch=True)
    assert "got it" in finished(cluster, job)


def test_requeued_runs_are_rows_of_their_own(cluster: Cluster):
    script = 'test "${SLURM_RESTART_COUNT:-0}" = 1 || sleep 60'
    job = sbatch(cluster, "alice", script, "--gpus=1", "--requeue")
    slurm = cluster.slurm()
    until(lambda: slurm.job(job).state == "RUNNING")
    first = slurm.job(job)
    cluster.run("root", ["scontrol", "requeue", str(job)])
    until(lambda: (now := slurm.job(job)).restart_count == 1 and now.reason == "BeginTime")
    cluster.run("root", ["scontrol", "update", f"jobid={job}", "starttime=now"])  # no need to wait the two minutes
    until(lambda: slurm.job(job).state == "COMPLETED")
    rows = until(lambda: len(rows := slurm.sacct([job])) == 2 and all(row.end for row in rows) and rows)
    assert [row.gpus for row in rows] == [1, 1] and rows[0].start == first.start_time < rows[1].start


def test_a_jobs_licences_are_held_while_its_pool_is_down(cluster: Cluster):
    """A licence-only reservation: attached jobs wait at no cost, and start when it is gone."""
    uid = pwd.getpwnam(SERVICE).pw_uid
    config = str(cluster.pools / "lab.yaml")
    declared = Declared(name="lab", kind="site", owner_uid=uid, config=config, state_dir=str(cluster.pools / "lab"))
    Registry(cluster.registry, frozenset({uid})).declare(declared)
    slurm = cluster.slurm()
    assert slurm.licenses()["plexrl_lab"] == 16
    for _ in range(2):
        slurm.hold_licenses("plexrl_lab", SERVICE, {"plexrl_lab": 16})
    script = "#!/bin/bash\n"
    done = cluster.run("carol", ["sbatch", "--parsable", "--plexrl-pool=lab", "--gpus=1"], stdin=script)
    job = int(done.stdout)
    try:
        found = until(lambda: (now := slurm.job(job)).reason == "Licenses" and now)
        assert (found.state, found.licenses, found.gpus, found.start_time) == ("PENDING", {"plexrl_lab": 1}, 0, None)
        assert json.loads(found.admin_comment.removeprefix("PXL1:"))["pool"] == "lab"
        for _ in range(2):
            slurm.release_licenses("plexrl_lab")
        # It starts; that nobody listens in the pool is the door's business.
        assert until(lambda: (now := slurm.job(job)).state != "PENDING" and now).gpus == 0
    finally:
        slurm.cancel(job)


def test_refusals_and_silence_are_told_apart(cluster: Cluster, tmp_path: Path):
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/bash\n")
    with pytest.raises(BadInput, match="sbatch refused: .*nowhere"):
        cluster.slurm().submit(script, options=["--partition=nowhere"])
    dead = (cluster.directory / "etc" / "slurm.conf").read_text().replace("SlurmctldPort=", "SlurmctldPort=1\n#")
    conf = cluster.directory / "etc" / "dead.conf"
    conf.write_text(dead + "MessageTimeout=2\n")
    lonely = SlurmCommands(env=cluster.env() | {"SLURM_CONF": str(conf)}, timeout=3)
    with pytest.raises(Unavailable, match="squeue"):
        lonely.job(1)
    with pytest.raises(Unavailable, match="no command sbatch.*slurm-client"):
        SlurmCommands(env={"PATH": "/nonexistent"}).submit(script)


def test_submit_passes_options_arguments_and_environment(cluster: Cluster, tmp_path: Path):
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/bash\necho $1 $GREETING $SLURM_JOB_NUM_NODES\n")
    out = tmp_path / "out"
    job = cluster.slurm().submit(script, ["there"], ["--nodes=2", f"--output={out}"], {"GREETING": "hello"})
    until(lambda: cluster.slurm().job(job).state == "COMPLETED")
    assert out.read_text() == "there hello 2\n"


def test_host_lists():
    assert expand("n[1-3,07],gpu1,r[1-2]c[8-9]") == ("n1", "n2", "n3", "n07", "gpu1", "r1c8", "r1c9", "r2c8", "r2c9")
    assert expand("n[098-101]") == ("n098", "n099", "n100", "n101") and expand("") == expand("None assigned") == ()
    with pytest.raises(BadInput, match="host list"):
        expand("n[1-x]")
