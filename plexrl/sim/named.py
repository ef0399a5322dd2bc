"""Policies by name: the four that PlexRL's paper compares, in our own versions, and the best setting of ours.

What the published ones had in common is the paper's: calls ordered by HRRS, state moved ahead of its use. A turn is a
call: the quantum is longer than any (the paper names no other). What it says nothing of is off: windows of
anticipation, gathering of long tails, natural ends, minimum turns beyond one switch. They let in what a GPU has time
for and little more, a predicted stretch of 1.08: up to three trainers share GPUs, rollouts do not, as in the paper. A
job that does not fit may be passed by for two hours, under spread_backfill and under ours.

Ours lets two rollouts share GPUs (two of the prior's duty of 0.8 are a stretch of 1.6), places gangs on the GPUs of
gangs as wide, and lets a rollout end before another begins on its GPUs, because half of one costs its prefixes again.
All numbers are ours.
"""

from math import inf

from msgspec import structs

from plexrl.scheduler import Policy
from plexrl.types import JobClass

_PUBLISHED = Policy(
    order="hrrs",
    anticipation_us=0,
    gradient_anticipation_us=0,
    min_turn_factor=1.0,
    gather_share=1.0,
    natural_ends=False,
    backfill=False,
    quantum_us=600_000_000,
    sample_quantum_us=900_000_000,
    max_stretch={JobClass.INTERACTIVE: 1.08, JobClass.NORMAL: 1.08, JobClass.SCAVENGER: inf},
)

POLICIES = {
    "isolated": structs.replace(_PUBLISHED, placement="isolated", order="fifo"),
    "pack": structs.replace(_PUBLISHED, placement="pack"),
    "spread": structs.replace(_PUBLISHED, placement="spread"),
    "spread_backfill": structs.replace(
        _PUBLISHED, placement="spread_backfill", backfill=True, admission_patience_us=7_200_000_000
    ),
    "plexrl": Policy(
        placement="fit",
        order="hrrs",
        quantum_us=180_000_000,
        sample_quantum_us=900_000_000,
        admission_patience_us=7_200_000_000,
        max_stretch={JobClass.INTERACTIVE: 1.7, JobClass.NORMAL: 1.7, JobClass.SCAVENGER: inf},
    ),
}
