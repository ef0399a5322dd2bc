"""Policies by name: the four that PlexRL's paper compares, in our own versions, and the best setting of ours.

What the published ones had in common is the paper's: calls ordered by HRRS, state moved ahead of its use. What it says
nothing of is off: windows of anticipation, gathering of long tails, natural ends, minimum turns beyond one switch. The
formulas are ours in all of them; the paper's are not public.
"""

from msgspec import structs

from plexrl.scheduler.policy import Policy

_PUBLISHED = Policy(
    order="hrrs",
    anticipation_us=0,
    gradient_anticipation_us=0,
    min_turn_factor=1.0,
    gather_share=1.0,
    natural_ends=False,
    backfill=False,
)

POLICIES = {
    "isolated": structs.replace(_PUBLISHED, placement="isolated", order="fifo"),
    "pack": structs.replace(_PUBLISHED, placement="pack"),
    "spread": structs.replace(_PUBLISHED, placement="spread"),
    "spread_backfill": structs.replace(_PUBLISHED, placement="spread_backfill", backfill=True),
    "plexrl": Policy(placement="spread_backfill", order="hrrs"),
}
