"""What a pool's operator may choose about scheduling."""

from collections.abc import Mapping
from math import inf

from msgspec import Struct, field

from plexrl.scheduler.order import ORDERS
from plexrl.scheduler.placement import PLACEMENTS
from plexrl.types import BadInput, JobClass

# Ours: how much slower than alone a job of a class may become, by prediction, when somebody is placed beside it.
MAX_STRETCH = {JobClass.INTERACTIVE: 2.0, JobClass.NORMAL: 4.0, JobClass.SCAVENGER: inf}
_POSITIVE = (
    "quantum_us",
    "sample_quantum_us",
    "starvation_us",
    "admission_patience_us",
    "half_life_us",
    "switch_bytes_per_us",
)


class Policy(Struct, frozen=True, kw_only=True):
    """The scheduler's knobs; times in microseconds.

    placement: `isolated` (each job has GPUs of its own), `pack` (fewest GPUs, shared), `spread` (least load first),
        `spread_backfill` (the same, and a job that does not fit yet does not hold up those behind it) or `fit` (the
        fullest GPUs that have time for all that is there, else the least load; the queue as in spread_backfill).
    order: who is next: `fifo` (oldest call), `round_robin` (least recently served), `hrrs` (highest response ratio with
        switch cost and fair-share) or `fair` (account, then user, with the least use of its share; hrrs among equals).
    anticipation_us: how long a drained turn is kept for its job's next call while others wait, until its think time is
        known; and, with the cost of a switch, the longest that it is kept then.
    gradient_anticipation_us: the same between forward_backward and optim_step, when gradients are live and a switch
        would move the most; also the longest that a turn may overrun its quantum to reach that optim_step.
    quantum_us, sample_quantum_us: the longest turn of a trainer, of a sampler while others wait. A sampler that leaves
        the device computes its prefixes again, so it is not broken off for another sampler as soon.
    min_turn_factor: a turn is not preempted before this many times the cost of the switch that began it.
    starvation_us: after so long a wait a gang goes before all that wait less long, in order of arrival. Scavengers do
        not starve: they are promised nothing.
    admission_patience_us: for how long the first in the queue for places may be passed by (spread_backfill and fit);
        from then on the GPUs that it could use are kept for it.
    half_life_us: of past use, for fair-share.
    max_stretch: by class, the predicted slowdown beyond which nobody else is placed beside a job.
    interactive_switches_per_hour: turns of other classes that interactive calls may break off.
    gather_share: the done share of a rollout after which its rest moves to fewer replicas for others that wait; 1:
        never.
    backfill: short turns may go ahead of a reservation that they do not delay.
    prefetch: the next gang's state comes in beside the turn under way, where memory allows.
    lazy: state stays on the device until its bytes are needed; else it leaves when another gang has its turn there.
    end_sleepers: where GPUs have no room for what sleeping engines keep there, the coldest are ended, and built again
        when they are wanted; else nobody is placed where that would be needed.
    natural_ends: a turn is let run to its optim_step, and not begun another cycle that would not end in its quantum.
    relocate: a group may be placed anew once, when what it was expected to need proved wrong.
    switch_bytes_per_us: what a switch is expected to move until it was seen.
    paranoid: check every invariant after every event.
    """

    placement: str = "pack"
    order: str = "hrrs"
    anticipation_us: int = 50_000
    gradient_anticipation_us: int = 1_000_000
    quantum_us: int = 20_000_000
    sample_quantum_us: int = 120_000_000
    min_turn_factor: float = 3.0
    starvation_us: int = 300_000_000
    admission_patience_us: int = 300_000_000
    half_life_us: int = 7 * 86_400_000_000
    max_stretch: Mapping[JobClass, float] = field(default_factory=lambda: dict(MAX_STRETCH))
    interactive_switches_per_hour: int = 60
    gather_share: float = 0.8
    backfill: bool = True
    prefetch: bool = True
    lazy: bool = True
    end_sleepers: bool = True
    natural_ends: bool = True
    relocate: bool = False
    switch_bytes_per_us: int = 20_000
    paranoid: bool = False

    def __post_init__(self) -> None:
        """Raises BadInput for an unknown name or a number that makes no sense."""
        if self.placement not in PLACEMENTS:
            raise BadInput(f"unknown placement {self.placement!r}", f"Use one of {', '.join(PLACEMENTS)}")
        if self.order not in ORDERS:
            raise BadInput(f"unknown order {self.order!r}", f"Use one of {', '.join(ORDERS)}")
        for name in _POSITIVE:
            if getattr(self, name) <= 0:
                raise BadInput(f"{name} is {getattr(self, name)}", "Give more than zero")
        for name in ("anticipation_us", "gradient_anticipation_us", "min_turn_factor", "interactive_switches_per_hour"):
            if not getattr(self, name) >= 0:
                raise BadInput(f"{name} is {getattr(self, name)}", "Give zero or more")
        if not 0 < self.gather_share <= 1:
            raise BadInput(f"gather_share is {self.gather_share}", "Give a share above 0 and up to 1")
        if missing := set(JobClass) - set(self.max_stretch):
            raise BadInput(f"max_stretch has no {', '.join(sorted(missing))}", "Give one for each class")
        for kind, stretch in self.max_stretch.items():
            if not stretch >= 1:
                raise BadInput(f"max_stretch of {kind} is {stretch}", "Give 1 or more: nothing runs faster than alone")
