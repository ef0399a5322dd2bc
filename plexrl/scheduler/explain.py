"""What a job or call waits for, in words for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plexrl.scheduler.gang import GangState
from plexrl.types import Residency

if TYPE_CHECKING:
    from plexrl.scheduler.core import Core


def explain(scheduler: Core, name: str) -> str:
    """One line for a call; for a job one line per gang that serves its calls or that it owns."""
    if name in scheduler.calls:
        call, state = scheduler.calls[name]
        where = "runs" if name in state.active else "waits"
        return f"call {name} ({call.kind}, deployment {call.deployment}) {where}: {_gang(scheduler, state)}"
    states = {state.id: state for call, state in scheduler.calls.values() if call.job == name}
    states |= {state.id: state for state in scheduler.gangs.values() if state.spec.owner == name}
    if not states:
        return f"{name}: no such call, and no job with calls or worker groups"
    return "\n".join(_gang(scheduler, state) for _, state in sorted(states.items()))


def _gang(scheduler: Core, state: GangState) -> str:
    has = f"gang {state.id} on {', '.join(state.gpus)} ({state.residency}; {len(state.active)} running, "
    has += f"{len(state.queue)} waiting calls)"
    turn = scheduler.turns.get(state.id)
    if turn:
        until = "" if turn.deadline is None else f", due to end in {max(0, turn.deadline - scheduler.now)} us"
        return f"{has} has its turn ({turn.phase}{until})"
    if scheduler.draining:
        return f"{has}: the pool drains and grants no new turns"
    if state.residency is Residency.LOST:
        return f"{has}: its engine was lost and is not built again yet"
    if scheduler.line.ticket(state.id) is None:
        return f"{has}: nothing to run"
    place = list(scheduler.line).index(state.id)
    reasons = []
    for gpu in state.gpus:
        holder = scheduler.held.get(gpu)
        if holder:
            reasons.append(f"{gpu} is held by {holder.state.id} ({holder.phase})")
    for rival in state.rivals.values():
        if rival.evictor:
            reasons.append(f"{rival.id} is being offloaded for {rival.evictor.state.id}")
    if not reasons:
        ahead = [other for other in list(scheduler.line)[:place] if set(scheduler.gangs[other].gpus) & set(state.gpus)]
        reasons.append(f"reserved for {', '.join(ahead)}")
    return f"{has} is number {place + 1} in line: {'; '.join(reasons)}"
