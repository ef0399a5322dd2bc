"""`plexrl`: the root of the command line. A group's module is imported when one of its verbs is used, not before."""

import importlib
import importlib.util
import sys
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from plexrl import __version__
from plexrl.types import PlexrlError

USERS, ADMINS, EVERYBODY = "Users", "Administrators", "Trying it out"

# name -> (help panel, one line for `plexrl --help`); module plexrl.cli.<name> holds its `app`
GROUPS = {
    "attach": (USERS, "Run a command as a logical job of a pool of your own, without Slurm."),
    "queue": (USERS, "Pools, their GPUs, and how many calls are open."),
    "jobs": (USERS, "Your logical jobs, and why each of them waits."),
    "explain": (USERS, "Why a job waits, and what for."),
    "top": (USERS, "A pool as it works, redrawn again and again: GPUs, turns, jobs, savings."),
    "logs": (USERS, "What a logical job printed, and what the pool's log says of it."),
    "cancel": (USERS, "End a logical job."),
    "checkpoint": (USERS, "Your checkpoints at a pool: list, delete."),
    "shares": (USERS, "Who has which part of a pool, who used how much, and what a change would mean."),
    "report": (USERS, "GPU hours charged, what dedicated runs would have held, and the difference."),
    "pool": (ADMINS, "Declare, start, watch, drain and stop pools."),
    "ledger": (ADMINS, "Write the records that a pool's reports are made of."),
    "metrics": (ADMINS, "What pools do and did, for Prometheus."),
    "trace": (ADMINS, "Write what a pool recorded as a workload for plexrl simulate."),
    "doctor": (ADMINS, "What is installed, which engines can run here, whether they agree."),
    "config": (ADMINS, "Check a plexrl.yaml, show it with its defaults, compare two."),
    "man": (ADMINS, "Write manual pages."),
    "model": (ADMINS, "Make model folders that a pool can serve."),
    "simulate": (EVERYBODY, "Jobs on a simulated cluster, under the scheduler of the live pool."),
    "demo": (EVERYBODY, "Two RL jobs of two users share two GPUs on a development cluster."),
    "devcluster": (EVERYBODY, "A real Slurm on this one machine, for development and tests."),
}
COMPLETION = {"install_completion", "show_completion"}


class LazyGroup(TyperGroup):
    """Lists the groups without importing them."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for name, (panel, line) in GROUPS.items():
            if importlib.util.find_spec(f"plexrl.cli.{name}"):
                self.add_command(TyperCommand(name=name, help=line, rich_help_panel=panel))

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        if name in GROUPS:
            command = typer.main.get_command(importlib.import_module(f"plexrl.cli.{name}").app)
            # Typer gives each app the options that set up shell completion; they belong to the root alone.
            command.params = [option for option in command.params if option.name not in COMPLETION]
        return name, command, rest


app = typer.Typer(
    cls=LazyGroup,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"plexrl {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    """Several RLVR jobs share one resident pool of language-model GPUs inside a Slurm allocation.

    A job joins a pool with one line, [bold]#SBATCH --plexrl-pool=NAME[/bold], and changes nothing else.
    """


def main() -> None:
    """Entry point of the console script. A PlexrlError becomes one message on stderr and its exit code."""
    try:
        app(prog_name="plexrl")
    except PlexrlError as error:
        print(f"plexrl: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
