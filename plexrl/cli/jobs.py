"""`plexrl jobs`: logical jobs, attached and not yet, and why each of them waits."""

import json
import os
import shutil
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from plexrl.cli.seen import pools
from plexrl.slurm.adapter import JobInfo
from plexrl.slurm.commands import SlurmCommands
from plexrl.types import PlexrlError

app = typer.Typer(add_completion=False)
_LICENCE = "plexrl_"


@app.command()
def jobs(
    pool: str = typer.Option("", "--pool", metavar="NAME", help="Of this pool; default: the job's own, else all."),
    registry: str = typer.Option(
        "", envvar="PLEXRL_REGISTRY", metavar="DIR", help="The site's registry of pools, or your own pools'."
    ),
    pool_uids: str = typer.Option(
        "", envvar="PLEXRL_POOL_UIDS", metavar="UID,..", help="Accounts whose registry files are believed."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Your logical jobs with what each of them waits for; root and a pool's account see all of its jobs.

    A job that waits in Slurm is shown with what its pool does: it is down, starting, draining, or has no place.
    """
    found = pools(registry, pool_uids, pool)
    rows = [row for each in found for row in _attached(each)]
    rows += _in_slurm(found, {row["job"].partition(".")[0] for row in rows})
    if as_json:
        print(json.dumps(rows))
        return
    table = Table("job", "pool", "user", "state", "open calls", "models", "why it waits")
    for row in rows:
        calls = "-" if row["open_calls"] is None else str(row["open_calls"])
        table.add_row(
            row["job"], row["pool"], row["user"], row["state"], calls, "\n".join(row["models"]) or "-", row["why"]
        )
    Console().print(table if rows else "no logical jobs")


def _attached(pool: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "job": job["job"],
            "pool": pool["pool"],
            "user": job["user"],
            "state": "ATTACHED",
            "open_calls": job["open_calls"],
            "models": list(job["models"]),
            "why": job["explained"],
        }
        for job in pool["jobs"] or ()
    ]


def _in_slurm(found: list[dict[str, Any]], known: set[str]) -> list[dict[str, Any]]:
    """Jobs that hold or want a pool's licence and that no head told of."""
    if not shutil.which("squeue"):
        return []
    by_name = {each["pool"]: each for each in found}
    try:
        infos = SlurmCommands().holders(f"{_LICENCE}{name}" for name in by_name).values()
    except PlexrlError as error:
        typer.echo(f"plexrl: Slurm was not asked: {error}", err=True)
        return []
    rows = []
    for info in sorted(infos, key=lambda info: info.id):
        wanted = [name.removeprefix(_LICENCE) for name in info.licenses if name.startswith(_LICENCE)]
        pool = next((by_name[name] for name in wanted if name in by_name), None)
        if pool is None or str(info.id) in known or not (pool["everybody"] or os.getuid() == info.uid):
            continue
        rows.append(
            {
                "job": str(info.id),
                "pool": pool["pool"],
                "user": info.user,
                "state": info.state,
                "open_calls": None,
                "models": [],
                "why": _why(info, pool),
            }
        )
    return rows


def _why(info: JobInfo, pool: dict[str, Any]) -> str:
    name, state = pool["pool"], pool["state"]
    if info.state == "PENDING" and info.reason == "Licenses":
        return {
            "down": f"Pool {name} is down; the job starts when it is up.",
            "starting": f"Pool {name} is starting; the job starts when it is ready.",
            "draining": f"Pool {name} is draining; the job starts under the next one.",
        }.get(state, f"Pool {name} has no place: as many jobs as it takes are attached.")
    if info.state == "PENDING":
        return f"It waits in Slurm: {info.reason}."
    if state == "ready":
        return "What its calls wait for, plexrl explain tells inside the job."
    return f"Pool {name} is {state}: the job's requests are held until it is ready."
