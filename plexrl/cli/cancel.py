"""`plexrl cancel`: end a logical job."""

import json
import os
import signal

import psutil
import typer

from plexrl.cli.books import trusted
from plexrl.cli.seen import pools
from plexrl.slurm.commands import SlurmCommands
from plexrl.types import BadInput, Unavailable

app = typer.Typer(add_completion=False)
_LICENCE = "plexrl_"


@app.command()
def cancel(
    job: int = typer.Argument(..., metavar="JOB", min=1, help="Its number, as plexrl jobs shows it up to the point."),
    pool: str = typer.Option("", "--pool", metavar="NAME", help="A private pool that the job is attached to."),
    registry: str = typer.Option(
        "", envvar="PLEXRL_REGISTRY", metavar="DIR", help="The site's registry of pools, or your own pools'."
    ),
    pool_uids: str = typer.Option(
        "", envvar="PLEXRL_POOL_UIDS", metavar="UID,..", help="Accounts whose registry files are believed."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """End a logical job: its calls are cancelled and its models end; checkpoints stay.

    Your own jobs; Slurm lets root and its operators, which a pool's account is, end others' too.
    """
    if pool and trusted(registry, pool_uids).declared(pool).kind == "private":
        _program(job, pools(registry, pool_uids, pool)[0])
    else:
        _slurm_job(job)
    print(json.dumps({"cancelled": job}) if as_json else f"job {job} is told to end")


def _slurm_job(job: int) -> None:
    slurm = SlurmCommands()
    info = slurm.job(job)
    if info is None or not any(name.startswith(_LICENCE) for name in info.licenses):
        raise BadInput(
            f"you see no job {job} that is attached to a pool or waits for one",
            "plexrl jobs lists those; other jobs: scancel",
        )
    slurm.cancel(job)


def _program(job: int, pool: dict) -> None:
    """A private pool has no Slurm: its jobs are processes of its user on this machine."""
    if pool["jobs"] is None:
        raise Unavailable(f"pool {pool['pool']} is {pool['state']}, and its jobs are not known", "Try again")
    if not any(each["job"].partition(".")[0] == str(job) for each in pool["jobs"]):
        raise BadInput(f"job {job} is not attached to pool {pool['pool']}", "plexrl jobs lists those that are")
    try:
        if "attach" not in psutil.Process(job).cmdline():
            raise BadInput(f"process {job} is not plexrl attach any more", "The pool will see that the job has ended")
        os.kill(job, signal.SIGTERM)
    except (psutil.NoSuchProcess, ProcessLookupError) as error:
        raise BadInput(f"job {job} has ended", "The pool will see it in a moment") from error
    except (psutil.AccessDenied, PermissionError) as error:
        raise BadInput(f"job {job} is another user's", "Ask them, or root") from error
