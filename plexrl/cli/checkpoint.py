"""`plexrl checkpoint`: what a user has saved at a pool."""

import json
import time

import typer
from rich.console import Console
from rich.table import Table

from plexrl.cli.inside import ask, own_pool
from plexrl.types import BadInput

app = typer.Typer(add_completion=False, no_args_is_help=True)
_JSON = typer.Option(False, "--json", help="Print JSON.")


@app.callback()
def group() -> None:
    """Your checkpoints at the pool of the job that this runs in; they are told and deleted by the pool, not by you."""


@app.command("list")
def list_(as_json: bool = _JSON) -> None:
    """Saved states and published versions on the pool's disk, of all your jobs, newest first."""
    _inside()
    found = ask("checkpoints")["checkpoints"]
    if as_json:
        print(json.dumps(found))
        return
    table = Table("path", "base model", "rank", "MiB", "saved")
    for each in found:
        rank = "full" if each["lora_rank"] is None else str(each["lora_rank"])
        saved = time.strftime("%Y-%m-%d %H:%M", time.localtime(each["saved"]))
        table.add_row(each["path"], each["base"], rank if each["base"] else "", f"{each['bytes'] / 2**20:.1f}", saved)
    Console(soft_wrap=True).print(table if found else "no checkpoints")


@app.command()
def delete(
    paths: list[str] = typer.Argument(..., metavar="PATH..", help="tinker:// paths, as `list` shows them."),
    as_json: bool = _JSON,
) -> None:
    """Delete checkpoints for good, one after the other; the first that cannot be deleted ends it."""
    _inside()
    for path in paths:
        ask("checkpoints/delete", path=path)
        if not as_json:
            print(f"deleted {path}")
    if as_json:
        print(json.dumps({"deleted": paths}))


def _inside() -> None:
    if not own_pool():
        raise BadInput(
            "this is no job of a pool, and checkpoints are told to their user's jobs only",
            "Run it inside a job: in its script, or by sbatch --plexrl-pool=NAME --wrap 'plexrl checkpoint list'",
        )
