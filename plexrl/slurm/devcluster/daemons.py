"""Starting, waiting for and ending the daemons of a development cluster."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from plexrl.slurm.devcluster import packages
from plexrl.slurm.devcluster.configs import Layout
from plexrl.slurm.devcluster.state import Started
from plexrl.types import Unavailable

_KEEPER = Path(__file__).with_name("keeper.py")
# How long a daemon may take to end. slurmd would wait for its jobs, which ask for no more time than they had before.
_PATIENCE_SECONDS = {"slurmd": 2, "other": 15}
# After that a keeper kills its daemon and what is left of its jobs; it is killed itself only when it hangs.
_STOP_SECONDS = 30.0


def environment(at: Layout) -> dict[str, str]:
    """What daemons see; jobs inherit parts of it, so nothing of the caller's environment leaks in."""
    return {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8", "SLURM_CONF": str(at.conf)}


def start(at: Layout, name: str, command: list[str], **extra: str) -> Started:
    """Start `command` under a keeper, detached from this session; its output goes to DIR/log/NAME.out."""
    path = packages.program(command[0])
    assert path, command[0]
    patience = str(_PATIENCE_SECONDS.get(command[0], _PATIENCE_SECONDS["other"]))
    with open(at.root / "log" / f"{name}.out", "wb") as out:
        keeper = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_KEEPER), patience, path, *command[1:]],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd="/",
            env=environment(at) | extra,
        )
    try:
        return Started.of(name, keeper.pid)
    except ProcessLookupError:
        raise _died(at, name) from None


def commands(at: Layout) -> dict[str, list[str]]:
    """Each daemon's command, in the order of starting; all stay in the foreground."""
    root = at.root
    munged = ["munged", "--foreground", f"--socket={at.munge_socket}", f"--key-file={root}/munge/munge.key"]
    munged += [f"--pid-file={root}/munge/munged.pid", f"--seed-file={root}/munge/munged.seed"]
    munged += [f"--log-file={root}/munge/munged.log", "--num-threads=4"]
    mariadbd = ["mariadbd", "--no-defaults", "--user=mysql", f"--datadir={root}/db", "--skip-networking"]
    mariadbd += [f"--socket={root}/run/db/mariadb.socket", f"--pid-file={root}/run/db/mariadb.pid"]
    mariadbd += ["--innodb-buffer-pool-size=64M", "--innodb-lock-wait-timeout=900", "--performance-schema=off"]
    return {
        "munged": munged,
        "mariadbd": mariadbd,
        "slurmdbd": ["slurmdbd", "-D"],
        "slurmctld": ["slurmctld", "-D", "-f", str(at.conf)],
        **{name: ["slurmd", "-D", "-N", name, "-f", str(at.conf)] for name in at.names},
    }


def make_database(at: Layout) -> None:
    """Create MariaDB's system tables once."""
    if (at.root / "db" / "mysql").is_dir():
        return
    command = ["mariadb-install-db", "--no-defaults", "--user=mysql", f"--datadir={at.root}/db", "--skip-test-db"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment(at))
    if done.returncode:
        shutil.rmtree(at.root / "db")
        raise Unavailable(f"mariadb-install-db failed:\n{done.stderr or done.stdout}", "See the message")


def answers_unix(path: Path) -> bool:
    """Whether somebody listens on a unix socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


def answers_tcp(port: int) -> bool:
    """Whether somebody listens on a loopback port."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def wait(at: Layout, started: Started, ready: Callable[[], bool], seconds: float = 30.0) -> None:
    """Wait until a daemon answers; Unavailable with its last words when it ends or stays silent."""
    deadline = time.monotonic() + seconds
    while not ready():
        if not started.alive():
            raise _died(at, started.name)
        if time.monotonic() > deadline:
            raise Unavailable(f"{started.name} gives no answer after {seconds:.0f} s", _last_words(at, started.name))
        time.sleep(0.05)


def stop(started: list[Started]) -> None:
    """End these processes and all their descendants: ask, then kill. A process that only has an old pid is spared."""
    alive = [process for process in started if process.alive()]
    for number, seconds in ((signal.SIGTERM, _STOP_SECONDS), (signal.SIGKILL, 5.0)):
        for process in alive:
            os.kill(process.pid, number) if process.alive() else None
        deadline = time.monotonic() + seconds
        while alive and time.monotonic() < deadline:
            for process in alive:
                _reap(process.pid)
            alive = [process for process in alive if process.alive()]
            time.sleep(0.02)


def _reap(pid: int) -> None:
    """A daemon started by this very process is its child and would stay as a zombie."""
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        pass


def _died(at: Layout, name: str) -> Unavailable:
    return Unavailable(f"{name} ended at once", _last_words(at, name))


def _last_words(at: Layout, name: str) -> str:
    logs = [at.root / "log" / f"{name}.out", at.root / "log" / f"{name}.log", at.root / "log" / f"slurmd-{name}.log"]
    logs.append(at.root / "munge" / f"{name}.log")
    lines = [line for log in logs if log.exists() for line in log.read_text(errors="replace").splitlines()[-6:]]
    return "Its last words:\n" + "\n".join(lines)
