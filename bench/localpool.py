"""A private pool without Slurm: `plexrl pool run`, and programs attached to it. Benches and end-to-end tests use it.

The head refuses uid 0. Where this runs as root, the pool and its programs live in a user namespace, where the same
files belong to an unprivileged uid.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import yaml

from plexrl.types import PlexrlError

_PLEXRL = [sys.executable, "-m", "plexrl.cli.main"]


def unprivileged() -> list[str]:
    """What to put before a command so that it does not run as uid 0."""
    return ["unshare", "--user", "--map-user=1000", "--map-group=1000"] if os.getuid() == 0 else []


class LocalPool:
    """A pool named `test` under a folder of its own. Use as a context manager: nothing outlives it."""

    def __init__(self, root: Path, config: dict, gpus: int = 1):
        self.root = root
        self.state = root / "state"
        self.registry = root / "registry"
        self.gpus = gpus
        self.registry.mkdir(mode=0o755)
        self.config = {"state_dir": str(self.state), **config}
        self.config_file = root / "plexrl.yaml"
        self.config_file.write_text(yaml.safe_dump(self.config))
        self._process: subprocess.Popen | None = None

    def __enter__(self) -> "LocalPool":
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def start(self) -> None:
        """Declare and run it, and wait until it is ready."""
        self.plexrl("pool", "declare", "test", "--private", "--config", str(self.config_file))
        self.log = (self.root / "pool.log").open("ab")
        self._process = subprocess.Popen(self.command(), stdout=self.log, stderr=self.log, start_new_session=True)
        self.wait_until("the pool is ready", lambda: self.live() is not None and self.live()["state"] == "ready")

    def command(self) -> list[str]:
        """What runs the pool."""
        return [*unprivileged(), *_PLEXRL, "pool", "run", "test", "--gpus", str(self.gpus), *self._where()]

    def stop(self) -> None:
        """End it and all that it started."""
        if self._process is None:
            return
        family = [self._process.pid, *(p.pid for p in psutil.Process(self._process.pid).children(recursive=True))]
        self._process.send_signal(signal.SIGINT)
        self._process.wait(timeout=60)
        self._process = None
        self.log.close()
        self.wait_until("every process of the pool ends", lambda: not any(psutil.pid_exists(pid) for pid in family), 20)

    def plexrl(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a verb of the command line on this pool's registry."""
        command = [*unprivileged(), *_PLEXRL, *arguments, *self._where()]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=check)

    def attach(
        self, command: Sequence[str], stderr: int | None = subprocess.PIPE, stdin: bool = False, **env: str
    ) -> subprocess.Popen[str]:
        """Start a command attached to the pool. stderr None: ours. stdin: a pipe."""
        return subprocess.Popen(
            [*unprivileged(), *_PLEXRL, "attach", "--pool", "test", *self._where(), "--", *command],
            stdin=subprocess.PIPE if stdin else None,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**os.environ, "TINKER_TELEMETRY": "0", "PYTHONWARNINGS": "ignore", **env},
        )

    def measure(self, module: str, settings: str) -> Any:
        """Run a module of bench attached to the pool; the JSON of its last line. Its stderr is ours."""
        process = self.attach([sys.executable, "-m", module, settings], stderr=None)
        try:
            out = process.communicate()[0]
        except BaseException:
            process.terminate()
            process.wait()
            raise
        if process.returncode or not out:
            raise PlexrlError(f"{module} ended with {process.returncode}\n{self.logs()}", "See its messages above")
        return json.loads(out.splitlines()[-1])

    def live(self) -> dict | None:
        """The pool's live file."""
        path = self.registry / "test.live.json"
        return json.loads(path.read_text()) if path.exists() else None

    def processes(self, what: str) -> list[psutil.Process]:
        """Processes of this pool whose command line contains `what`."""
        assert self._process is not None
        return [
            p
            for p in psutil.Process(self._process.pid).children(recursive=True)
            if p.is_running() and what in " ".join(p.cmdline())
        ]

    def head(self) -> psutil.Process:
        """The head's process."""
        (head,) = self.processes(" head ")
        return head

    def records(self) -> list:
        """Everything in the journal."""
        from plexrl.pool.journal import replay

        return list(replay(self.state / "journal"))

    def wait_until(self, what: str, holds, timeout: float = 150.0) -> None:
        """Wait for a condition; on time-out fail with the pool's log."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if holds():
                return
            time.sleep(0.05)
        raise AssertionError(f"not within {timeout:.0f} s: {what}\n{self.logs()}")

    def logs(self) -> str:
        """The ends of all logs."""
        paths = [self.root / "pool.log", *sorted((self.state / "logs").glob("*.log"))]
        return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in paths if path.exists())

    def _where(self) -> list[str]:
        return ["--registry", str(self.registry)]


def finish(process: subprocess.Popen[str], timeout: float = 240) -> dict:
    """Wait for an attached program; the JSON of its last line."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"the program did not end within {timeout} s\n{out}\n{err}") from None
    assert process.returncode == 0, f"the program ended with {process.returncode}\n{out}\n{err}"
    return json.loads(out.strip().splitlines()[-1])


def end_in_order() -> None:
    """Have SIGTERM unwind this process, so that what it started ends with it."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
