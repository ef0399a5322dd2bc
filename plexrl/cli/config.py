"""`plexrl config`: looks at a plexrl.yaml before a pool does."""

from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from plexrl.config import load

app = typer.Typer(no_args_is_help=True, help="Check a plexrl.yaml.")


@app.callback()
def group() -> None:
    """Check a plexrl.yaml."""


@app.command()
def check(
    file: Path = typer.Argument(..., metavar="FILE", help="The plexrl.yaml to read."),
) -> None:
    """Read FILE as a pool would. Faults are told with file, line, key and the mend; the exit status is then 2."""
    config = load(file)
    table = Table("model", "engine", "dtype", "trainer", "samplers", "context", "accounts", box=None)
    for name, model in config.models.items():
        samplers = f"{model.sample.replicas} x 1 GPU"
        trainer = f"{model.train.gpus} GPU" + ("s" if model.train.gpus > 1 else "")
        accounts = "all" if "*" in model.accounts else ", ".join(model.accounts)
        table.add_row(name, model.engine, model.dtype, trainer, samplers, str(model.max_context), accounts)
    console = Console()
    console.print(table)
    console.print(
        f"{file}: good. State in {config.state_dir}; each {config.device.kind} GPU {config.device.bytes} bytes."
    )
