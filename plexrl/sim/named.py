"""Policies by name: the four that PlexRL's paper compares, in our own versions, and the best setting of ours.

What the published ones had in common is the paper's: calls ordered by HRRS, state moved ahead of its use. What it says
nothing of is off: windows of anticipation, gathering of long tails, natural ends, minimum turns beyond one switch. They
let in what a GPU has time for and little more (a predicted stretch of 1.1; the paper speaks of fitting traces). A job
that does not fit may be passed by for two hours, under spread_backfill and under ours. All numbers are ours.
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
    max_stretch={JobClass.INTERACTIVE: 1.1, JobClass.NORMAL: 1.1, JobClass.SCAVENGER: inf},
)

POLICIES = {
    "isolated": structs.replace(_PUBLISHED, placement="isolated", order="fifo"),
    "pack": structs.replace(_PUBLISHED, placement="pack"),
    "spread": structs.replace(_PUBLISHED, placement="spread"),
    "spread_backfill": structs.replace(
        _PUBLISHED, placement="spread_backfill", backfill=True, admission_patience_us=7_200_000_000
    ),
    "plexrl": Policy(
        placement="spread_backfill",
        order="hrrs",
        admission_patience_us=7_200_000_000,
        max_stretch={JobClass.INTERACTIVE: 1.1, JobClass.NORMAL: 1.1, JobClass.SCAVENGER: inf},
    ),
}
