"""How loaded a GPU is by the jobs placed on it, and whether it may take one more gang.

The load model is ours. A job on a GPU is busy there d of the time: min(1, the duties of its gangs there), because one
job's trainer and sampler alternate. The predicted stretch of a member is the largest of
  1,
  the sum of all d: beyond 1 the GPU has more work than time, and everybody's step grows with it, and
  1 + the sum over the other members of d*d/2: who arrives finds another busy with probability d, and then waits for
  half of its phase, which is a share d/2 of a step.
Shares are integers in millionths, so that the sums are exact in whatever order gangs come and go.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

from msgspec import Struct

from plexrl.types import GpuRole, JobClass, Role

if TYPE_CHECKING:
    from plexrl.scheduler.seats import Node
    from plexrl.scheduler.want import Want

ONE = 1_000_000
ALIGN = 64  # bytes; a tensor off this boundary gives other bits
CLASSES = tuple(JobClass)
# Before anything is measured. Published phase shares: rollout 63 to 90 % of a step, "about 80 %" on average (Seer,
# arXiv 2511.14617, table 1; RollPacker; APRIL). Training: 14 to 31 % there, and a trainer computes 19 to 29 % of the
# time if PlexRL's (arXiv 2605.20863) bubble ratios of 71 to 81 % are the trainer's: a quarter.
PRIOR = {Role.SAMPLE: 800_000, Role.TRAIN: 250_000}


def share(duty: float | None, role: Role) -> int:
    """A duty (0 to 1; None: the role's prior) in millionths. Never 0: a gang that is placed may run."""
    return PRIOR[role] if duty is None else min(ONE, max(1, round(duty * ONE)))


def bounds(max_stretch: Mapping[JobClass, float]) -> tuple[float, ...]:
    """The tightest bound, in millionths, of every set of classes; a set is a bit mask over `CLASSES`."""
    limits = [max_stretch[kind] * ONE for kind in CLASSES]
    return tuple(
        min((limit for bit, limit in enumerate(limits) if mask >> bit & 1), default=inf)
        for mask in range(1 << len(CLASSES))
    )


class Placed(Struct, frozen=True):
    """What one gang has of a GPU: bytes from start to end (start is 0 for all where addresses are virtual)."""

    gang: str
    group: str
    owner: str
    start: int
    end: int
    residual: int = 0


@dataclass(eq=False, slots=True)
class Card:
    """One GPU and its members. at: its number in the pool. duties: job -> sum of its gangs' shares, not capped.

    kinds: job -> its class, a bit of `mask`. load: sum of the members' d; squares: sum of their d*d. residual: bytes
    that all placed gangs keep; need: the most that one of them needs beside all residuals. filled: sum of all extents.
    """

    name: str
    at: int
    bytes: int
    role: GpuRole
    node: Node
    placed: list[Placed] = field(default_factory=list)
    duties: dict[str, int] = field(default_factory=dict)
    kinds: dict[str, int] = field(default_factory=dict)
    load: int = 0
    squares: int = 0
    residual: int = 0
    need: int = 0
    filled: int = 0
    mask: int = 0

    def put(self, placed: Placed, kind: JobClass, duty: int) -> None:
        """Another gang lives here."""
        self.placed.append(placed)
        self.placed.sort(key=lambda p: (p.start, p.gang))
        self.residual += placed.residual
        self.filled += placed.end - placed.start
        self.need = max(self.need, placed.end - placed.start - placed.residual)
        self.kinds[placed.owner] = CLASSES.index(kind)
        self.shift(placed.owner, duty)

    def take(self, gang: str, duty: int) -> None:
        """A gang is gone."""
        gone = next(p for p in self.placed if p.gang == gang)
        self.placed.remove(gone)
        self.residual -= gone.residual
        self.filled -= gone.end - gone.start
        self.need = max((p.end - p.start - p.residual for p in self.placed), default=0)
        self.shift(gone.owner, -duty)

    def offset(self, size: int, owner: str) -> int:
        """Where an extent of the owner's would lie at fixed offsets; the size, in bytes, is a multiple of `ALIGN`."""
        # The overlap is piecewise linear in the offset, so its minimum lies at one of these.
        last = (self.bytes - size) // ALIGN * ALIGN
        edges = {0, last, *(p.end for p in self.placed), *(p.start - size for p in self.placed)}

        def cost(offset: int) -> tuple[int, int, int]:
            overlaps = [(min(p.end, offset + size) - max(p.start, offset), p.owner) for p in self.placed]
            overlaps = [(n, whose) for n, whose in overlaps if n > 0]
            # A job's own trainer and sampler alternate at every step: rather overlap with somebody else's.
            return sum(n for n, _ in overlaps), sum(n for n, whose in overlaps if whose == owner), offset

        return min((edge for edge in edges if 0 <= edge <= last), key=cost)

    def shift(self, job: str, by: int) -> None:
        """The job is busy here that much more (or less) of the time."""
        raw = self.duties.get(job, 0)
        old, new = min(ONE, raw), min(ONE, raw + by)
        self.load += new - old
        self.squares += new * new - old * old
        if raw + by:
            self.duties[job] = raw + by
        else:
            del self.duties[job], self.kinds[job]
        self.mask = 0
        for kind in self.kinds.values():
            self.mask |= 1 << kind

    def stretch(self, job: str) -> float:
        """The predicted stretch of a member."""
        own = min(ONE, self.duties[job])
        return max(ONE, self.load, ONE + (self.squares - own * own) / (2 * ONE)) / ONE

    @property
    def worst(self) -> float:
        """The predicted stretch of the member that suffers most; 1 on an empty GPU."""
        return max((self.stretch(job) for job in self.duties), default=1.0)

    def holds(self, want: Want) -> bool:
        """Whether the bytes suffice: any one gang beside the residuals of all others, or (over) by itself."""
        if want.over:
            return want.size <= self.bytes
        return self.residual + want.size <= self.bytes and self.need + self.residual + want.residual <= self.bytes

    def load_with(self, want: Want) -> int | None:
        """The load with one more gang; None where a member would be stretched beyond the bound of its class."""
        raw = self.duties.get(want.job, 0)
        old, new = min(ONE, raw), min(ONE, raw + want.duty)
        load = self.load - old + new
        if len(self.duties) == (raw > 0):
            return load  # alone: nothing stretches it
        bound = want.bounds[self.mask | want.mask]
        if load > bound:
            return None
        if bound < 2 * ONE:  # else the other term is within the bound too: d*d <= d, so 1 + squares/2 <= 1 + bound/2
            squares = self.squares - old * old + new * new
            for job in self.duties:
                own = new if job == want.job else min(ONE, self.duties[job])
                if squares - own * own > 2 * ONE * (want.bounds[1 << self.kinds[job]] - ONE):
                    return None
            if squares - new * new > 2 * ONE * (want.bounds[want.mask] - ONE):
                return None
        return load
