"""The process that has pyslurm in it: requests as JSON lines on stdin, answers on stdout. `pyslurm_backend` starts it.

A process of its own because libslurm ends the process that it is in when it finds no configuration, keeps state for
good, and is GPL. Nothing of it is imported by anybody else.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

_ENDED = {
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "LAUNCH_FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "RECONFIG_FAIL",
    "REVOKED",
    "TIMEOUT",
}
_NO_JOB = 2017  # ESLURM_INVALID_JOB_ID


def main() -> None:
    """Serve until stdin ends."""
    answers, sys.stdout = sys.stdout, sys.stderr  # whatever libslurm prints is no answer

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    try:
        import pyslurm
    except ImportError as error:
        say({"error": f"pyslurm cannot be imported: {error}"})
        return
    say({"ok": pyslurm.__version__})
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            say({"ok": _VERBS[asked["verb"]](pyslurm, *asked["args"])})
        except pyslurm.RPCError as error:
            say({"refused": str(error), "errno": error.errno})
        except Exception as error:
            say({"error": f"{type(error).__name__}: {error}"})


def _jobs(pyslurm: Any, ids: list[int]) -> list[dict[str, Any]]:
    if len(ids) == 1:
        try:
            return [_job(pyslurm.Job.load(ids[0]))]
        except pyslurm.RPCError as error:
            if error.errno == _NO_JOB:
                return []
            raise
    return [_job(job) for job in pyslurm.Jobs.load().values() if job.id in set(ids)]


def _holders(pyslurm: Any, licences: list[str]) -> list[dict[str, Any]]:
    found = [_job(job) for job in pyslurm.Jobs.load().values() if job.state not in _ENDED]
    return [job for job in found if job["licenses"].keys() & set(licences)]


def _active(pyslurm: Any) -> list[int]:
    return [job.id for job in pyslurm.Jobs.load().values() if job.state not in _ENDED]


def _cancel(pyslurm: Any, ids: list[int], signal: str | None, batch: bool) -> None:
    for job in ids:
        try:
            pyslurm.Job(job).send_signal(signal or "KILL", steps="batch" if batch else "children")
        except pyslurm.RPCError as error:
            if error.errno != _NO_JOB:
                raise


def _associations(pyslurm: Any) -> list[dict[str, Any]]:
    cluster = pyslurm.settings.LOCAL_CLUSTER
    found = pyslurm.db.Associations.load().get(cluster, {})
    return [
        {
            "account": each.account,
            "user": each.user or "",
            "parent": "" if each.user else each.parent_account or "",
            "shares": each.shares if each.shares is not None and each.shares < 0x7FFFFFFF else None,
            "grp_tres_mins": _tres(each.group_tres_mins),
        }
        for each in found.values()
    ]


def _output(pyslurm: Any, job_id: int) -> dict[str, Any] | None:
    try:
        job = pyslurm.Job.load(job_id)
    except pyslurm.RPCError as error:
        if error.errno == _NO_JOB:
            return None
        raise
    return {"uid": job.user_id, "stdout": job.standard_output, "stderr": job.standard_error}


def _job(job: Any) -> dict[str, Any]:
    tres = _tres(job.allocated_tres)
    pairs = [part.partition(":") for part in job.licenses or ()]
    return {
        "id": job.id,
        "state": job.state,
        "uid": job.user_id,
        "user": job.user_name,
        "account": job.account or "",
        "restart_count": job.requeue_count or 0,
        "start_time": job.start_time or None,
        "gpus": int(tres.get("gres/gpu", "0")),
        "tres": tres,
        "licenses": {name: int(count or 1) for name, _, count in pairs},
        "nodes": job.allocated_nodes or "",
        "partition": job.partition or "",
        "reason": "" if job.state_reason in (None, "None") else job.state_reason,
        "admin_comment": job.admin_comment or "",
        "qos": job.qos or "",
    }


def _tres(tres: Any) -> dict[str, str]:
    """As Slurm prints them; memory in the largest unit that says it exactly."""
    found = {}
    for name, value in (tres.to_dict(flatten_limits=True) if tres is not None else {}).items():
        count = getattr(value, "count", value)
        if isinstance(count, int):
            found[name] = _memory(count) if name == "mem" else str(count)
    return found


def _memory(mebibytes: int) -> str:
    units = "MGTP"
    at = 0
    while mebibytes and mebibytes % 1024 == 0 and at < len(units) - 1:
        mebibytes //= 1024
        at += 1
    return f"{mebibytes}{units[at]}"


_VERBS: dict[str, Callable[..., Any]] = {
    "jobs": _jobs,
    "holders": _holders,
    "active": _active,
    "cancel": _cancel,
    "associations": _associations,
    "output": _output,
}


if __name__ == "__main__":
    main()
