"""The pyslurm backend answers as the commands backend does: on a Slurm 25.11 of its own, which Debian does not have.

PLEXRL_SLURM2511: where that Slurm was installed from source. PLEXRL_PYSLURM_PYTHON: an interpreter with pyslurm 25.11
(SLURM_INCLUDE_DIR=$PLEXRL_SLURM2511/include SLURM_LIB_DIR=$PLEXRL_SLURM2511/lib pip install pyslurm) and plexrl.
Then: pytest -m slurm2511 tests/slurm/test_pyslurm.py
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from plexrl.slurm import SlurmCommands
from plexrl.slurm.devcluster import Cluster, access, configs, daemons, install, packages
from plexrl.slurm.pyslurm_backend import SlurmPy
from plexrl.types import BadInput, Unavailable
from tests.slurm.jobs import sbatch, until

pytestmark = [pytest.mark.slurm2511, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def newer() -> Iterator[Cluster]:
    """A development cluster of that Slurm, without our plugins, which are built for Debian's."""
    prefix = os.environ["PLEXRL_SLURM2511"]
    path = f"{prefix}/sbin:{prefix}/bin:{packages._SBIN}"
    old_conf, old_environment = configs.slurm_conf, daemons.environment
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packages, "_SBIN", path)
        patch.setattr(access, "_SYSTEM_PATH", path)
        patch.setattr(daemons, "environment", lambda at: old_environment(at) | {"PATH": path})
        patch.setattr(install, "install", lambda *arguments: None)
        patch.setattr(
            configs,
            "slurm_conf",
            lambda at: re.sub(r"(JobSubmitPlugins|PlugStackConfig)=.*\n", "", old_conf(at)).replace(
                "PrivateData=jobs\n", "MinJobAge=600\n"
            ),
        )
        cluster = Cluster(Path(f"/var/tmp/plexrl-test2511-{os.getpid()}"))
        cluster.up(nodes=2, gpus_per_node=1)
        yield cluster
        cluster.down(purge=True)


@pytest.fixture(scope="module")
def both(newer: Cluster) -> Iterator[tuple[SlurmCommands, SlurmPy]]:
    commands = SlurmCommands(newer.env())
    pyslurm = SlurmPy(newer.env(), python=os.environ["PLEXRL_PYSLURM_PYTHON"])
    assert pyslurm.check().startswith("25.11.")
    yield commands, pyslurm
    pyslurm.close()


def test_jobs_are_told_alike(newer, both):
    commands, pyslurm = both
    options = ("--licenses=plexrl_lab:1", "--output=%x-%j.txt", "--job-name=a b", "--comment=x\ny")
    running = sbatch(newer, "bob", "sleep 100", "--gpus=1", *options)
    until(lambda: commands.job(running).state == "RUNNING")
    pending = sbatch(newer, "carol", "sleep 1", "--begin=now+1hour", *options)
    done = sbatch(newer, "alice", "true", *options)
    until(lambda: commands.job(done).state == "COMPLETED")
    try:
        asked = [running, pending, done, 999_999]
        assert pyslurm.jobs(asked) == commands.jobs(asked)
        assert [pyslurm.job(job) for job in asked] == [commands.job(job) for job in asked]
        assert pyslurm.job(running).gpus == 1 and pyslurm.job(running).nodes
        licences = ["plexrl_lab", "plexrl_none"]
        assert pyslurm.holders(licences) == commands.holders(licences) and len(pyslurm.holders(licences)) == 2
        assert sorted(pyslurm.active()) == sorted(commands.active()) == sorted([running, pending])
        assert [pyslurm.output(job) for job in asked] == [commands.output(job) for job in asked]
    finally:
        pyslurm.cancel(running, pending)
        pyslurm.cancel(done, 999_999)  # what has ended is no error
    until(lambda: {commands.job(job).state for job in (running, pending)} == {"CANCELLED"})
    assert pyslurm.jobs([running, pending]) == commands.jobs([running, pending])


def test_a_signal_reaches_the_batch_script_alone(newer, both):
    commands, pyslurm = both
    job = sbatch(newer, "alice", "trap 'exit 7' USR1\nwhile :; do sleep 0.1; done")
    until(lambda: commands.job(job).state == "RUNNING" and (newer.directory / "home" / "alice" / f"{job}.out").exists())
    until(lambda: pyslurm.cancel(job, signal="USR1", batch=True) or commands.job(job).state == "FAILED")


def test_associations_are_told_alike(newer, both):
    commands, pyslurm = both
    newer.run("root", ["sacctmgr", "-i", "modify", "account", "bio", "set", "GrpTRESMins=gres/gpu=77,cpu=5"])
    newer.run("root", ["sacctmgr", "-i", "modify", "user", "bob", "set", "fairshare=parent"])

    def key(each):
        return each.account, each.user

    told = sorted(pyslurm.associations(), key=key)
    assert told == sorted(commands.associations(), key=key)
    assert any(each.grp_tres_mins == {"gres/gpu": "77", "cpu": "5"} for each in told)
    assert any(each.user == "bob" and each.shares is None for each in told)


def test_what_it_has_no_words_for_is_asked_by_commands(both):
    commands, pyslurm = both
    assert pyslurm.people() == commands.people() and pyslurm.licenses() == commands.licenses()
    assert pyslurm.gpu_seconds() == commands.gpu_seconds()


def test_libslurm_without_a_configuration_and_without_a_daemon(newer, tmp_path):
    python = os.environ["PLEXRL_PYSLURM_PYTHON"]
    with pytest.raises(BadInput, match="ended with|cannot be imported"):
        SlurmPy(newer.env() | {"SLURM_CONF": str(tmp_path / "none.conf")}, python=python).jobs([1])
    dead = (newer.directory / "etc" / "slurm.conf").read_text().replace("SlurmctldPort=", "SlurmctldPort=1\n#")
    conf = newer.directory / "etc" / "dead.conf"
    conf.write_text(dead + "MessageTimeout=2\n")
    lonely = SlurmPy(newer.env() | {"SLURM_CONF": str(conf)}, timeout=30, python=python)
    with pytest.raises(Unavailable):
        lonely.job(1)
    lonely.close()
