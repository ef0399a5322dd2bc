"""`plexrl logs`: what a logical job printed, and what the pool's own log says of it."""

import json
import os
import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from plexrl.cli.books import trusted
from plexrl.slurm.adapter import JobOutput
from plexrl.slurm.commands import SlurmCommands
from plexrl.types import BadInput, PlexrlError, Unavailable
from plexrl.wire.registry import Declared, Registry

app = typer.Typer(add_completion=False)
_TAIL_BYTES = 1 << 20
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@app.command()
def logs(
    job: int = typer.Argument(..., metavar="JOB", min=1, help="Its number in Slurm."),
    lines: int = typer.Option(50, "--lines", "-n", min=0, help="So many of the newest lines of each file; 0: all."),
    registry: str = typer.Option(
        "", envvar="PLEXRL_REGISTRY", metavar="DIR", help="The site's registry of pools, or your own pools'."
    ),
    pool_uids: str = typer.Option(
        "", envvar="PLEXRL_POOL_UIDS", metavar="UID,..", help="Accounts whose registry files are believed."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Print the end of a job's output, and the lines of its pool's log that name the job or a model of its.

    The pool's log is shown to root and the pool's account. Slurm forgets where a job wrote some minutes after its end.
    """
    found: list[dict[str, Any]] = []
    output = SlurmCommands().output(job) if shutil.which("squeue") else None
    if output is not None:
        for what, path in {"stdout": output.stdout, "stderr": output.stderr}.items():
            if what == "stdout" or path != output.stdout:
                found.append({"what": what, "path": str(path), **_read(path, output, lines)})
    if registry:
        found += _pools(trusted(registry, pool_uids), str(job), lines)
    if not found:
        raise BadInput(
            f"nothing is known of job {job}", "Slurm forgets jobs some minutes after their end: look at your file"
        )
    if as_json:
        print(json.dumps(found))
        return
    for each in found:
        print(f"--- {each['what']}: {each['path']}" + (f" ({each['error']})" if each["error"] else ""))
        for line in each["lines"]:
            print(_CONTROL.sub("?", line))


def _read(path: Path, output: JobOutput, lines: int) -> dict[str, Any]:
    """The end of a file that the job's user chose: for somebody else a plain file of that user's alone."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return {"lines": [], "error": "not there yet, or on another host"}
    except OSError as error:
        return {"lines": [], "error": error.strerror}
    with os.fdopen(fd, "rb") as file:
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode) or (about.st_uid != output.uid and os.getuid() != output.uid):
            return {"lines": [], "error": "no plain file of the job's user"}
        if lines and about.st_size > _TAIL_BYTES:
            file.seek(about.st_size - _TAIL_BYTES)
        text = file.read().decode(errors="replace").splitlines()
    return {"lines": text[-lines:] if lines else text, "error": ""}


def _pools(books: Registry, job: str, lines: int) -> Iterator[dict[str, Any]]:
    """From each pool into which this account may look, the lines about the job."""
    for name in books.names():
        declared = books.declared(name)
        if os.getuid() in (0, declared.owner_uid):
            try:
                yield from _pool(declared, job, lines)
            except OSError as error:
                raise PlexrlError(f"the logs of pool {name} cannot be read ({error.strerror})") from error


def _pool(declared: Declared, job: str, lines: int) -> Iterator[dict[str, Any]]:
    names = _names(Path(declared.state_dir) / "run" / "status.json", job)
    about = re.compile("|".join(rf"(?<![\w.:-]){re.escape(name)}(?![\w:-])" for name in names))
    state = Path(declared.state_dir)
    for path in sorted([*state.glob("pool-*.out"), *(state / "logs").glob("*.log")]):
        with path.open(errors="replace") as file:
            told = [line.rstrip("\n") for line in file if about.search(line)]
        if told:
            what = f"pool {declared.name}"
            yield {"what": what, "path": str(path), "lines": told[-lines:] if lines else told, "error": ""}


def _names(status: Path, job: str) -> list[str]:
    """How logs call a job: by its number with the restart count, and by its models and their gangs' names."""
    names = [f"job {job}", *(f"{job}.{restart}" for restart in range(10))]
    try:
        jobs = json.loads(status.read_bytes())["jobs"]
    except FileNotFoundError:
        return names
    except ValueError as error:
        raise Unavailable(f"{status} is not whole", "Try again") from error
    return names + [model for name, told in jobs.items() if name.partition(".")[0] == job for model in told["models"]]
