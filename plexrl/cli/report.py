"""`plexrl report`: what a pool's GPUs went to, and what sharing them saved."""

import contextlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import typer

from plexrl.accounting.figures import figures
from plexrl.accounting.published import Published
from plexrl.accounting.store import Publisher, Store, reports_of
from plexrl.accounting.window import window
from plexrl.cli.books import trusted
from plexrl.pool.layout import Layout
from plexrl.slurm.adapter import AccountingRow
from plexrl.slurm.commands import SlurmCommands
from plexrl.types import BadInput, PlexrlError
from plexrl.wire.registry import Declared, Registry

app = typer.Typer(add_completion=False)




@app.command()
def report(
    pool: str = typer.Option(
        "", envvar="SLURM_PLEXRL_POOL", metavar="NAME", help="The pool; default: the only one that is declared."
    ),
    user: str | None = typer.Option(None, metavar="USER", help="Show this user's jobs only; a name or a uid."),
    since: str | None = typer.Option(
        None, metavar="TIME", help="Count from here: 2026-11-01, 2026-11-01T08:30, or 90m, 24h, 7d, 2w ago."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON, in GPU-seconds."),
    html: Path | None = typer.Option(
        None, "--html", metavar="FILE", help="Write a page with the timeline of the GPUs."
    ),
    registry: str = typer.Option(
        ..., envvar="PLEXRL_REGISTRY", metavar="DIR", help="The site's registry of pools, or your own pools'."
    ),
    pool_uids: str = typer.Option(
        "", envvar="PLEXRL_POOL_UIDS", metavar="UID,..", help="Accounts whose registry files are believed."
    ),
) -> None:
    """GPU time charged to jobs, what dedicated runs would have held, and the difference.

    Works while the pool runs and after it has ended. You see your own jobs beside the sums of the whole pool; root and
    the pool's account see all jobs.
    """
    books = trusted(registry, pool_uids)
    declared = books.declared(pool or _only(books))
    folder = reports_of(registry, declared.name)
    _catch_up(declared, folder)
    published = Store(folder, declared.owner_uid).read()
    found = figures(published, window(since), user, _sacct(published))
    if html is not None:
        from plexrl.accounting.page import page

        _write(html, page(found, published))
    if as_json:
        print(json.dumps(found, indent=2))
        return
    from plexrl.accounting.table import show

    show(found, own_only=published.uid is not None)
    if html is not None:
        print(f"\n{html}: the same with the timeline of the GPUs")


def _only(books: Registry) -> str:
    names = books.names()
    if len(names) == 1:
        return names[0]
    if not names:
        raise BadInput(f"no pool is declared in {books.directory}", "Name another registry with --registry")
    raise BadInput("there are several pools", f"Choose one with --pool: {', '.join(names)}")


def _catch_up(declared: Declared, folder: Path) -> None:
    """When no head publishes any more, who may do so does: the agents' last seconds come after the head's."""
    if os.geteuid() not in (0, declared.owner_uid):
        return
    layout = Layout(declared.state_dir)
    if not layout.root.is_dir():
        return
    with _as_account(declared.owner_uid, layout.root.stat().st_gid):
        if layout.ledger.is_dir():
            Publisher(layout, folder).catch_up(time.time_ns() // 1000)


@contextlib.contextmanager
def _as_account(uid: int, gid: int) -> Iterator[None]:
    """Files are made as the pool's account, also by root."""
    before = os.geteuid(), os.getegid()
    if uid == before[0]:
        yield
        return
    os.setegid(gid)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(before[0])
        os.setegid(before[1])


def _sacct(published: Published) -> list[AccountingRow] | None:
    """Slurm's rows of the pool's own jobs; None where Slurm has none for us, with the reason on stderr."""
    if not published.slurm_jobs or not shutil.which("sacct"):
        return None
    try:
        return SlurmCommands().sacct(published.slurm_jobs) or None
    except PlexrlError as error:
        print(f"plexrl: Slurm's accounting was not read: {error}", file=sys.stderr)
        return None


def _since(text: str) -> int:
    """Unix microseconds. Raises BadInput."""
    ago = re.fullmatch(r"(\d+)([mhdw])", text)
    if ago:
        return (int(time.time()) - int(ago[1]) * _AGO[ago[2]]) * 1_000_000
    try:
        return round(datetime.fromisoformat(text).timestamp() * 1e6)
    except ValueError as error:
        raise BadInput(f"--since {text!r} is no time", "Write 2026-11-01, 2026-11-01T08:30, or 90m, 24h, 7d") from error


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BadInput(f"{path} cannot be written ({error.strerror})", "Name a file in a folder of yours") from error
