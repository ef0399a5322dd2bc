"""What a pool's operator may choose about scheduling."""

from msgspec import Struct

from plexrl.scheduler.order import ORDERS
from plexrl.scheduler.placement import PLACEMENTS
from plexrl.types import BadInput


class Policy(Struct, frozen=True, kw_only=True):
    """The scheduler's knobs; times in microseconds.

    placement: `isolated` (each job has GPUs of its own) or `pack` (fewest GPUs, shared).
    order: `fifo`, by the oldest eligible call, with reservation.
    anticipation_us: how long a drained turn is kept for its job's next call while others wait.
    gradient_anticipation_us: the same between forward_backward and optim_step, when gradients are live and a switch
        would move the most; also the longest that a turn may overrun its quantum to reach that optim_step.
    quantum_us: the longest turn while others wait.
    min_turn_factor: a turn is not preempted before this many times the cost of the switch that began it.
    paranoid: check every invariant after every event.
    """

    placement: str = "pack"
    order: str = "fifo"
    anticipation_us: int = 50_000
    gradient_anticipation_us: int = 1_000_000
    quantum_us: int = 20_000_000
    min_turn_factor: float = 3.0
    paranoid: bool = False

    def __post_init__(self) -> None:
        """Raises BadInput for an unknown name or a time that makes no sense."""
        if self.placement not in PLACEMENTS:
            raise BadInput(f"unknown placement {self.placement!r}", f"Use one of {', '.join(PLACEMENTS)}")
        if self.order not in ORDERS:
            raise BadInput(f"unknown order {self.order!r}", f"Use one of {', '.join(ORDERS)}")
        if self.quantum_us <= 0:
            raise BadInput(f"quantum of {self.quantum_us} us", "Give a time above zero")
        if min(self.anticipation_us, self.gradient_anticipation_us, self.min_turn_factor) < 0:
            raise BadInput("a negative anticipation window or min_turn_factor", "Give zero or more")
