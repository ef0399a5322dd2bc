"""Where a report's numbers come from: pools' stores, or one exported file."""

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec import Struct

from plexrl.accounting import recorded
from plexrl.accounting.figures import Row
from plexrl.accounting.ledger import read
from plexrl.accounting.published import Published
from plexrl.accounting.store import Publisher, Store, reports_of
from plexrl.cli.books import trusted
from plexrl.pool.intervals import read_intervals
from plexrl.pool.layout import Layout
from plexrl.slurm.adapter import AccountingRow
from plexrl.slurm.commands import SlurmCommands
from plexrl.types import BadInput, PlexrlError
from plexrl.types import records as r
from plexrl.wire.registry import Declared, Registry


class Reported(Struct):
    """What a pool published. rows: Slurm's, where the file holds them; else Slurm is asked. made_of: records and
    intervals, for who may read them."""

    published: Published
    rows: list[Row] | None = None
    asks: bool = True
    made_of: tuple[list[r.Record], list[r.AgentInterval]] | None = None

    def sacct(self) -> Sequence[Row] | None:
        """Slurm's rows of the pool's own jobs; None where Slurm has none for us, with the reason on stderr."""
        return sacct(self.published.slurm_jobs) if self.asks else self.rows


def from_file(path: Path) -> Reported:
    """What `plexrl ledger export` wrote. Raises BadInput."""
    kept = recorded.read(path)
    return Reported(kept.published(), kept.rows, asks=False, made_of=(kept.records, kept.intervals))


def of_pools(names: Sequence[str], registry: str, pool_uids: str) -> list[Reported]:
    """Each pool's report, as far as this account may see it; `all`: every pool of which there is anything to see."""
    if not registry:
        raise BadInput("no registry was named", "Set PLEXRL_REGISTRY, or report on a file with --from")
    books = trusted(registry, pool_uids)
    if list(names) != ["all"]:
        return [_of(books, registry, name) for name in names or [only(books)]]
    found = []
    for name in books.names():
        with contextlib.suppress(PlexrlError):
            found.append(_of(books, registry, name))
    if not found:
        raise BadInput(f"no pool in {registry} has a report that you may read", "Name one with --pool to see why")
    return found


def only(books: Registry) -> str:
    """The one pool that is declared. Raises BadInput for none or several."""
    names = books.names()
    if len(names) == 1:
        return names[0]
    if not names:
        raise BadInput(f"no pool is declared in {books.directory}", "Name another registry with --registry")
    raise BadInput("there are several pools", f"Choose one with --pool: {', '.join(names)}")


def _of(books: Registry, registry: str, name: str) -> Reported:
    declared = books.declared(name)
    folder = reports_of(registry, name)
    catch_up(declared, folder)
    published = Store(folder, declared.owner_uid).read()
    return Reported(published, made_of=_made_of(declared, published))


def _made_of(declared: Declared, published: Published) -> tuple[list[r.Record], list[r.AgentInterval]] | None:
    layout = Layout(declared.state_dir)
    if published.uid is not None or os.geteuid() not in (0, declared.owner_uid) or not layout.ledger.is_dir():
        return None
    return read(layout.ledger), read_intervals(layout.agents)


def catch_up(declared: Declared, folder: Path) -> None:
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


def sacct(jobs: Sequence[int]) -> list[AccountingRow] | None:
    """Slurm's rows of these jobs; None where Slurm has none for us, with the reason on stderr."""
    if not jobs or not shutil.which("sacct"):
        return None
    try:
        return SlurmCommands().sacct(jobs) or None
    except PlexrlError as error:
        print(f"plexrl: Slurm's accounting was not read: {error}", file=sys.stderr)
        return None
