"""sbatch_templates/pool.sbatch on a real Slurm, with a stand-in for `plexrl` that writes down what happens to it."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from plexrl.slurm.devcluster import SERVICE, Cluster
from tests.slurm.jobs import until

# A head ends on SIGTERM and then tells the agents, which end when told.
STAND_IN = """\
#!/bin/bash
role=$2
say() { echo "$role@$SLURMD_NODENAME $* [$$]" >> SEEN/log; }
trap 'say TERM; test $role = head && { sleep 1; touch SEEN/over; say end; exit 0; }' TERM
say start $3 $4 $5
while true; do
    test $role = agent -a -e SEEN/over && { say end; exit 0; }
    test $role = head -a -e SEEN/code && { code=$(cat SEEN/code); rm SEEN/code; touch SEEN/over; exit $code; }
    sleep 0.2
done
"""


class Pool:
    """A running pool of stand-ins."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder, self.slurm = cluster, folder, cluster.slurm()
        folder.mkdir()
        folder.chmod(0o777)
        (folder / "bin").mkdir()
        stand_in = folder / "bin" / "plexrl"
        stand_in.write_text(STAND_IN.replace("SEEN", str(folder)))
        stand_in.chmod(0o755)
        path = f"{folder}/bin:{cluster.env()['PATH']}"
        options = ["--parsable", "--nodes=2", "--gpus-per-node=1", f"--output={folder}/out"]
        template = cluster.opt / "venv" / "share" / "plexrl" / "sbatch_templates" / "pool.sbatch"
        command = ["sbatch", *options, str(template), "demo", "/some/registry"]
        done = cluster.run(SERVICE, command, env={"PATH": path})
        self.job = int(done.stdout)
        self.until(lambda: self.count("start") == 3)

    def log(self) -> list[str]:
        path = self.folder / "log"
        return path.read_text().splitlines() if path.exists() else []

    def count(self, word: str, role: str = "") -> int:
        return sum(word in line.split() and line.startswith(role) for line in self.log())

    def pid(self, role: str) -> int:
        """Of the last one that started."""
        line = [line for line in self.log() if line.startswith(role) and "start" in line][-1]
        return int(line.partition("[")[2].rstrip("]"))

    def until(self, what: Callable[[], object]) -> None:
        try:
            until(what)
        except AssertionError:
            out = self.folder / "out"
            raise AssertionError("\n".join([*self.log(), out.read_text() if out.exists() else "no output"])) from None

    def ends(self, state: str) -> None:
        self.until(lambda: self.slurm.job(self.job).state == state)


@pytest.fixture
def pool(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Pool]:
    pool = Pool(cluster, cluster.directory / request.node.name)
    yield pool
    cluster.slurm().cancel(pool.job)
    until(lambda: pool.job not in pool.slurm.active())


def test_a_head_and_an_agent_on_each_node(pool: Pool):
    started = sorted(line.partition(" [")[0] for line in pool.log())
    assert started == [f"{who} start demo --registry /some/registry" for who in ("agent@n1", "agent@n2", "head@n1")]


def test_sigterm_to_the_script_drains_through_the_head_alone(pool: Pool):
    pool.slurm.cancel(pool.job, signal="TERM", batch=True)
    pool.ends("COMPLETED")
    assert pool.count("TERM", "head") == 1 and pool.count("TERM", "agent") == 0 and pool.count("end") == 3


def test_scancel_is_a_clean_end(pool: Pool):
    pool.slurm.cancel(pool.job)
    pool.ends("CANCELLED")
    assert pool.count("end", "head") == 1 and pool.count("end", "agent") == 2


def test_a_killed_head_and_agent_start_again(pool: Pool):
    for role, count in (("head", 2), ("agent@n2", 2)):
        pool.cluster.run(SERVICE, ["kill", "-9", str(pool.pid(role))])
        pool.until(lambda role=role, count=count: pool.count("start", role) == count)
    assert pool.count("start", "agent@n1") == 1
    pool.slurm.cancel(pool.job, signal="TERM", batch=True)
    pool.ends("COMPLETED")


def test_a_head_that_fails_is_not_started_again(pool: Pool):
    (pool.folder / "code").write_text("3")
    pool.ends("FAILED")
    assert pool.count("start", "head") == 1


def test_a_head_that_asks_is_started_again(pool: Pool):
    (pool.folder / "code").write_text("75")
    pool.until(lambda: pool.count("start", "head") == 2)
