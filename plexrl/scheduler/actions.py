"""What the scheduler tells the head to do, or to write down."""

from msgspec import Struct

from plexrl.types import Span


class Build(Struct, frozen=True):
    """Offload `evict` (least recently used first), then start the gang's engine on its extents: an exclusive turn.

    Answered by `built` or `build_failed`.
    """

    gang: str
    evict: tuple[str, ...] = ()


class Switch(Struct, frozen=True):
    """Offload `evict` (least recently used first), then bring the gang's state in. Answered by `switched`.

    Both halves are idempotent for the executor: a gang named here may already be where it is told to go.
    """

    gang: str
    evict: tuple[str, ...] = ()


class Run(Struct, frozen=True):
    """Start these calls in the gang's turn, or add them to it. Each is answered by `finished` or named in `paused`."""

    gang: str
    calls: tuple[str, ...]


class Pause(Struct, frozen=True):
    """Stop the gang at its next token or micro-batch boundary. Always answered by `paused`."""

    gang: str


class Turn(Struct, frozen=True):
    """For the trace: a turn began (reason `build`, `switch`, `resident`) or ended."""

    gang: str
    ended: bool
    reason: str


class Dropped(Struct, frozen=True):
    """The scheduler forgets these calls (gang lost or removed, call cancelled); the head ends or resubmits them."""

    calls: tuple[str, ...]


class Closed(Struct, frozen=True):
    """For the ledger: an interval of one GPU is over."""

    span: Span


Action = Build | Switch | Run | Pause | Turn | Dropped | Closed
