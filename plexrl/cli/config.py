"""`plexrl config`: looks at a plexrl.yaml before a pool does."""

import json
from pathlib import Path

import typer
import yaml
from rich.console import Console
from rich.table import Table

from plexrl.cli.written import differences, for_json, written
from plexrl.config import PoolConfig, choices, read
from plexrl.config.reload import kept
from plexrl.pool import fits

app = typer.Typer(no_args_is_help=True)


@app.callback()
def group() -> None:
    """Check a plexrl.yaml, show what it says with all defaults, compare two."""


@app.command()
def check(
    file: Path = typer.Argument(..., metavar="FILE", help="The plexrl.yaml to read."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Read FILE as a pool would. Faults are told with file, line, key and the mend; the exit status is then 2."""
    config = read(file, fits.problems)
    if as_json:
        engines = [choice._asdict() for choice in choices(config)]
        print(json.dumps({"file": str(file), "models": list(config.models), "engines": engines}))
        return
    table = Table("model", "dtype", "trainer", "samplers", "context", "accounts", box=None)
    for name, model in config.models.items():
        samplers = f"{model.sample.replicas} x 1 GPU"
        trainer = f"{model.train.gpus} GPU" + ("s" if model.train.gpus > 1 else "")
        accounts = "all" if "*" in model.accounts else ", ".join(model.accounts)
        table.add_row(name, model.dtype, trainer, samplers, str(model.max_context), accounts)
    console = Console()
    console.print(table)
    console.print(engines_of(config))
    console.print(
        f"{file}: good. State in {config.state_dir}; each {config.device.kind} GPU {config.device.bytes} bytes."
    )


@app.command()
def show(
    file: Path = typer.Argument(..., metavar="FILE", help="The plexrl.yaml to read."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Print every key of FILE with its value, defaults too; what is printed is a plexrl.yaml itself."""
    found = written(read(file))
    if as_json:
        print(json.dumps(for_json(found), indent=2))
    else:
        print(yaml.safe_dump(found, sort_keys=False, allow_unicode=True, width=120), end="")


@app.command()
def diff(
    old: Path = typer.Argument(..., metavar="OLD", help="A plexrl.yaml."),
    new: Path = typer.Argument(..., metavar="NEW", help="Another one."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Print what changes from OLD to NEW, by what the files mean and not how they are written. Ends with 1 if anything.

    A pool that runs takes up by plexrl pool reload what says so, if all that changes says so.
    """
    before, after = read(old), read(new)
    rows = [(*row, _taken(row[0], kept(before, after))) for row in differences(before, after)]
    if as_json:
        print(json.dumps([dict(zip(("key", "old", "new", "by"), row, strict=True)) for row in rows]))
    elif rows:
        table = Table("key", str(old), str(new), "taken up by", box=None)
        for row in rows:
            table.add_row(*row)
        Console().print(table)
    else:
        print("they mean the same")
    raise typer.Exit(1 if rows else 0)


def _taken(key: str, stays: list[str]) -> str:
    return "a new start" if any(key == each or key.startswith(f"{each}.") for each in stays) else "reload"


def engines_of(config: PoolConfig) -> Table:
    """Who executes what, and why it is that one; config: as it was written."""
    table = Table("model", "role", "engine", "by", box=None)
    for choice in choices(config):
        table.add_row(*choice)
    return table
