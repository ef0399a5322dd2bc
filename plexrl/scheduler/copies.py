"""Gangs come in, and others leave for them: in turns, and ahead of them."""

from collections.abc import Collection

from plexrl.scheduler.actions import Prefetch
from plexrl.scheduler.books import Books
from plexrl.scheduler.gang import GangState
from plexrl.scheduler.order import key
from plexrl.scheduler.residence import Arrival, Leave
from plexrl.scheduler.turn import OpenTurn, Phase
from plexrl.types import Residency


class Copies(Books):
    """What moves between devices and hosts."""

    def _move(self, state: GangState, to: Residency) -> None:
        self.residence.move(state, to)
        self._open.update(gpu for gpu in state.gpus if gpu in self.free)

    def _arrive(self, state: GangState, leave: Leave, turn: OpenTurn | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The gang begins to come in, others to leave for it and others' engines to end; their names."""
        arrival = Arrival(state, self.now, turn.job if turn else state.tenant.job, leave.evict, leave.end, turn)
        state.arrival = arrival
        for victim in leave.evict:
            self._move(victim, Residency.OFFLOADING)
            victim.evictor = arrival
        for sleeper in leave.end:
            sleeper.ending = arrival
        self._move(state, Residency.LOADING)
        for one in (state, *leave.evict):
            for gpu in one.gpus:
                self.copies[gpu][one.id] = arrival
            self._unused.update(one.gpus)
        return tuple(victim.id for victim in leave.evict), tuple(sleeper.id for sleeper in leave.end)

    def _arrived(self, arrival: Arrival) -> None:
        """It is there, and the others have left."""
        for victim in arrival.evicting:
            self._clear_evictor(victim)
            self._move(victim, Residency.HOST)
        arrival.evicting = []
        self._spared(arrival)
        self._copied(arrival.state)
        self._crowded.discard(arrival.state.id)
        arrival.state.arrival = None
        if arrival.turn is None or arrival.turn.phase is not Phase.BUILD:
            arrival.state.switch.observe(self.now - arrival.begun_us)
        self._move(arrival.state, Residency.DEVICE)
        if arrival.state.building:
            arrival.state.builds.observe(self.now - arrival.begun_us)
            arrival.state.switch.build_us = 0
            arrival.state.building = arrival.state.unbuilt = arrival.state.wanted = False
            self._tell_unions(arrival.state)
        self._look_again(arrival.state)

    def _broken_off(self, arrival: Arrival, evicted: Collection[str], undone: bool = False) -> None:
        """It will not come. evicted: those that have left. undone: the others are where they were."""
        for victim in arrival.evicting:
            self._clear_evictor(victim)
            if victim.id in evicted:
                self._move(victim, Residency.HOST)
            elif undone:
                self._move(victim, Residency.DEVICE)
        arrival.evicting = []
        self._spared(arrival)
        self._copied(arrival.state)
        arrival.state.arrival, arrival.state.building = None, False
        self._look_again(arrival.state)

    def _spared(self, arrival: Arrival) -> None:
        """Whose engine has not ended for it will not."""
        for sleeper in arrival.ending:
            sleeper.ending = None
            self._look_again(sleeper)
            self._open.update(gpu for gpu in sleeper.gpus if gpu in self.free)
        arrival.ending = []

    def _unbuild(self, state: GangState) -> None:
        """The engine of a gang that sleeps, or was to leave, has ended; its state is in host memory."""
        if state.evictor:
            state.evictor.evicting.remove(state)
            self._clear_evictor(state)
            self._move(state, Residency.HOST)
        if state.ending:
            state.ending.ending.remove(state)
            state.ending = None
        state.begun.clear()
        self._move(state, Residency.COLD)
        # Whose turn with it waits needs it at once; the first replica is the one for that.
        first = self.groups[state.spec.group][0] is state
        state.unbuilt = not (first and any(self.calls[c][0].call.peer == state.spec.group for c in self._unions))
        state.switch.build_us = state.builds.mean
        self._look_again(state)
        self._enlist(state)
        self._tell_unions(state)

    def _clear_evictor(self, victim: GangState) -> None:
        self._copied(victim)
        self._open.update(gpu for gpu in victim.gpus if gpu in self.free)
        victim.evictor = None
        self._look_again(victim)

    def _copied(self, state: GangState) -> None:
        """Nothing of the gang moves any more."""
        for gpu in state.gpus:
            self.copies[gpu].pop(state.id, None)
        self._unused.update(state.gpus)

    def _look_again(self, state: GangState) -> None:
        """Somebody who waits beside a turn on these GPUs may fit now."""
        for gpu in state.gpus:
            turn = self.held.get(gpu)
            if turn:
                turn.looked = False
                self._stir(turn)

    def _victims(self, state: GangState, keep: Collection[GangState]) -> Leave | None:
        """Who makes room so that the gang can have its turn; None while it cannot."""
        coming = self.residence.needs(state.members)
        if any(member.evictor or member.ending for member in state.members):
            return None  # on its way out for somebody else
        coming = [member for member in coming if member.arrival is None]
        if not coming:
            return Leave([], [])
        lazy = self.policy.lazy and state.id not in self._crowded
        ends = self.policy.end_sleepers and not keep  # who goes ahead of others can wait
        return self.residence.victims(coming, self.now, {*state.members, *keep}, lazy, ends)

    def _look_ahead(self, turn: OpenTurn) -> None:
        """Bring in the next gang beside the turn, if its bytes fit."""
        if any(self.copies[gpu] for gpu in turn.gpus):
            return
        held = [w for gpu in turn.gpus if (w := self.line.reserved.get(gpu)) is not None]
        waiters = held[:1] or list({id(w): w for gpu in turn.gpus for w in self.line.on[gpu].values()}.values())
        if not any(waiter.state.residency is Residency.HOST for waiter in waiters):
            return
        state = min(waiters, key=lambda waiter: key(self, waiter)).state
        if state.residency is not Residency.HOST or state.ending or state.peers or state.id in self._crowded:
            return
        turns = [held_by for gpu in state.gpus if (held_by := self.held.get(gpu)) is not None]
        if any(member.arrival is None for held_by in turns for member in held_by.to_load):
            return  # room has been made there for somebody who has not begun to come in
        at_work = {member for held_by in turns for member in (held_by.state, *held_by.peers)}
        keep = {state, *at_work, *(w.state for w in held)}
        leave = self.residence.victims([state], self.now, keep, ends=False)
        if leave is None:
            return
        evict, _ = self._arrive(state, leave, None)
        self._actions.append(Prefetch(state.id, evict))
