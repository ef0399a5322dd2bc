"""A development cluster: a real Slurm on one machine, below one directory."""

import fcntl
import os
import pwd
import re
import secrets
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from msgspec import Struct

from plexrl.slurm.devcluster import configs, daemons, install, packages, people, place, ports
from plexrl.slurm.devcluster import state as states
from plexrl.slurm.devcluster.access import Access
from plexrl.slurm.devcluster.configs import Layout
from plexrl.slurm.devcluster.state import Started, State
from plexrl.types import BadInput, PlexrlError, Unavailable

_FOLDERS = ("etc", "run", "log", "munge", "var", "var/slurmctld", "dev", "opt")
_READY_SECONDS, _JOBS_END_SECONDS = 30.0, 8.0


class Status(Struct, frozen=True, kw_only=True):
    """state: up, down, partial (a daemon ended by itself), absent. daemons: name -> pid, None when it does not run."""

    dir: str
    state: str
    nodes: int
    gpus_per_node: int
    daemons: dict[str, int | None]
    node_states: dict[str, str]
    slurm_conf: str
    loopback_only: bool


class Cluster(Access):
    """The development cluster below `directory`, up or not. Its methods may be called from several processes."""

    def __init__(self, directory: Path | str = place.DEFAULT_DIR) -> None:
        super().__init__(Path(directory).absolute())
        self._state_file = self.directory / "devcluster.json"

    def up(
        self,
        nodes: int = 2,
        gpus_per_node: int = 1,
        *,
        models: Mapping[str, Path] | None = None,
        first_port: int | None = None,
    ) -> Status:
        """Start the cluster; nothing happens when it is up already. A failure takes back what this call did.

        models: name -> folder to install as DIR/opt/models/NAME. first_port: the first of nodes + 2 ports in a row
        (default: free ones, remembered). Raises BadInput, DoesNotFit, Unavailable.
        """
        place.check(self.directory, nodes, gpus_per_node)
        packages.ensure()
        mask = os.umask(0o022)  # other users must be able to read it, whatever this one's habits are
        new = not self.directory.exists()
        self.directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        made_users: list[str] = []
        try:
            made_users += people.make_os_users()
            with self._lock():
                state = self._load() or self._adopt()
                self._up(state, nodes, gpus_per_node, models or {}, first_port)
        except BaseException:
            if new:
                self.down(purge=True)
            people.remove_os_users(made_users)
            raise
        finally:
            os.umask(mask)
        return self.status()

    def _adopt(self) -> State:
        if any(self.directory.iterdir()):
            raise BadInput(
                f"{self.directory} is not empty and holds no development cluster", "Name an empty or a new --dir"
            )
        return State()

    def _up(
        self, state: State, nodes: int, gpus_per_node: int, models: Mapping[str, Path], first_port: int | None
    ) -> None:
        wanted, have = (nodes, gpus_per_node), (state.nodes, state.gpus_per_node)
        running = bool(state.started) and all(process.alive() for process in state.started)
        if running and wanted != have:
            raise BadInput(
                f"The development cluster in {self.directory} is up with {have[0]} nodes x {have[1]} GPUs, asked were "
                f"{wanted[0]} x {wanted[1]}",
                f"End it first: plexrl devcluster down --dir {self.directory}",
            )
        if not running:
            self._stop(state)
        state.nodes, state.gpus_per_node = wanted
        try:
            # Recorded before and after each step, so that `down` finds everything even after a kill -9 of this process.
            if not running:
                names = ["slurmctld", "slurmdbd", *(f"n{index}" for index in range(1, nodes + 1))]
                state.ports = ports.pick(names, state.ports, first_port)
            self._save(state)
            self._folders()
            install.install(self.opt, models, state.installed)
            self._save(state)
            if running:
                self._configure(self._layout(state))
            else:
                self._start(state, self._layout(state))
        except BaseException:
            if not running:
                self._stop(state)
            raise

    def down(self, *, purge: bool = False) -> None:
        """End what `up` started, jobs included. Accounting and what is installed stay, unless `purge`.

        purge: also remove the directory. The OS users stay: other clusters of this machine use them too.
        """
        if not self.directory.exists():
            return
        place.check_root()
        with self._lock():
            state = self._load()
            if state is None and any(self.directory.iterdir()):
                raise BadInput(f"{self.directory} holds no development cluster", "Name the right --dir")
            if state is not None:
                self._stop(state)
            if purge:
                # Twice as fast as shutil.rmtree, and there are 47,000 files.
                subprocess.run(["rm", "-rf", "--one-file-system", str(self.directory)], check=True, timeout=300)

    def status(self) -> Status:
        """What runs now."""
        state = self._load()
        if state is None:
            state, word = State(), "absent"
        else:
            alive = [process.alive() for process in state.started]
            word = "down" if not any(alive) else "up" if all(alive) else "partial"
        return Status(
            dir=str(self.directory),
            state=word,
            nodes=state.nodes,
            gpus_per_node=state.gpus_per_node,
            daemons={process.name: process.pid if process.alive() else None for process in state.started},
            node_states=self._node_states() if word in ("up", "partial") else {},
            slurm_conf=str(self.slurm_conf),
            loopback_only=configs.answers_on_loopback(),
        )

    @contextmanager
    def _lock(self) -> Iterator[None]:
        handle = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    def _load(self) -> State | None:
        return states.load(self._state_file)

    def _save(self, state: State) -> None:
        states.save(self._state_file, state)

    def _layout(self, state: State) -> Layout:
        done = subprocess.run([str(packages.program("slurmd")), "-V"], capture_output=True, text=True, timeout=15)
        major, minor = map(int, re.findall(r"\d+", done.stdout)[:2])
        return Layout(
            root=self.directory,
            nodes=state.nodes,
            gpus_per_node=state.gpus_per_node,
            ports=state.ports,
            service_uid=pwd.getpwnam(people.SERVICE).pw_uid,
            version=(major, minor),
        )

    def _folders(self) -> None:
        for name in _FOLDERS:
            (self.directory / name).mkdir(mode=0o755, exist_ok=True)
        (self.directory / "munge").chmod(0o700)
        people.make_homes(self.directory / "home")
        service = pwd.getpwnam(people.SERVICE)
        for folder in (self.registry, self.pools):
            folder.mkdir(mode=0o755, exist_ok=True)
            os.chown(folder, service.pw_uid, service.pw_gid)
        mysql = pwd.getpwnam("mysql")
        for name, mode in (("db", 0o700), ("run/db", 0o700)):
            (self.directory / name).mkdir(mode=mode, exist_ok=True)
            os.chown(self.directory / name, mysql.pw_uid, mysql.pw_gid)
        key = self.directory / "munge" / "munge.key"
        if not key.exists():
            with open(os.open(key, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
                out.write(secrets.token_bytes(128))

    def _configure(self, at: Layout) -> None:
        etc = self.directory / "etc"
        files = {
            "slurm.conf": (configs.slurm_conf(at), 0o644),
            "gres.conf": (configs.gres_conf(at), 0o644),
            "cgroup.conf": (configs.cgroup_conf(at), 0o644),
            "slurmdbd.conf": (configs.slurmdbd_conf(at), 0o600),
            "plugstack.conf": (configs.plugstack_conf(at), 0o644),
            "job_submit.lua": (configs.job_submit_lua(at), 0o644),
        }
        for name, (text, mode) in files.items():
            path = etc / f".{name}.new"
            path.write_text(text)
            path.chmod(mode)
            path.rename(etc / name)  # a command that reads it now sees the old or the new one, not half of it
        for name in at.names:
            folder = self.directory / "dev" / name
            folder.mkdir(exist_ok=True)
            for index in range(at.gpus_per_node):
                device = folder / f"nvidia{index}"
                if not device.exists():
                    os.mknod(device, 0o020666, os.makedev(1, 3))

    def _start(self, state: State, at: Layout) -> None:
        self._configure(at)
        commands = daemons.commands(at)
        database = self.directory / "run" / "db" / "mariadb.socket"
        for stale in (at.munge_socket, database):
            stale.unlink(missing_ok=True)

        def start(name: str, **extra: str) -> Started:
            started = daemons.start(at, name, commands[name], **extra)
            state.started.append(started)
            self._save(state)
            return started

        munged = start("munged")
        daemons.make_database(at)
        mariadbd = start("mariadbd")
        daemons.wait(at, munged, lambda: daemons.answers_unix(at.munge_socket))
        daemons.wait(at, mariadbd, lambda: daemons.answers_unix(database))
        slurmdbd = start("slurmdbd", MYSQL_UNIX_PORT=str(database))
        daemons.wait(at, slurmdbd, lambda: daemons.answers_tcp(at.ports["slurmdbd"]))
        self._load_associations()
        slurmctld = start("slurmctld")
        for name in at.names:
            start(name)
        daemons.wait(at, slurmctld, lambda: daemons.answers_tcp(at.ports["slurmctld"]))
        self._wait_for_nodes(at, slurmctld)

    def _wait_for_nodes(self, at: Layout, slurmctld: Started) -> None:
        deadline = time.monotonic() + _READY_SECONDS
        seen: dict[str, str] = {}
        while not (len(seen) == at.nodes and all(word in ("idle", "mixed", "allocated") for word in seen.values())):
            if time.monotonic() > deadline or not slurmctld.alive():
                raise Unavailable(f"The nodes are not ready: {seen}", f"See the logs in {self.directory}/log")
            time.sleep(0.1)
            seen = self._node_states()
            for name, word in seen.items():
                if word.startswith(("down", "drain")):  # left so by an earlier, broken end
                    self._call("scontrol", "update", f"nodename={name}", "state=resume")

    def _node_states(self) -> dict[str, str]:
        """By node; empty while slurmctld does not answer."""
        done = subprocess.run(
            ["sinfo", "-hN", "-o", "%N %T"], capture_output=True, text=True, timeout=20, env=os.environ | self.env()
        )
        return dict(line.split() for line in done.stdout.splitlines())

    def _stop(self, state: State) -> None:
        """Jobs first, because their steps outlive slurmd; then the daemons, consumers before what they need."""
        by_name = {process.name: process for process in state.started}
        slurmctld = by_name.get("slurmctld")
        if slurmctld is not None and slurmctld.alive():
            with suppress(PlexrlError):  # slurmctld hangs: the keepers below end the jobs' processes all the same
                self._end_jobs()
        slurmds = [process for process in state.started if re.fullmatch(r"n\d+", process.name)]
        daemons.stop(slurmds)
        for name in ("slurmctld", "slurmdbd", "mariadbd", "munged"):
            if name in by_name:
                daemons.stop([by_name[name]])
        if state.started:
            state.started = []
            self._save(state)

    def _end_jobs(self) -> None:
        slurm = self.slurm()
        slurm.cancel(*slurm.active())
        deadline = time.monotonic() + _JOBS_END_SECONDS
        while slurm.active() and time.monotonic() < deadline:
            time.sleep(0.2)

    def _load_associations(self) -> None:
        """One command for all of them, once: each costs half a second."""
        path, text = self.directory / "etc" / "associations", people.associations(configs.CLUSTER)
        if not path.exists() or path.read_text() != text:
            path.with_suffix(".new").write_text(text)
            self._call("sacctmgr", "-i", "load", f"file={path.with_suffix('.new')}")
            path.with_suffix(".new").rename(path)

    def _call(self, *command: str) -> str:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, env=os.environ | self.env())
        if done.returncode:
            raise Unavailable(f"{' '.join(command)} failed: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout
