"""`plexrl attach`: a command as a logical job of a pool."""

import typer

from plexrl.attach.run import attach_and_run
from plexrl.types import BadInput

app = typer.Typer(add_completion=False)


@app.command(no_args_is_help=True)
def attach(
    command: list[str] = typer.Argument(..., metavar="CMD", help="The command, after `--`, with its arguments."),
    registry: str = typer.Option(
        ..., envvar="PLEXRL_REGISTRY", metavar="DIR", help="The site's registry of pools, or the one of your own pool."
    ),
    pool: str = typer.Option(..., envvar="SLURM_PLEXRL_POOL", metavar="NAME", help="The pool to attach to."),
    pool_uids: str = typer.Option(
        "",
        envvar="PLEXRL_POOL_UIDS",
        metavar="UID,..",
        help="Accounts whose registry files are believed, beside root's and your own.",
    ),
    munge_socket: str = typer.Option(
        "", envvar="PLEXRL_MUNGE_SOCKET", metavar="PATH", help="Socket of munged, if it is not the system's."
    ),
    deadline: float = typer.Option(45.0, min=1.0, metavar="S", help="Seconds to be admitted in."),
) -> None:
    """Run a command as a logical job of a pool that is your own (`plexrl pool run`).

    The command finds the pool's address and key in its environment, where the tinker package looks for them, and needs
    no change. It is not started when the pool does not admit the job; the reason is then printed. Otherwise
    the exit code is the command's.

    Jobs of `sbatch --plexrl-pool=NAME` are attached already; it is the only way into a site's pool, since it gives the
    job the pool's licence. Example: plexrl attach --pool mine -- python train.py
    """
    try:
        uids = frozenset(int(uid) for uid in pool_uids.split(",") if uid)
    except ValueError as error:
        raise BadInput(f"--pool-uids {pool_uids!r} is no list of uids", "Write --pool-uids UID,UID") from error
    raise typer.Exit(attach_and_run(registry, pool, command, uids, munge_socket or None, deadline))
