"""The adapter over Slurm's own commands, with formats chosen field by field.

`scontrol show job` is not parsed: its lines mix the user's own text (job name, comment) with what must be trusted.
Fields are separated by a token drawn for each call, which nobody can have put into a field before.
"""

import os
import re
import secrets
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from plexrl.slurm.adapter import AccountingRow, Association, JobInfo, JobOutput, Person
from plexrl.slurm.output import OUTPUT_FIELDS, job_output
from plexrl.types import BadInput, Unavailable

_TIMEOUT_SECONDS = 15.0
_NO_JOB = "Invalid job id specified"
_ENDED = ("Invalid job id specified", "Job/step already completing or completed")
_DOWN = (
    "Unable to contact slurm controller",
    "Connection refused",
    "Problem talking to the database",
    "Unable to connect to database",
    "Socket timed out",
    "Zero Bytes were transmitted or received",
)

_JOB_FIELDS = (
    "JobID State UserID UserName Account RestartCnt StartTime tres-alloc Licenses NodeList Partition Reason "
    "admin_comment QOS"
).split()
_QUEUE_STATES = "PENDING,RUNNING,SUSPENDED,COMPLETING,CONFIGURING,STAGE_OUT,SIGNALING,STOPPED"
_SACCT_FIELDS = "JobIDRaw State User Account AllocTRES Start End ElapsedRaw NodeList AdminComment".split()


