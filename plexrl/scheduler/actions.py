"""What the scheduler tells the head to do, or to write down."""

from msgspec import Struct

from plexrl.types import Placement, Span


class Build(Struct, frozen=True):
    """Offload `evict`, end the engines of `end`, then start the gang's engine on its extents: an exclusive turn.

    end: gangs that sleep, perhaps only when they have left. All that their processes keep on the GPUs is free then;
    their deployments' state stays where it is, and they are built again when a call wants them. Each is told by
    `unbuilt` before the answer. Answered by `built` or `build_failed`.
    """

    gang: str
    evict: tuple[str, ...] = ()
    end: tuple[str, ...] = ()


class Switch(Struct, frozen=True):
    """Offload `evict`, end the engines of `end` (as in Build), then bring the gang's state in. Answered by `switched`.

    All parts are idempotent for the executor: a gang named here may already be where it is told to go.
    """

    gang: str
    evict: tuple[str, ...] = ()
    end: tuple[str, ...] = ()


class Prefetch(Struct, frozen=True):
    """A Switch beside another gang's turn, so that the gang is there when its own begins. Answered by `prefetched`."""

    gang: str
    evict: tuple[str, ...] = ()


class Run(Struct, frozen=True):
    """Start these calls in the gang's turn, or add them to it. Each is answered by `finished` or named in `paused`."""

    gang: str
    calls: tuple[str, ...]


class Pause(Struct, frozen=True):
    """Stop the gang at its next token or micro-batch boundary. Always answered by `paused`.

    whole: not before the call that runs has ended, so that its engine may be ended while it sleeps.
    """

    gang: str
    whole: bool = False


class Gather(Struct, frozen=True):
    """Paused samples go on in another gang of their group: take them, with what was drawn, from `gang` to `to`.

    `to` computes their prefixes again when a Run names them there. Needs no answer.
    """

    gang: str
    to: str
    calls: tuple[str, ...]


class Relocate(Struct, frozen=True):
    """Save a group's state to the host and end its engines: it will be built again at `placement` and loaded there.

    Answered by `relocated`. At most once in a group's life, and only when no gradients are live.
    """

    group: str
    placement: Placement


class Placed(Struct, frozen=True):
    """The answer to `request`: all groups of the job have their places, in the order in which they were asked for."""

    job: str
    placements: tuple[Placement, ...]


class Turn(Struct, frozen=True):
    """For the trace: a turn began or ended, and why.

    reason: began `build`, `switch`, `prefetched`, `resident`, ahead of a reservation `backfill`, or `alone`, what is
    left of a union turn whose peer died; ended `drained`,
    `quantum`, `preempted`, `gathered`, `built`, `lost` and the like. waited_us: since its oldest call could have run.
    score: its order's score, the higher the sooner (0 where the order has none).
    """

    gang: str
    ended: bool
    reason: str
    waited_us: int = 0
    score: float = 0.0


class Dropped(Struct, frozen=True):
    """The scheduler forgets these calls (gang lost or removed, call cancelled); the head ends or resubmits them."""

    calls: tuple[str, ...]


class Closed(Struct, frozen=True):
    """For the ledger: an interval of one GPU is over."""

    span: Span


Action = Build | Switch | Prefetch | Run | Pause | Gather | Relocate | Placed | Turn | Dropped | Closed
