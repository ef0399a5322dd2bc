"""`plexrl queue`: which GPUs work for whom now, and how many calls wait."""

import json

import typer
from rich.console import Console
from rich.table import Table

from plexrl.cli.seen import pools

app = typer.Typer(add_completion=False)


@app.command()
def queue(
    pool: str = typer.Option("", "--pool", metavar="NAME", help="This pool; default: the job's own, else all."),
    registry: str = typer.Option(
        "", envvar="PLEXRL_REGISTRY", metavar="DIR", help="The site's registry of pools, or your own pools'."
    ),
    pool_uids: str = typer.Option(
        "", envvar="PLEXRL_POOL_UIDS", metavar="UID,..", help="Accounts whose registry files are believed."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON; what may not be seen is null."),
) -> None:
    """Pools, their GPUs with the gang that has each one's turn, and how many calls are open.

    Inside a job its own pool. From outside everybody sees each pool's state; root and the pool's account see inside.
    """
    found = pools(registry, pool_uids, pool)
    if as_json:
        keys = ("pool", "state", "gpus", "open_calls", "jobs_attached")
        print(json.dumps([{key: each.get(key) for key in keys} for each in found]))
        return
    console = Console()
    for each in found:
        if each["gpus"] is None:
            console.print(f"pool {each['pool']}: [bold]{each['state']}[/bold]")
            continue
        calls, jobs = each["open_calls"], each["jobs_attached"]
        console.print(f"pool {each['pool']}: [bold]{each['state']}[/bold], {calls} open calls of {jobs} jobs")
        table = Table("GPU", "turn", "phase", "")
        for gpu in each["gpus"]:
            table.add_row(gpu["gpu"], gpu["turn"] or "-", gpu["phase"] or "-", "yours" if gpu["yours"] else "")
        console.print(table)
