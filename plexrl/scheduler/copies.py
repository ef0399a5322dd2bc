"""Gangs come in, and others leave for them: in turns, and ahead of them."""

from collections.abc import Collection

from plexrl.scheduler.actions import Prefetch
from plexrl.scheduler.books import Books
from plexrl.scheduler.gang import GangState
from plexrl.scheduler.order import key
from plexrl.scheduler.residence import Arrival
from plexrl.scheduler.turn import OpenTurn, Phase
from plexrl.types import Residency


class Copies(Books):
    """What moves between devices and hosts."""

    def _move(self, state: GangState, to: Residency) -> None:
        self.residence.move(state, to)
        self._open.update(gpu for gpu in state.gpus if gpu in self.free)

    def _arrive(self, state: GangState, victims: list[GangState], turn: OpenTurn | None) -> tuple[str, ...]:
        """The gang begins to come in, and others to leave for it; their names."""
        arrival = Arrival(state, self.now, turn.job if turn else state.tenant.job, victims, turn)
        state.arrival = arrival
        for victim in victims:
            self._move(victim, Residency.OFFLOADING)
            victim.evictor = arrival
        self._move(state, Residency.LOADING)
        for one in (state, *victims):
            for gpu in one.gpus:
                self.copies[gpu][one.id] = arrival
            self._unused.update(one.gpus)
        return tuple(victim.id for victim in victims)

    def _arrived(self, arrival: Arrival) -> None:
        """It is there, and the others have left."""
        for victim in arrival.evicting:
            self._clear_evictor(victim)
            self._move(victim, Residency.HOST)
        arrival.evicting = []
        self._copied(arrival.state)
        self._crowded.discard(arrival.state.id)
        arrival.state.arrival = None
        if arrival.turn is None or arrival.turn.phase is not Phase.BUILD:
            arrival.state.switch.observe(self.now - arrival.begun_us)
        self._move(arrival.state, Residency.DEVICE)
        if arrival.state.building:
            arrival.state.building = False
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
        self._copied(arrival.state)
        arrival.state.arrival, arrival.state.building = None, False
        self._look_again(arrival.state)

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

    def _victims(self, state: GangState, keep: Collection[GangState]) -> list[GangState] | None:
        """Who leaves so that the gang can have its turn; None while it cannot."""
        coming = self.residence.needs(state.members)
        if any(member.evictor for member in state.members):
            return None  # on its way out for somebody else
        coming = [member for member in coming if member.arrival is None]
        if not coming:
            return []
        lazy = self.policy.lazy and state.id not in self._crowded
        return self.residence.victims(coming, self.now, {*state.members, *keep}, lazy)

    def _look_ahead(self, turn: OpenTurn) -> None:
        """Bring in the next gang beside the turn, if its bytes fit."""
        if any(self.copies[gpu] for gpu in turn.gpus):
            return
        held = [w for gpu in turn.gpus if (w := self.line.reserved.get(gpu)) is not None]
        waiters = held[:1] or list({id(w): w for gpu in turn.gpus for w in self.line.on[gpu].values()}.values())
        if not any(waiter.state.residency is Residency.HOST for waiter in waiters):
            return
        state = min(waiters, key=lambda waiter: key(self, waiter)).state
        if state.residency is not Residency.HOST or state.peers or state.id in self._crowded:
            return
        at_work = {member for gpu in state.gpus if (t := self.held.get(gpu)) for member in (t.state, *t.peers)}
        victims = self.residence.victims([state], self.now, {state, *at_work, *(w.state for w in held)})
        if victims is None:
            return
        evict = self._arrive(state, victims, None)
        self._actions.append(Prefetch(state.id, evict))