class SlurmCommands:
    """See `plexrl.slurm.adapter.Slurm` for what each method means.

    env: overrides for the environment of the commands (SLURM_CONF, PATH). timeout: seconds per command.
    """

    def __init__(self, env: Mapping[str, str] | None = None, timeout: float = _TIMEOUT_SECONDS) -> None:
        # SLURM_* and SQUEUE_*/SACCT_* variables of a surrounding job would change what the commands print.
        kept = {k: v for k, v in os.environ.items() if not re.match(r"(SLURM|SBATCH|SQUEUE|SACCT|SCANCEL)_", k)}
        conf = {"SLURM_CONF": os.environ["SLURM_CONF"]} if "SLURM_CONF" in os.environ else {}
        self._env = kept | conf | dict(env or {}) | {"SLURM_TIME_FORMAT": "%s"}
        self._timeout = timeout

    def submit(
        self,
        script: Path,
        arguments: Sequence[str] = (),
        options: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> int:
        output = self._call("sbatch", "--parsable", *options, str(script), *arguments, env=env)
        return int(output.strip().splitlines()[-1].partition(";")[0])

    def job(self, job_id: int) -> JobInfo | None:
        return self.jobs([job_id]).get(job_id)

    def jobs(self, job_ids: Iterable[int]) -> dict[int, JobInfo]:
        ids = sorted(set(job_ids))
        if not ids:
            return {}
        found = self._squeue("--states=all", f"--jobs={','.join(map(str, ids))}")
        return {job.id: job for job in found if job.id in ids}

    def holders(self, licences: Iterable[str]) -> dict[int, JobInfo]:
        names = sorted(set(licences))
        if not names:
            return {}
        found = self._squeue(f"--states={_QUEUE_STATES}", f"--licenses={','.join(names)}")
        return {job.id: job for job in found if job.licenses.keys() & set(names)}

    def _squeue(self, *options: str) -> list[JobInfo]:
        token = _token()
        fields = ",".join(f"{name}:0{token}" for name in _JOB_FIELDS)
        command = ["squeue", "--noheader", "--array", *options]
        done = self._try(*command, f"--Format={fields}")
        if done.returncode and _NO_JOB in done.stderr:
            return []
        output = self._checked(command, done)
        if "Invalid job format" in done.stderr:  # squeue goes on without the field, and ends with 0
            raise Unavailable(f"This Slurm's squeue lacks a field: {done.stderr.strip()}", "See squeue --helpformat")
        return [_job_info(row) for row in _rows(output, token, len(_JOB_FIELDS))]

    def active(self) -> list[int]:
        output = self._call("squeue", "--noheader", "--array", f"--states={_QUEUE_STATES}", "--Format=JobID:0")
        return [int(line) for line in output.split()]

    def cancel(self, *job_ids: int, signal: str | None = None, batch: bool = False) -> None:
        if not job_ids:
            return
        options = [*([f"--signal={signal}"] if signal else []), *(["--batch"] if batch else [])]
        command = ["scancel", *options, *map(str, job_ids)]
        done = self._try(*command)
        if done.returncode and not any(word in done.stderr for word in _ENDED):
            self._checked(command, done)

    def sacct(self, job_ids: Iterable[int]) -> list[AccountingRow]:
        ids = sorted(set(job_ids))
        if not ids:
            return []
        token = _token()
        fields = ",".join(_SACCT_FIELDS)
        command = ["sacct", "--noheader", "--parsable", f"--delimiter={token}", "--duplicates", "--allocations"]
        output = self._call(*command, f"--jobs={','.join(map(str, ids))}", f"--format={fields}")
        return [_accounting_row(row) for row in _rows(output, token, len(_SACCT_FIELDS))]

    def associations(self) -> list[Association]:
        cluster = self._cluster()
        fields = "Account,User,ParentName,Share,GrpTRESMins"
        output = self._call("sacctmgr", "-nP", "show", "assoc", f"cluster={cluster}", f"format={fields}")
        found = []
        for line in output.splitlines():
            account, user, parent, shares, minutes = line.split("|")
            number = int(shares) if shares.isdigit() else None
            association = Association(
                account=account, user=user, parent=parent, shares=number, grp_tres_mins=_tres(minutes)
            )
            found.append(association)
        return found

    def gpu_seconds(self) -> dict[tuple[str, str], int]:
        output = self._call("sshare", "--all", "--noheader", "--parsable2", "--format=Account,User,GrpTRESRaw")
        rows = [line.split("|") for line in output.splitlines()]
        found = {(account.strip(), user.strip()): 60 * _gpus(_tres(minutes)) for account, user, minutes in rows}
        return {who: seconds for who, seconds in found.items() if seconds}

    def output(self, job_id: int) -> JobOutput | None:
        token = _token()
        names = ",".join(f"{name}:0{token}" for name in OUTPUT_FIELDS)
        command = ["squeue", "--noheader", "--states=all", f"--jobs={job_id}", f"--Format={names}"]
        done = self._try(*command)
        if done.returncode and _NO_JOB in done.stderr:
            return None
        rows = _rows(self._checked(command, done), token, len(OUTPUT_FIELDS))
        return job_output(dict(zip(OUTPUT_FIELDS, rows[0], strict=True))) if rows else None

    def people(self) -> list[Person]:
        output = self._call("sacctmgr", "-nP", "show", "user", "withcoordinator", "format=User,AdminLevel,Coordinators")
        rows = [line.split("|") for line in output.splitlines()]
        return [
            Person(name=name, admin_level=level, coordinates=tuple(filter(None, accounts.split(","))))
            for name, level, accounts in rows
        ]

    def licenses(self) -> dict[str, int]:
        output = self._call("scontrol", "--oneliner", "show", "licenses")
        found = re.findall(r"^LicenseName=(\S+)\s+Total=(\d+)", output, re.MULTILINE)
        return {name: int(total) for name, total in found}

    def hold_licenses(self, reservation: str, user: str, licenses: Mapping[str, int]) -> None:
        wanted = ",".join(f"{name}:{count}" for name, count in licenses.items())
        command = ["scontrol", "create", "reservation", f"reservationname={reservation}", "starttime=now"]
        command += ["duration=UNLIMITED", f"user={user}", "flags=any_nodes", "nodecnt=0", f"licenses={wanted}"]
        done = self._try(*command)
        if done.returncode and not self._reserved(reservation):
            self._checked(command, done)

    def release_licenses(self, reservation: str) -> None:
        command = ["scontrol", "delete", f"reservationname={reservation}"]
        done = self._try(*command)
        if done.returncode and self._reserved(reservation):
            self._checked(command, done)

    def _reserved(self, reservation: str) -> bool:
        output = self._call("scontrol", "--oneliner", "show", "reservations")
        return any(line.startswith(f"ReservationName={reservation} ") for line in output.splitlines())

    def _cluster(self) -> str:
        output = self._call("scontrol", "show", "config")
        match = re.search(r"^ClusterName\s*=\s*(\S+)", output, re.MULTILINE)
        if match is None:
            raise Unavailable("scontrol show config names no cluster")
        return match[1]

    def _call(self, *command: str, env: Mapping[str, str] | None = None) -> str:
        return self._checked(command, self._try(*command, env=env))

    def _try(self, *command: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(
                command, capture_output=True, text=True, timeout=self._timeout, env=self._env | dict(env or {})
            )
        except subprocess.TimeoutExpired as error:
            raise Unavailable(
                f"{command[0]} gave no answer in {self._timeout:.0f} s", "Is slurmctld up? See scontrol ping"
            ) from error
        except FileNotFoundError as error:
            mend = "Install Slurm's client commands (Debian: slurm-client) or put them on PATH"
            raise Unavailable(f"There is no command {command[0]}", mend) from error

    def _checked(self, command: Sequence[str], done: subprocess.CompletedProcess[str]) -> str:
        if not done.returncode:
            return done.stdout
        words = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
        if any(sign in words for sign in _DOWN):
            raise Unavailable(f"{command[0]}: {words}", "Slurm's daemons do not answer; see scontrol ping")
        raise BadInput(f"{command[0]} refused: {words}")


def _token() -> str:
    return f"\x1f{secrets.token_hex(8)}\x1f"


def _rows(output: str, token: str, width: int) -> list[list[str]]:
    """Cut at tokens only: a field may hold line ends."""
    cells = output.split(token)
    if len(cells) % width != 1 or cells[-1].strip():
        raise Unavailable("Slurm's output has another shape than its format asked for", f"It begins: {output[:200]!r}")
    cells = [cell.strip() for cell in cells[:-1]]
    return [cells[start : start + width] for start in range(0, len(cells), width)]


def _job_info(row: list[str]) -> JobInfo:
    job, state, uid, user, account, restarts, start, tres, licenses, nodes, partition, reason, comment, qos = row
    allocated = _tres(tres)
    return JobInfo(
        id=int(job),
        state=state,
        uid=int(uid),
        user=user,
        account=_text(account),
        restart_count=int(restarts),
        start_time=_time(start),
        gpus=_gpus(allocated),
        tres=allocated,
        licenses=_licenses(licenses),
        nodes=expand(nodes),
        partition=partition,
        reason=_text(reason),
        admin_comment=_text(comment),
        qos=_text(qos),
    )


def _accounting_row(row: list[str]) -> AccountingRow:
    job, state, user, account, tres, start, end, elapsed, nodes, comment = row
    allocated = _tres(tres)
    return AccountingRow(
        job=int(job),
        state=state.split()[0],  # "CANCELLED by 1000"
        user=user,
        account=account,
        gpus=_gpus(allocated),
        tres=allocated,
        start=_time(start),
        end=_time(end),
        elapsed=int(elapsed or 0),
        nodes=expand(nodes),
        admin_comment=comment,
    )


def _text(value: str) -> str:
    return "" if value in ("(null)", "N/A", "None", "None assigned") else value


def _time(value: str) -> int | None:
    return int(value) if value.isdigit() and int(value) else None


def _tres(value: str) -> dict[str, str]:
    return dict(part.split("=", 1) for part in _text(value).split(",") if "=" in part)


def _gpus(tres: Mapping[str, str]) -> int:
    """gres/gpu is the sum; typed entries (gres/gpu:h100) repeat it."""
    return int(tres.get("gres/gpu", "0"))


def _licenses(value: str) -> dict[str, int]:
    pairs = [part.partition(":") for part in re.split(r"[,|;]", _text(value)) if part]
    return {name: int(count or 1) for name, _, count in pairs}


def expand(nodes: str) -> tuple[str, ...]:
    """Slurm's host list as names: `n[1-2,07],gpu1` -> n1, n2, n07, gpu1. Raises BadInput for what is no host list."""
    names: list[str] = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", _text(nodes)):
        found = [""]
        for piece in re.findall(r"\[[^\]]*\]|[^\[]+", part):
            found = [head + tail for head in found for tail in _ranges(piece)]
        names += found
    return tuple(names)


def _ranges(piece: str) -> list[str]:
    if not piece.startswith("["):
        return [piece]
    out = []
    for item in piece[1:-1].split(","):
        low, dash, high = item.partition("-")
        if not low.isdigit() or (dash and not high.isdigit()):
            raise BadInput(f"{piece} is no range of a Slurm host list")
        out += [f"{number:0{len(low)}d}" for number in range(int(low), int(high if dash else low) + 1)]
    return out
