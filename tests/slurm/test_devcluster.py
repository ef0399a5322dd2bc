"""The development cluster: a Slurm like a site's, that leaves nothing behind."""

import json
import os
import pwd
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from plexrl.slurm.devcluster import DEFAULT_DIR, SERVICE, Cluster
from plexrl.types import BadInput, DoesNotFit, Unavailable
from tests.slurm.jobs import finished, sbatch, until


@pytest.fixture
def installed(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other clusters use what is installed for this one: installing is not what their tests are about."""
    from plexrl.slurm.devcluster import install

    def borrow(opt: Path, *_: object) -> None:
        opt.rmdir()
        opt.symlink_to(cluster.opt)

    monkeypatch.setattr(install, "install", borrow)


def naming(directory: Path) -> list[str]:
    """Processes that belong to a cluster, by its path in their arguments or environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            seen = (process / "cmdline").read_bytes() + b"\0" + (process / "environ").read_bytes()
        except (FileNotFoundError, ProcessLookupError, PermissionError):  # ended, or not even root may look
            continue
        if str(directory).encode() in seen and int(process.name) != os.getpid():
            found.append(seen.split(b"\0")[0].decode())
    return found


def test_a_job_runs_as_its_user_with_a_gpu_of_its_own(cluster: Cluster):
    job = sbatch(cluster, "alice", "id -un; hostname; echo $CUDA_VISIBLE_DEVICES; cat $SLURM_CONF | wc -l", "--gpus=1")
    user, _, gpu, lines = finished(cluster, job).split()
    assert (user, gpu) == ("alice", "0") and int(lines) > 10
    assert pwd.getpwnam("alice").pw_uid != 0


def test_accounting_counts_gpus_by_the_second(cluster: Cluster):
    job = sbatch(cluster, "bob", "srun -l sleep 2", "--nodes=2", "--gpus-per-node=1", "--ntasks-per-node=1")
    finished(cluster, job)
    # slurmdbd learns the nodes of a job a moment after its end.
    (row,) = until(lambda: [r for r in cluster.slurm().sacct([job]) if r.end and len(r.nodes) == 2])
    assert (row.user, row.account, row.gpus, row.nodes, row.state) == ("bob", "bio", 2, ("n1", "n2"), "COMPLETED")
    assert row.elapsed == row.end - row.start and row.gpu_seconds == 2 * row.elapsed >= 4


def test_shares_come_from_slurmdbd(cluster: Cluster):
    shares = {a.account: a.shares for a in cluster.slurm().associations() if not a.user}
    assert {"ml": 50, "bio": 30, "chem": 20}.items() <= shares.items()
    lines = cluster.run("carol", ["sshare", "-nPa", "-o", "Account,User,RawShares"]).stdout.split()
    assert "chem|carol|1" in lines


def test_the_service_account_is_an_operator_and_sees_what_users_do_not(cluster: Cluster):
    job = sbatch(cluster, "alice", "sleep 60")
    ask = ["squeue", "-hj", str(job), "-o", "%u"]
    try:
        assert cluster.run(SERVICE, ask).stdout.strip() == "alice"
        assert cluster.run("bob", ask, check=False).stdout.strip() == ""
    finally:
        cluster.slurm().cancel(job)
    levels = {person.name: person.admin_level for person in cluster.slurm().people()}
    assert levels[SERVICE] == "Operator" and levels["alice"] == "None"
    assert pwd.getpwnam(SERVICE).pw_uid != 0


def test_what_is_installed_is_roots_and_works_for_everybody(cluster: Cluster):
    show = "import plexrl, sys, torch; print(plexrl.__file__, sys.executable)"
    done = cluster.run("alice", ["python", "-I", "-c", show])
    assert all(path.startswith(str(cluster.opt)) for path in done.stdout.split())
    assert cluster.run("bob", ["plexrl", "--version"]).stdout.startswith("plexrl ")
    assert cluster.run("bob", ["test", "-w", str(cluster.opt)], check=False).returncode == 1
    assert cluster.run(SERVICE, ["test", "-w", str(cluster.registry)]).returncode == 0
    assert cluster.run("bob", ["test", "-w", str(cluster.registry)], check=False).returncode == 1


def test_daemons_listen_on_loopback_only(cluster: Cluster):
    ports = json.loads((cluster.directory / "devcluster.json").read_text())["ports"]
    listening = [line.split()[1].split(":") for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    for name, port in ports.items():
        assert {address for address, at in listening if int(at, 16) == port} == {"0100007F"}, name


def test_up_again_changes_nothing(cluster: Cluster):
    before = cluster.status()
    assert before.state == "up" and cluster.up(nodes=2, gpus_per_node=1).daemons == before.daemons
    with pytest.raises(BadInput, match="2 nodes x 1 GPU.*devcluster down"):
        cluster.up(nodes=1, gpus_per_node=1)
    assert cluster.status().daemons == before.daemons


def test_status_by_the_command_line(cluster: Cluster):
    ask = [sys.executable, "-m", "plexrl.cli.main", "devcluster", "status", "--dir", str(cluster.directory)]
    assert "slurmctld" in subprocess.run(ask, capture_output=True, text=True, check=True).stdout
    told = json.loads(subprocess.run([*ask, "--json"], capture_output=True, check=True).stdout)
    assert told["state"] == "up" and told["node_states"].keys() == {"n1", "n2"}


def test_a_place_that_users_cannot_reach_is_refused(tmp_path: Path):
    tmp_path.chmod(0o700)
    with pytest.raises(BadInput, match=f"has mode 0700.*--dir {DEFAULT_DIR}"):
        Cluster(tmp_path / "cluster").up()
    assert not (tmp_path / "cluster").exists()


def test_more_gpus_than_cores_are_refused():
    with pytest.raises(DoesNotFit, match="pretend GPU is a core"):
        Cluster("/var/tmp/plexrl-test-refused").up(nodes=2, gpus_per_node=os.cpu_count())


def test_a_folder_of_somebody_else_is_refused(tmp_path_factory: pytest.TempPathFactory):
    place = Path(f"/var/tmp/plexrl-test-other-{os.getpid()}")
    place.mkdir(mode=0o755)
    try:
        (place / "thesis.tex").touch()
        for call in (Cluster(place).up, Cluster(place).down):
            with pytest.raises(BadInput, match="no development cluster"):
                call()
        assert [path.name for path in place.iterdir()] == ["thesis.tex"]
    finally:
        (place / "thesis.tex").unlink()
        place.rmdir()


def test_a_failed_up_leaves_nothing(cluster: Cluster):
    other = Cluster(f"/var/tmp/plexrl-test-port-{os.getpid()}")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        with pytest.raises(Unavailable, match=f"Port {port} for slurmdbd is in use.*--port"):
            other.up(nodes=1, gpus_per_node=0, first_port=port - 1)
    assert not other.directory.exists() and not naming(other.directory)


def test_a_daemon_that_dies_takes_back_the_whole_up(installed: None, monkeypatch: pytest.MonkeyPatch):
    """Here slurmctld, with four daemons running before it."""
    from plexrl.slurm.devcluster import configs

    sound = configs.slurm_conf
    monkeypatch.setattr(configs, "slurm_conf", lambda at: sound(at) + "SelectType=select/nonsense\n")
    other = Cluster(f"/var/tmp/plexrl-test-dies-{os.getpid()}")
    with pytest.raises(Unavailable):
        other.up(nodes=1, gpus_per_node=1)
    assert not other.directory.exists() and not naming(other.directory)


def test_status_of_what_is_not_there_and_of_what_only_root_may_do(cluster: Cluster):
    assert Cluster("/var/tmp/plexrl-test-absent").status().state == "absent"
    for verb in ("up", "down"):
        done = cluster.run("bob", ["plexrl", "devcluster", verb, "--dir", str(cluster.directory)], check=False)
        assert done.returncode == 2 and "Run it as root" in done.stderr
    asked = cluster.run("bob", ["plexrl", "devcluster", "status", "--json", "--dir", str(cluster.directory)])
    assert json.loads(asked.stdout)["state"] == "up"


def test_down_ends_jobs_and_orphans_and_nobody_else(cluster: Cluster, installed: None):
    """A cluster of its own: the detached child of a job outlives it under proctrack/linuxproc, but not the cluster."""
    other = Cluster(f"/var/tmp/plexrl-test-down-{os.getpid()}")
    detached, stubborn, foreign = (str(1_000_000 + 10 * os.getpid() + index) for index in range(3))
    bystander = subprocess.Popen(["/bin/sleep", foreign])
    try:
        mask = os.umask(0o077)
        other.up(nodes=1, gpus_per_node=1)
        assert os.umask(mask) == 0o077
        sbatch(other, "alice", f"trap '' TERM\nsetsid env -i /bin/sleep {detached} & sleep 1; sleep {stubborn}")
        until(lambda: sleeping(detached) and sleeping(stubborn))
        # A pid of ours that went to another process meanwhile is not ours any more.
        state = json.loads((other.directory / "devcluster.json").read_text())
        state["started"].append(state["started"][0] | {"name": "stale", "pid": bystander.pid})
        (other.directory / "devcluster.json").write_text(json.dumps(state))
        other.down()
        assert not naming(other.directory) and not sleeping(detached) and not sleeping(stubborn)
        assert bystander.poll() is None
        assert other.status().state == "down"
    finally:
        other.down(purge=True)
        bystander.kill()
        bystander.wait()
    assert not other.directory.exists() and cluster.status().state == "up"


def sleeping(seconds: str) -> list[str]:
    """Pids of `sleep SECONDS`."""
    wanted = f"/sleep\0{seconds}\0".encode()
    return [p.parent.name for p in Path("/proc").glob("[0-9]*/cmdline") if reads(p).endswith(wanted)]


def reads(path: Path) -> bytes:
    try:
        return b"/" + path.read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""
