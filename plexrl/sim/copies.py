"""How long it takes to move the states of engines."""

from collections.abc import Sequence

from plexrl.scheduler.costs import SwitchModel
from plexrl.sim.engine import Engine

END_US = 1_000_000  # ours: until the processes of ended engines are gone and their GPUs' memory is free


def move_us(
    switch: SwitchModel, coming: Engine | None, leaving: Sequence[Engine], ending: Sequence[Engine] = ()
) -> int:
    """Microseconds to move states as `copies_us` says, the engines of `ending` having ended before, side by side."""
    return copies_us(switch, coming, leaving) + (END_US if ending else 0)


def copies_us(switch: SwitchModel, coming: Engine | None, leaving: Sequence[Engine]) -> int:
    """Microseconds to move `leaving` out and `coming` in (or nobody): each GPU by itself, the slowest counts."""
    bytes_in = coming.bytes_in() if coming else 0
    out: dict[str, int] = {}
    for engine in leaving:
        if bytes_out := engine.bytes_out():
            for gpu in engine.gpus:
                out[gpu] = out.get(gpu, 0) + bytes_out
    if not out:
        return switch.switch_us(bytes_in, 0) if coming else 0
    # The slowest is the one that most leaves from, of those that take something in or of the others.
    both = max((out.get(gpu, 0) for gpu in coming.gpus), default=0) if coming else 0
    return max(switch.switch_us(bytes_in, both), switch.switch_us(0, max(out.values())))
