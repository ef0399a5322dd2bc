"""What a report was made of, in one file: JSON lines that give the same numbers anywhere, without a pool or Slurm.

The first line says what the file is, and up to when; then one line per record of the ledger, per interval that an agent
measured, and per row of Slurm's accounting. Nothing in it tells what users sent, got or were told.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from plexrl.accounting.ledger import slim
from plexrl.accounting.published import Published, compute
from plexrl.slurm.adapter import AccountingRow
from plexrl.types import BadInput
from plexrl.types import records as r

VERSION = 1


class Head(Struct, frozen=True, kw_only=True):
    """The first line. now_us: up to when is counted. sacct: whether Slurm's rows are in the file."""

    plexrl_ledger: int
    pool: str
    now_us: int
    device_bytes: int | None
    pretend: bool
    sacct: bool


class Row(Struct, frozen=True, kw_only=True, tag="sacct"):
    """A row of Slurm's accounting, of the pool's own jobs."""

    job: int
    state: str
    gpus: int
    start: int | None
    end: int | None


class Recorded(Struct, frozen=True, kw_only=True):
    """Everything in a file. rows: None where Slurm told nothing."""

    head: Head
    records: list[r.Record]
    intervals: list[r.AgentInterval]
    rows: list[Row] | None

    def published(self) -> Published:
        """The report that these make."""
        head = self.head
        return compute(self.records, self.intervals, head.now_us, head.device_bytes, head.pretend)


_encode = msgspec.json.Encoder().encode
_line = msgspec.json.Decoder(r.AnyRecord | Row).decode
_head = msgspec.json.Decoder(Head).decode


def encode(
    records: Iterable[r.Record],
    intervals: Iterable[r.AgentInterval],
    rows: Sequence[AccountingRow] | None,
    now_us: int,
    device_bytes: int | None,
    pretend: bool,
) -> Iterator[bytes]:
    """The lines of a file."""
    kept = [one for record in records if (one := slim(record)) is not None]
    pool = next((record.pool for record in reversed(kept) if isinstance(record, r.EpochStarted)), "")
    head = Head(
        plexrl_ledger=VERSION,
        pool=pool,
        now_us=now_us,
        device_bytes=device_bytes,
        pretend=pretend,
        sacct=rows is not None,
    )
    told = [Row(job=row.job, state=row.state, gpus=row.gpus, start=row.start, end=row.end) for row in rows or ()]
    for one in (head, *kept, *intervals, *told):
        yield _encode(one) + b"\n"


def read(path: Path) -> Recorded:
    """Raises BadInput for what is no such file, naming the line."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise BadInput(f"{path} cannot be read ({error.strerror})", "Name what plexrl ledger export wrote") from error
    records, intervals, rows = [], [], []
    try:
        head = _head(lines[0])
    except (IndexError, msgspec.MsgspecError) as error:
        raise BadInput(f"{path} is no export of a ledger", "Name what plexrl ledger export wrote") from error
    if head.plexrl_ledger != VERSION:
        raise BadInput(f"{path} is of version {head.plexrl_ledger}, not {VERSION}", "Read it with what wrote it")
    for number, text in enumerate(lines[1:], start=2):
        try:
            one = _line(text)
        except msgspec.MsgspecError as error:
            raise BadInput(f"{path}, line {number}: {error}", "Export it again") from error
        (rows if isinstance(one, Row) else intervals if isinstance(one, r.AgentInterval) else records).append(one)
    return Recorded(head=head, records=records, intervals=intervals, rows=rows if head.sacct else None)
