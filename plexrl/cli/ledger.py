"""`plexrl ledger`: the records behind a pool's reports."""

import os
import sys
from pathlib import Path

import typer

from plexrl.accounting.ledger import read
from plexrl.accounting.recorded import encode
from plexrl.accounting.store import Store, reports_of
from plexrl.cli.books import trusted
from plexrl.cli.reported import catch_up, only, sacct
from plexrl.pool.intervals import read_intervals
from plexrl.pool.layout import Layout
from plexrl.types import BadInput, Unavailable

app = typer.Typer(add_completion=False, no_args_is_help=True)


@app.callback()
def group() -> None:
    """The records behind a pool's reports."""


@app.command()
def export(
    pool: str = typer.Option(
        "", envvar="SLURM_PLEXRL_POOL", metavar="NAME", help="The pool; default: the only one that is declared."
    ),
    out: Path | None = typer.Option(None, "--out", metavar="FILE", help="Write it here; default: standard output."),
    registry: str = typer.Option(
        ..., envvar="PLEXRL_REGISTRY", metavar="DIR", help="The site's registry of pools, or your own pools'."
    ),
    pool_uids: str = typer.Option(
        "", envvar="PLEXRL_POOL_UIDS", metavar="UID,..", help="Accounts whose registry files are believed."
    ),
) -> None:
    """Write everything that a pool's report is made of, as JSON lines.

    plexrl report --from FILE gives the same numbers again, anywhere.

    For root and the pool's account: it tells of all users' jobs when they called, never what they sent or got.
    """
    books = trusted(registry, pool_uids)
    declared = books.declared(pool or only(books))
    if os.geteuid() not in (0, declared.owner_uid):
        raise Unavailable(
            f"the ledger of pool {declared.name} is not for uid {os.geteuid()}",
            "Ask root or the pool's account to export it; plexrl report shows you your own jobs",
        )
    layout = Layout(declared.state_dir)
    if not layout.ledger.is_dir():
        raise Unavailable(f"pool {declared.name} has no ledger", "It is made when the pool first starts")
    folder = reports_of(registry, declared.name)
    catch_up(declared, folder)
    published = Store(folder, declared.owner_uid).read()
    lines = encode(
        (record for record in read(layout.ledger) if record.now_us <= published.now_us),
        read_intervals(layout.agents),
        sacct(published.slurm_jobs),
        published.now_us,
        published.device_bytes,
        published.pretend,
    )
    if out is None:
        sys.stdout.buffer.writelines(lines)
        return
    try:
        with out.open("wb") as file:
            file.writelines(lines)
    except OSError as error:
        raise BadInput(f"{out} cannot be written ({error.strerror})", "Name a file in a folder of yours") from error
    print(f"{out}: the ledger of pool {declared.name}, {out.stat().st_size:,} bytes")
