"""`plexrl metrics`: what pools do and did, for Prometheus."""

import json
import os
import sys
import tempfile
from pathlib import Path

import typer

from plexrl.accounting.metrics import Pool, render
from plexrl.accounting.published import Published
from plexrl.accounting.store import Store, reports_of
from plexrl.cli.books import trusted
from plexrl.types import BadInput, PlexrlError
from plexrl.wire.registry import Declared, Registry

app = typer.Typer(add_completion=False)


@app.command()
def metrics(
    textfile: Path | None = typer.Option(
        None, "--textfile", metavar="FILE", help="Replace this file, for node_exporter's textfile collector."
    ),
    registry: str = typer.Option(
        ..., envvar="PLEXRL_REGISTRY", metavar="DIR", help="The site's registry of pools, or your own pools'."
    ),
    pool_uids: str = typer.Option(
        "", envvar="PLEXRL_POOL_UIDS", metavar="UID,..", help="Accounts whose registry files are believed."
    ),
) -> None:
    """Print metrics of all pools in Prometheus' text format.

    For root, the pools' account and Slurm's operators: they name users. A pool of which this account may not see
    everything is told as up or down only. No port is opened: have a timer write the file that a node_exporter reads.
    """
    books = trusted(registry, pool_uids)
    text = render([_pool(books, registry, name) for name in books.names()])
    if textfile is None:
        sys.stdout.buffer.write(text)
    else:
        _replace(textfile, text)


def _pool(books: Registry, registry: str, name: str) -> Pool:
    declared, live = books.declared(name), books.live(name)
    state = live.state if live else "down"
    status = _status(declared) if live else None
    return Pool(name=name, state=state, status=status, published=_published(registry, declared))


def _status(declared: Declared) -> dict | None:
    try:
        return json.loads((Path(declared.state_dir) / "run" / "status.json").read_bytes())
    except OSError:
        return None


def _published(registry: str, declared: Declared) -> Published | None:
    try:
        found = Store(reports_of(registry, declared.name), declared.owner_uid).read()
    except PlexrlError:
        return None
    return found if found.uid is None else None


def _replace(path: Path, text: bytes) -> None:
    """A scrape sees the old text or the new one, never half of it."""
    try:
        fd, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(fd, "wb") as file:
            file.write(text)
            os.fchmod(fd, 0o644)
        os.rename(temporary, path)
    except OSError as error:
        raise BadInput(f"{path} cannot be written ({error.strerror})", "Name one in the collector's folder") from error
