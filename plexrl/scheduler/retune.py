"""Other knobs for a scheduler that runs: what an admin changed in plexrl.yaml while the pool was up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plexrl.scheduler.order import ORDERS

if TYPE_CHECKING:
    from plexrl.scheduler.actions import Action
    from plexrl.scheduler.policy import Policy
    from plexrl.scheduler.scheduler import Scheduler


def retune(scheduler: Scheduler, now: int, policy: Policy) -> list[Action]:
    """Follow this policy from now on; what follows for turns that are open.

    Placed groups stay where they are, turns that are open get the bounds of the new policy, usage is decayed by the new
    half-life from now on, and turns that were broken off within the hour count against the new budget.
    """
    scheduler._at(now)
    scheduler.policy = policy
    scheduler.order = ORDERS[policy.order]
    scheduler.shares.set_half_life(scheduler.now, policy.half_life_us)
    scheduler.budget.resize(policy.interactive_switches_per_hour)
    scheduler._factors.clear()
    scheduler._admit = True
    return scheduler._all_anew()
