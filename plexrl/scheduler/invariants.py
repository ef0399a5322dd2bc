"""The rules of the design's section 6 that hold after every event."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plexrl.scheduler.gang import SCAVENGER
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
        members = (state, *turn.peers)
        assert name in {member.id for member in members}, f"rule 1: {name} is in a turn of others"
        needs = {gpu for member in members for gpu in member.gpus}
        assert set(turn.gpus) == needs, f"rule 3: the turn of {state.id} has {turn.gpus}, not {sorted(needs)}"
        assert all(s.held.get(gpu) is turn for gpu in turn.gpus), f"rule 3: {name} has a turn without its whole gang"
        usable = turn.phase in (Phase.OPEN, Phase.PAUSING)
        if usable:
            for member in members:
                there = member.residency is Residency.DEVICE
                assert there, f"rule 2: {member.id} is {member.residency} in phase {turn.phase}"
        else:
            coming = [member for member in members if member.residency is Residency.LOADING]
            assert coming, f"rule 3: {state.id} is in phase {turn.phase} and nobody comes in"
            # Another member may be coming already for a turn that is no more; the one that is next opens this one.
            opens = turn.to_load[0]
            assert opens in coming and opens.arrival.turn is turn, f"rule 7: nobody opens {state.id}"
        if turn.phase is Phase.OPEN:
            assert (turn.drained_us is not None) == (not turn.runnable), f"rule 10: {name} forgot that it is drained"
            assert state.active or not state.queue, f"rule 3: {state.id} is granted, has calls, and runs none"
            if not s.draining:
                others = s._others(turn)
                expected = turn.ends_at(s.policy, others)[0] if others else None
                # An interactive call's budget may have been used up by another preemption since.
                late = turn.why == "preempted" and turn.deadline is not None and turn.deadline <= (expected or 0)
                known = turn.deadline == expected or late
                assert known, f"rule 10: {name} ends at {turn.deadline}, not at {expected}"
        assert turn.deadline is None or any(due[2] is turn for due in s._due), f"rule 10: nothing ends {name}"


def _memory(s: Core) -> None:
    used = dict.fromkeys(s.floor.gpus, 0)
    crossing = dict.fromkeys(s.floor.gpus, 0)
    for state in s.gangs.values():
        residual = 0 if state.residency in (Residency.COLD, Residency.LOST) else state.spec.residual_bytes
        for gpu, extent in zip(state.gpus, state.gang.extents, strict=True):
            used[gpu] += extent.size if state.occupies else residual
            crossing[gpu] += extent.size - residual if state.evictor else 0
            crossing[gpu] += residual if state.ending else 0
            if extent.offset is not None:
                inside = 0 <= extent.offset <= s.floor.gpus[gpu] - extent.size
                assert inside, f"rule 5: {state.id} is outside of {gpu}"
        if state.evictor:
            assert state in state.evictor.evicting, f"rule 7: {state.id} is offloaded by a switch that is over"
            assert state.residency is Residency.OFFLOADING, f"rule 7: {state.id} is {state.residency} with an evictor"
            assert state.id not in s.turns, f"rule 2: {state.id} is offloaded within its turn"
        if state.ending:
            assert state in state.ending.ending, f"rule 7: {state.id} is ended for a switch that is over"
            asleep = state.residency is Residency.HOST or state.evictor is state.ending
            assert asleep, f"rule 7: {state.id} is {state.residency} and its engine ends"
            begun = state.active or (state.trains and state.begun)
            assert not begun, f"rule 8: {state.id} is ended with calls that were begun"
        known = state.residency is Residency.COLD or state.building
        assert known or not state.unbuilt, f"rule 7: {state.id} is {state.residency} and has no engine"
        loading = state.residency is Residency.LOADING
        assert (state.arrival is not None) == loading, f"rule 7: {state.id} is {state.residency}, arrival forgotten"
        for rival in state.rivals.values():
            assert s.gangs.get(rival.id) is rival, f"rule 5: {state.id} has a rival that is gone ({rival.id})"
            if not (state.occupies and rival.occupies):
                continue
            pair = {state.residency, rival.residency}
            if Residency.LOADING in pair:
                coming, other = (state, rival) if loading else (rival, state)
                mine = other.evictor is coming.arrival
                assert mine, f"rule 5: {coming.id} comes in over {other.id}, which it does not offload"
            else:
                assert Residency.DEVICE not in pair, f"rule 5: {state.id} and {rival.id} overlap and both are resident"
    assert used == s.residence.used, "rule 5: the bytes on the devices are counted wrongly"
    for gpu, size in s.floor.gpus.items():
        assert used[gpu] - crossing[gpu] <= size, f"rule 5: {used[gpu] - crossing[gpu]} bytes on {gpu} of {size}"


def _calls(s: Core) -> None:
    total = 0
    for state in s.gangs.values():
        entries = [*state.active.values(), *state.queue.values()]
        total += len(entries)
        assert state.units == sum(e.call.units for e in entries), f"rule 8: {state.id} counts its units wrongly"
        assert sum(state.ranks) == len(entries), f"rule 8: {state.id} counts its classes wrongly"
        newest: dict[str, int] = {}
        for entry in entries:
            call = entry.call
            assert s.calls.get(call.id) == (entry, state), f"rule 8: {call.id} is not where the books say"
            if call.seq is not None:
                assert call.seq > newest.get(call.deployment, -1), f"rule 6: {call.id} is behind a later call"
                newest[call.deployment] = call.seq
        if state.trains:
            assert len(state.active) <= 1, f"rule 6: {state.id} runs {len(state.active)} training calls at once"
    assert total == len(s.calls) == s.accepted - s.ended, "rule 8: a call is lost or counted twice"
    assert s.cancelled <= set(s.calls), "rule 8: an ended call is still to be cancelled"


def _line(s: Core) -> None:
    reserved = s.line.reserved
    for waiter in s.line:
        state, name = waiter.state, waiter.state.id
        assert state.eligible and name not in s.turns, f"rule 3: {name} waits without a reason"
        assert waiter.gpus == state.reach, f"rule 3: {name} waits for other GPUs than it needs"
        assert all(s.line.on[gpu].get(name) is waiter for gpu in waiter.gpus), (
            f"rule 10: nobody knows that {name} waits"
        )
        kept = [reserved.get(gpu) is waiter for gpu in waiter.gpus]
        assert all(kept) or not any(kept), f"rule 4: {name} has reservations on a part of its GPUs"
        if s.draining or s._open:
            continue
        whole = s.free.issuperset(waiter.gpus)
        if whole and not s.line.others(waiter):
            assert s._victims(state, ()) is None, f"rule 3: {name} could be granted and waits"
        some = any(gpu in s.free for gpu in waiter.gpus)
        unclaimed = not any(gpu in reserved for gpu in waiter.gpus)
        spoken = state.rank == SCAVENGER or not (some and unclaimed)
        assert spoken, f"rule 4: {name} is blocked on a part of its gang and has no reservation"
    for gpu, waiter in reserved.items():
        assert s.line.get(waiter.state.id) is waiter, (
            f"rule 4: {gpu} is kept for {waiter.state.id}, which does not wait"
        )
    for state in s.gangs.values():
        waits = s.line.get(state.id) is not None
        assert waits == (state.eligible and state.id not in s.turns), f"rule 8: {state.id} is forgotten"


def _spans(s: Core) -> None:
    settled = not (s._unused or s._stirred)
    for gpu, (since, use) in s.meter.open.items():
        tiled = s.meter.total[gpu] + s.now - since
        assert tiled == s.now - s.meter.start_us, f"rule 11: the spans of {gpu} do not tile its time"
        assert not settled or use == s._use(gpu), f"rule 11: {gpu} is written down as {use}, and is {s._use(gpu)}"
