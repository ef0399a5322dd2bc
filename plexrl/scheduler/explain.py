"""What a job or call waits for, in words for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plexrl.scheduler.gang import GangState
from plexrl.scheduler.line import Waiter
from plexrl.scheduler.order import key
from plexrl.scheduler.turn import OpenTurn, Phase
from plexrl.types import Residency

if TYPE_CHECKING:
    from plexrl.scheduler.core import Core

_PHASES = {
    Phase.BUILD: "is being built for",
    Phase.SWITCH: "is being switched in for",
    Phase.OPEN: "has its turn for",
    Phase.PAUSING: "is being paused for",
}


def explain(scheduler: Core, name: str) -> str:
    """One or two sentences on a job or a call: what of it runs, and why the rest waits and what for."""
    if name in scheduler.calls:
        entry, state = scheduler.calls[name]
        what = f"Call {name} ({entry.call.kind} of {entry.call.deployment})"
        if name in state.active:
            return f"{what} runs on {_where(state)}."
        return f"{what} waits: {_why(scheduler, state)}"
    for waiting in scheduler.admission.waiting:
        if waiting.job == name:
            return f"Job {name} has waited {_time(scheduler.now - waiting.since_us)} for places: {waiting.why}"
    calls = [(entry, state) for entry, state in scheduler.calls.values() if entry.call.job == name]
    states = {state.id: state for _, state in calls}
    states |= {s.id: s for s in scheduler.gangs.values() if s.spec.owner == name and s.eligible}
    if not states:
        owns = any(state.spec.owner == name for state in scheduler.gangs.values())
        return (
            f"Job {name} has no calls: it is at its own work, and the pool waits for it."
            if owns
            else f"{name}: no such call, and no job with calls or worker groups."
        )
    running = sum(1 for entry, state in calls if entry.call.id in state.active)
    waiting = [state for state in states.values() if state.id not in scheduler.turns]
    has = f"Job {name} has {running} running and {len(calls) - running} waiting calls."
    if not waiting:
        return f"{has} {_sentence(scheduler, min(states.values(), key=lambda s: s.id))}"
    longest = min(waiting, key=lambda state: (_since(scheduler, state), state.id))
    return f"{has} Gang {longest.id} waits: {_why(scheduler, longest)}"


def _since(scheduler: Core, state: GangState) -> int:
    waiter = scheduler.line.get(state.id)
    return waiter.since_us if waiter else scheduler.now


def _sentence(scheduler: Core, state: GangState) -> str:
    turn = scheduler.turns[state.id]
    return f"{_turn(scheduler, turn)[0].upper()}{_turn(scheduler, turn)[1:]}."


def _turn(scheduler: Core, turn: OpenTurn) -> str:
    text = f"gang {turn.state.id} {_PHASES[turn.phase]} job {turn.job} on {_where(turn.state)}"
    if turn.deadline is not None:
        text += f", until {_time(turn.deadline - scheduler.now)} from now at the latest ({turn.why})"
    return text


def _why(scheduler: Core, state: GangState) -> str:
    """Ends with a full stop."""
    waiter = scheduler.line.get(state.id)
    if state.id in scheduler.turns:
        return f"{_turn(scheduler, scheduler.turns[state.id])}."
    if scheduler.draining:
        return "the pool drains and grants no new turns."
    if state.residency is Residency.LOST:
        return f"the engine of gang {state.id} was lost and is not built again yet."
    if state.moving:
        return f"gang {state.id} is being moved to other GPUs."
    if waiter is None:
        return f"an earlier call of gang {state.id} is still under way."
    reasons = _blockers(scheduler, waiter)
    return f"since {_time(scheduler.now - waiter.since_us)} for {_where(state)}; {'; '.join(reasons)}."


def _blockers(scheduler: Core, waiter: Waiter) -> list[str]:
    line, state = scheduler.line, waiter.state
    turns = {id(t): t for gpu in waiter.gpus if (t := scheduler.held.get(gpu)) is not None}
    reasons = [_turn(scheduler, turn) for turn in list(turns.values())[:2]]
    if len(turns) > 2:
        reasons.append(f"{len(turns) - 2} more turns have others of its GPUs")
    reasons += [f"GPUs are kept free for gang {w.state.id}, which goes before it" for w in line.others(waiter)[:1]]
    moving = {a.state.id for m in state.members if (a := m.evictor) is not None}
    reasons += [f"it is being moved out for gang {name}" for name in sorted(moving)]
    mine = key(scheduler, waiter)
    near = {w.state.id: w for gpu in waiter.gpus for w in line.on[gpu].values() if w is not waiter}
    ahead = sorted(name for name, w in near.items() if key(scheduler, w) < mine)
    if ahead:
        reasons.append(f"{len(ahead)} gang{'s' * (len(ahead) > 1)} before it ({', '.join(ahead[:3])})")
    if not reasons:
        reasons.append("memory on them is being freed")
    return reasons


def _where(state: GangState) -> str:
    gpus = state.reach
    return ", ".join(gpus) if len(gpus) <= 4 else f"{len(gpus)} GPUs from {gpus[0]} to {gpus[-1]}"


def _time(us: int) -> str:
    us = max(0, us)
    if us < 1_000_000:
        return f"{us / 1000:.0f} ms"
    if us < 120_000_000:
        return f"{us / 1e6:.1f} s"
    return f"{us / 60e6:.0f} min"
