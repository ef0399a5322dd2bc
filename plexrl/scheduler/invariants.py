"""The rules of the design's section 6 that hold after every event."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plexrl.scheduler.turn import Phase
from plexrl.types import Residency

if TYPE_CHECKING:
    from plexrl.scheduler.core import Core


def check(s: Core) -> None:
    """Raises AssertionError naming the broken rule."""
    _turns(s)
    _memory(s)
    _calls(s)
    _line(s)
    _spans(s)


def _turns(s: Core) -> None:
    for gpu, turn in s.held.items():
        assert s.turns.get(turn.state.id) is turn, f"rule 1: {gpu} is held by a turn that is over ({turn.state.id})"
    assert s.free == set(s.floor.gpus) - set(s.held), "rule 1: free and held GPUs are not the whole"
    for name, turn in s.turns.items():
        state = turn.state
        assert all(s.held.get(gpu) is turn for gpu in state.gpus), f"rule 3: {name} has a turn without its whole gang"
        usable = turn.phase in (Phase.OPEN, Phase.PAUSING)
        needs = Residency.DEVICE if usable else Residency.LOADING
        assert state.residency is needs, f"rule 2: {name} is {state.residency} in phase {turn.phase}"
        if turn.phase is Phase.OPEN:
            idle = not state.active and not state.queue
            assert (turn.drained_us is not None) == idle, f"rule 10: {name} forgot since when it is drained"
            assert state.active or idle, f"rule 3: {name} is granted, has calls, and runs none"
            if not s.draining:
                expected = turn.ends_at(s.policy, s._waiters(turn))
                assert turn.deadline == expected, f"rule 10: {name} ends at {turn.deadline}, not at {expected}"
        assert turn.deadline is None or any(due[2] is turn for due in s._due), f"rule 10: nothing ends {name}"


def _memory(s: Core) -> None:
    for state in s.gangs.values():
        for gpu, extent in zip(state.gpus, state.gang.extents, strict=True):
            assert 0 <= extent.offset <= s.floor.gpus[gpu] - extent.size, f"rule 5: {state.id} is outside of {gpu}"
        if state.evictor:
            assert state in state.evictor.evicting, f"rule 7: {state.id} is offloaded by a switch that is over"
            assert state.residency is Residency.OFFLOADING, f"rule 7: {state.id} is {state.residency} with an evictor"
            assert state.id not in s.turns, f"rule 2: {state.id} is offloaded within its turn"
        for rival in state.rivals.values():
            assert s.gangs.get(rival.id) is rival, f"rule 5: {state.id} has a rival that is gone ({rival.id})"
            if not (state.occupies and rival.occupies):
                continue
            pair = {state.residency, rival.residency}
            if Residency.LOADING in pair:
                loading, other = (state, rival) if state.residency is Residency.LOADING else (rival, state)
                mine = other.evictor is s.turns[loading.id]
                assert mine, f"rule 5: {loading.id} comes in over {other.id}, which it does not offload"
            else:
                assert Residency.DEVICE not in pair, f"rule 5: {state.id} and {rival.id} overlap and both are resident"


def _calls(s: Core) -> None:
    total = 0
    for state in s.gangs.values():
        calls = [*state.active.values(), *state.queue.values()]
        total += len(calls)
        assert state.units == sum(call.units for call in calls), f"rule 8: {state.id} counts its units wrongly"
        newest: dict[str, int] = {}
        for call in calls:
            assert s.calls.get(call.id) == (call, state), f"rule 8: {call.id} is not where the books say"
            if call.seq is not None:
                assert call.seq > newest.get(call.deployment, -1), f"rule 6: {call.id} is behind a later call"
                newest[call.deployment] = call.seq
        if state.trains:
            assert len(state.active) <= 1, f"rule 6: {state.id} runs {len(state.active)} training calls at once"
    assert total == len(s.calls) == s.accepted - s.ended, "rule 8: a call is lost or counted twice"
    assert s.cancelled <= set(s.calls), "rule 8: an ended call is still to be cancelled"


def _line(s: Core) -> None:
    reserved: set[str] = set()
    for name in s.line:
        state = s.gangs[name]
        assert state.eligible and name not in s.turns, f"rule 3: {name} waits without a reason"
        assert all(name in s.wanted[gpu] for gpu in state.gpus), f"rule 10: nobody knows that {name} waits"
        blocked = set(state.gpus) & (reserved | set(s.held)) or any(r.evictor for r in state.rivals.values())
        assert blocked or s.draining or s._dirty, f"rule 3: {name} could be granted and waits"
        reserved |= set(state.gpus)
    for state in s.gangs.values():
        waits = s.line.ticket(state.id) is not None
        assert waits == (state.eligible and state.id not in s.turns), f"rule 8: {state.id} is forgotten"


def _spans(s: Core) -> None:
    for gpu, (since, use) in s.meter.open.items():
        tiled = s.meter.total[gpu] + s.now - since
        assert tiled == s.now - s.meter.start_us, f"rule 11: the spans of {gpu} do not tile its time"
        assert s._dirty or use == s._use(gpu), f"rule 11: {gpu} is written down as {use}, and is {s._use(gpu)}"
