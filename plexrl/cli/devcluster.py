"""`plexrl devcluster`: a real Slurm on this one machine."""

import time
from pathlib import Path

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from plexrl.slurm.devcluster import DEFAULT_DIR, Cluster, Status

app = typer.Typer(
    no_args_is_help=True,
    help="A real Slurm on this one machine, for development and tests: MUNGE, MariaDB, slurmdbd, slurmctld and one "
    "slurmd per node, with GPUs by device nodes, a service account and three users. Needs root.",
)

_DIR = typer.Option(DEFAULT_DIR, "--dir", help="Where all of it lives; every user must be able to go there.")
_JSON = typer.Option(False, "--json", help="Print JSON.")


@app.command()
def up(
    directory: Path = _DIR,
    nodes: int = typer.Option(2, "--nodes", help="Nodes, each a slurmd of its own."),
    gpus_per_node: int = typer.Option(1, "--gpus-per-node", help="Pretend GPUs per node; never more GPUs than cores."),
    model: list[Path] = typer.Option([], "--model", help="Model folder to install for all users; may be repeated."),
    port: int | None = typer.Option(None, "--port", help="First of nodes + 2 TCP ports in a row; default: free ones."),
    as_json: bool = _JSON,
) -> None:
    """Start the cluster and wait until it takes jobs. Nothing happens when it is up already."""
    began = time.monotonic()
    cluster = Cluster(directory)
    status = cluster.up(nodes, gpus_per_node, models={path.name: path for path in model}, first_port=port)
    _show(status, as_json)
    if not as_json:
        print(f"ready after {time.monotonic() - began:.1f} s; to use it:")
        print(f"  export SLURM_CONF={status.slurm_conf} PATH={cluster.opt}/bin:{cluster.opt}/venv/bin:$PATH")


@app.command()
def status(directory: Path = _DIR, as_json: bool = _JSON) -> None:
    """Show what runs. Ends with 0 when the cluster is up, 1 otherwise."""
    found = Cluster(directory).status()
    _show(found, as_json)
    raise typer.Exit(0 if found.state == "up" else 1)


@app.command()
def down(
    directory: Path = _DIR,
    purge: bool = typer.Option(False, "--purge", help="Also remove the directory; the users stay."),
) -> None:
    """End exactly what `up` started, jobs included. What is installed and the accounting stay, unless --purge."""
    Cluster(directory).down(purge=purge)


def _show(found: Status, as_json: bool) -> None:
    if as_json:
        print(msgspec.json.encode(found).decode())
        return
    console = Console()
    console.print(f"development cluster in {found.dir}: [bold]{found.state}[/bold]", highlight=False, soft_wrap=True)
    if not found.daemons:
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("daemon", "pid", "node state"):
        table.add_column(heading)
    for name, pid in found.daemons.items():
        table.add_row(name, str(pid or "ended"), found.node_states.get(name, ""))
    console.print(table)
    if not found.loopback_only:
        console.print("This machine's name is not a loopback address, so that Slurm listens on every interface.")
