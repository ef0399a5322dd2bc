"""Who is next among gangs that wait for a GPU: a key for each, the smallest first.

Before any order: who has starved, by arrival; then classes; then deadlines that are near; then priorities. Every key
ends in the gang's ticket, so the order is total, which is what keeps whole-gang grants free of deadlock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from plexrl.scheduler.costs import CALL_PRIOR_US, hrrs
from plexrl.scheduler.gang import SCAVENGER, GangState
from plexrl.types import Residency

if TYPE_CHECKING:
    from plexrl.scheduler.core import Core
    from plexrl.scheduler.line import Waiter
    from plexrl.scheduler.policy import Policy

Key = tuple[float, ...]


def fifo(core: Core, waiter: Waiter) -> Key:
    """By the number of the oldest call, or of the last turn's end if that is later: who was preempted goes last."""
    return ()


def round_robin(core: Core, waiter: Waiter) -> Key:
    """The least recently served first."""
    return (waiter.state.used,)


def response_ratio(core: Core, waiter: Waiter) -> Key:
    """Highest response ratio with the cost of the switch, times fair-share: our HRRS."""
    return (-score(core, waiter),)


def fair(core: Core, waiter: Waiter) -> Key:
    """The account, then the user, that is furthest below its share; the response ratio among equals."""
    tenant = waiter.tenant
    account, user = core.shares.level(core.now, tenant.account, tenant.user or tenant.job)
    return (-account, -user, -score(core, waiter))


ORDERS: dict[str, Callable[[Core, Waiter], Key]] = {
    "fifo": fifo,
    "round_robin": round_robin,
    "hrrs": response_ratio,
    "fair": fair,
}


def key(core: Core, waiter: Waiter) -> Key:
    """The waiter's place."""
    state, policy, rank = waiter.state, core.policy, waiter.rank
    if rank != SCAVENGER and core.now - waiter.since_us >= policy.starvation_us:
        return (0, waiter.ticket)
    due = waiter.due_us
    if due is None or core.now < due - policy.quantum_us - switch_us(state):
        return (1, rank, 1, 0, -waiter.tenant.priority, *core.order(core, waiter), waiter.ticket)
    return (1, rank, 0, due, waiter.ticket)


def score(core: Core, waiter: Waiter) -> float:
    """The response ratio of a waiter now, times its fair-share factor."""
    wait_us = max(0, core.now - waiter.since_us)
    return hrrs(wait_us, waiter.service_us, switch_us(waiter.state), core.factor(waiter.tenant))


def switch_us(state: GangState) -> int:
    """What bringing it in is expected to take; nothing when it is there."""
    return 0 if state.residency is Residency.DEVICE else state.switch.mean


def service_us(state: GangState, policy: Policy) -> int:
    """How long its next turn is expected to last: no longer than the quantum, for it waits because others are there."""
    first = state.first
    if state.service.count:
        expected = state.service.mean
    elif first:
        expected = first.call.cost_us or CALL_PRIOR_US[first.call.kind]
    else:
        expected = state.switch.mean
    return min(expected, policy.quantum_us)
