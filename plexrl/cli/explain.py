"""`plexrl explain`: why a job waits, and what for."""

import json
import os
import time
from pathlib import Path

import typer

from plexrl.cli.books import trusted
from plexrl.cli.inside import ask, own_job, own_pool
from plexrl.types import BadInput, PlexrlError
from plexrl.wire.registry import Registry

app = typer.Typer(add_completion=False)
_OLD_S = 10


@app.command()
def explain(
    job: str = typer.Argument("", metavar="[JOB]", help="The job's number in Slurm; inside a job: its own."),
    registry: str = typer.Option(
        "", envvar="PLEXRL_REGISTRY", metavar="DIR", help="The site's registry of pools, or your own pools'."
    ),
    pool_uids: str = typer.Option(
        "", envvar="PLEXRL_POOL_UIDS", metavar="UID,..", help="Accounts whose registry files are believed."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Say in a sentence or two why a job waits, and what for.

    Inside a job of a pool, also from another terminal with its environment, it tells of that job. Root and the pool's
    account may ask for any job of the pool, from anywhere that sees its state_dir.
    """
    if own_pool() and job in ("", own_job()):
        found = ask("explain")
    elif not job:
        raise BadInput("no job was named", "Write: plexrl explain JOB, or run it inside a job of a pool")
    else:
        found = look(trusted(registry, pool_uids) if registry else None, job)
    print(json.dumps(found) if as_json else found["explained"])


def look(books: Registry | None, job: str) -> dict[str, str]:
    """What the heads of pools that this account may look into say of a job. Raises BadInput."""
    if books is None:
        raise BadInput("no registry was named", "Set PLEXRL_REGISTRY, or run it inside the job")
    declared = [books.declared(name) for name in books.names()]
    ours = [pool for pool in declared if os.getuid() in (0, pool.owner_uid)]
    if not ours:
        raise BadInput(
            "only root and the account of a pool may ask about jobs from outside of them",
            "Run `plexrl explain` inside the job, or ask one of them",
        )
    for pool in ours:
        path = Path(pool.state_dir) / "run" / "status.json"
        if not path.exists():
            continue
        try:
            status = json.loads(path.read_bytes())
        except OSError as error:
            raise PlexrlError(f"{path} cannot be read ({error.strerror})") from error
        for name, found in status["jobs"].items():
            if job in (name, name.partition(".")[0]):
                text = found["explained"]
                age_s = int(time.time() - status["now_us"] / 1e6)
                if age_s > _OLD_S:
                    text += f" (The head said so {age_s} s ago, and nothing since.)"
                return {"job": name, "pool": pool.name, "explained": text}
    raise BadInput(
        f"job {job} is attached to none of the pools {', '.join(pool.name for pool in ours)}",
        f"While it is PENDING it waits in Slurm: squeue -j {job}",
    )
