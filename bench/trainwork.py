"""What both sides of bench.train do: as many sequences of drawn tokens in each step, cut into equal micro-batches."""

import msgspec
import numpy as np

MODEL = "smollm2-135m"
DTYPE = "bfloat16"
LENGTH = 64
MICRO_BATCH = 2


class Work(msgspec.Struct, frozen=True):
    """model: its folder. rank: of the adapter; 0 is full parameters. steps: measured ones; one more comes before them.

    core: CPU on which the plain program runs.
    """

    model: str
    rank: int
    stage: int
    steps: int
    sequences: int
    core: int

    @property
    def tokens(self) -> int:
        """Padded tokens of a micro-batch."""
        return LENGTH * MICRO_BATCH


def sequences(work: Work, step: int) -> np.ndarray:
    """int64 (sequences, LENGTH + 1): a step's data."""
    return np.random.default_rng(step).integers(10, 40_000, (work.sequences, LENGTH + 1))
