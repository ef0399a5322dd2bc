"""The adapter over pyslurm, where its release is that of the site's Slurm; what it cannot ask, Slurm's commands ask.

pyslurm 25.11 submits no SPANK options, and tells neither of all runs of a requeued job, nor of people, nor of what
slurmctld holds against GrpTRESMins; licences and their reservations it does not know either.
"""

import contextlib
import errno
import json
import queue
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from plexrl.slurm.adapter import Association, JobInfo, JobOutput
from plexrl.slurm.commands import SlurmCommands, expand
from plexrl.types import BadInput, Unavailable

_TIMEOUT_SECONDS = 15.0
_START_SECONDS = 60.0
_RELEASE = re.compile(r"(\d+\.\d+)")
# Slurm's errno.h: what says that a daemon is not there.
_SILENT = frozenset({1001, 1002, 1003, 1004, 5004, 7000, errno.ECONNREFUSED})
_SILENT_WORDS = ("Unable to contact", "Connection refused", "timed out", "Zero Bytes", "slurmdbd")


class SlurmPy(SlurmCommands):
    """See `plexrl.slurm.adapter.Slurm` for what each method means.

    python: the interpreter that has pyslurm. env, timeout: as of SlurmCommands; the child has the same environment.
    """

    def __init__(
        self, env: Mapping[str, str] | None = None, timeout: float = _TIMEOUT_SECONDS, python: str = sys.executable
    ) -> None:
        super().__init__(env, timeout)
        self._python = python
        self._lock = threading.Lock()
        self._child: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str] = queue.Queue()

    def check(self) -> str:
        """pyslurm's version. Raises BadInput where it is not there, cannot be used, or is of another release."""
        with self._lock:
            return self._start()

    def jobs(self, job_ids: Iterable[int]) -> dict[int, JobInfo]:
        ids = sorted(set(job_ids))
        return {job.id: job for job in map(_job_info, self._ask("jobs", ids))} if ids else {}

    def holders(self, licences: Iterable[str]) -> dict[int, JobInfo]:
        names = sorted(set(licences))
        return {job.id: job for job in map(_job_info, self._ask("holders", names))} if names else {}

    def active(self) -> list[int]:
        return self._ask("active")

    def cancel(self, *job_ids: int, signal: str | None = None, batch: bool = False) -> None:
        if job_ids:
            self._ask("cancel", list(job_ids), signal, batch)

    def associations(self) -> list[Association]:
        return msgspec.convert(self._ask("associations"), list[Association])

    def output(self, job_id: int) -> JobOutput | None:
        found = self._ask("output", job_id)
        if found is None:
            return None
        return JobOutput(uid=found["uid"], stdout=Path(found["stdout"]), stderr=Path(found["stderr"]))

    def close(self) -> None:
        """End the child."""
        with self._lock:
            self._end()

    # -- the child -----------------------------------------------------------------------------------------------------

    def _ask(self, verb: str, *args: object) -> Any:
        with self._lock:
            self._start()
            assert self._child is not None and self._child.stdin is not None
            try:
                self._child.stdin.write(json.dumps({"verb": verb, "args": args}) + "\n")
                self._child.stdin.flush()
            except OSError:
                pass  # it has ended, which reading tells with its last words
            answer = self._read(self._timeout)
        if "ok" in answer:
            return answer["ok"]
        if "refused" in answer:
            words = answer["refused"]
            if answer.get("errno") in _SILENT or any(sign in words for sign in _SILENT_WORDS):
                raise Unavailable(f"pyslurm: {words}", "Slurm's daemons do not answer; see scontrol ping")
            raise BadInput(f"pyslurm refused {verb}: {words}")
        raise Unavailable(f"pyslurm: {answer['error']}", "Set slurm_backend: commands while this lasts")

    def _start(self) -> str:
        """The child, if it is not there already; its pyslurm's version."""
        if self._child is not None and self._child.poll() is None:
            return self._version
        self._end()
        self._lines = queue.Queue()
        command = [self._python, "-I", "-m", "plexrl.slurm.pyslurm_child"]
        self._words = tempfile.TemporaryFile("w+")  # a pipe that nobody reads would fill
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._words, text=True, env=self._env
        )
        threading.Thread(target=_pour, args=(self._child.stdout, self._lines), daemon=True).start()
        answer = self._read(_START_SECONDS)
        if "ok" not in answer:
            self._end()
            raise BadInput(answer["error"], "pip install 'plexrl[pyslurm]' for this Slurm, or slurm_backend: commands")
        self._version = str(answer["ok"])
        self._same_release(self._version)
        return self._version

    def _same_release(self, version: str) -> None:
        told = self._call("scontrol", "--version")
        ours, site = _RELEASE.search(version), _RELEASE.search(told)
        if ours and site and ours[1] != site[1]:
            self._end()
            raise BadInput(
                f"pyslurm {version} is for Slurm {ours[1]}, and this site has {told.strip()}",
                f"Install a pyslurm of {site[1]}, or set slurm_backend: commands",
            )

    def _read(self, timeout: float) -> dict[str, Any]:
        """The next answer; when the child has ended, or does not answer in time, why."""
        assert self._child is not None
        try:
            line = self._lines.get(timeout=timeout)
        except queue.Empty:
            self._end()
            raise Unavailable(
                f"pyslurm gave no answer in {timeout:.0f} s", "Is slurmctld up? See scontrol ping"
            ) from None
        if line:
            return json.loads(line)
        code = self._child.wait()
        self._words.seek(0)
        words = self._words.read().strip()
        self._end()
        return {"error": f"its process ended with {code}: {words.splitlines()[-1] if words else 'it said nothing'}"}

    def _end(self) -> None:
        if self._child is None:
            return
        self._child.kill()
        self._child.wait()
        assert self._child.stdin is not None
        with contextlib.suppress(OSError):
            self._child.stdin.close()
        self._words.close()
        self._child = None


def _pour(pipe: Any, lines: "queue.Queue[str]") -> None:
    """Lines of the child as they come; "" at its end."""
    with pipe:
        for line in pipe:
            lines.put(line)
    lines.put("")


def _job_info(found: dict[str, Any]) -> JobInfo:
    return msgspec.convert(found | {"nodes": expand(found["nodes"])}, JobInfo)
