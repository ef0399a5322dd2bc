"""Who is granted a turn: whole gangs, reservations, and what may go ahead of them."""

from plexrl.scheduler.actions import Build, Switch, Turn
from plexrl.scheduler.copies import Copies
from plexrl.scheduler.gang import SCAVENGER, GangState
from plexrl.scheduler.line import Waiter
from plexrl.scheduler.order import key, score
from plexrl.scheduler.residence import Leave
from plexrl.scheduler.turn import OpenTurn, Phase
from plexrl.types import Residency


class Grants(Copies):
    """Turns begin and end."""

    def _grants(self) -> None:
        """Give the free GPUs to those who are next."""
        while self._open:
            opened = self._open & self.free
            self._open.clear()
            # Who has starved may take a reservation over, also where it has lain for long.
            kept = {gpu for at in opened if (holder := self.line.reserved.get(at)) for gpu in holder.gpus}
            waiters = {
                name: waiter for gpu in opened | (kept & self.free) for name, waiter in self.line.on[gpu].items()
            }
            able = list(waiters.values())
            if not any(self._starves(waiter) for waiter in able):
                able = [waiter for waiter in able if not self._stuck(waiter)]
            if len(able) > 1:
                able.sort(key=lambda waiter: key(self, waiter))
            for waiter in able:
                self._try(waiter)
                if self._open:  # a reservation is gone: those who were passed over for it come first again
                    self._open |= opened
                    break

    def _stuck(self, waiter: Waiter) -> bool:
        """Whether nothing can be done for it now: a part of its gang is not free, and on another part there is the
        reservation of a gang that cannot be granted either."""
        free = self.free
        return not free.issuperset(waiter.gpus) and any(
            holder is not None and holder is not waiter and not free.issuperset(holder.gpus)
            for holder in map(self.line.reserved.get, waiter.gpus)
        )

    def _try(self, waiter: Waiter) -> None:
        """Grant the gang, or keep its GPUs for it, or let it go ahead of another's reservation, or leave it waiting."""
        state, line = waiter.state, self.line
        whole = self.free.issuperset(waiter.gpus)
        others = line.others(waiter)
        if others and self._starves(waiter) and not any(self._before(other, waiter) for other in others):
            for other in others:
                self._release(other)
            others = []
        if others:
            if whole and all(self._blocks(state, other) for other in others):
                victims = self._victims(state, ())
                if victims is not None:
                    self._grant(waiter, victims, "begun")
            elif whole and self.policy.backfill:
                self._backfill(waiter, others)
            return
        if whole:
            victims = self._victims(state, ())
            if victims is not None:
                self._grant(waiter, victims, "")
                return
        if state.rank != SCAVENGER and not line.holds(waiter) and not self.free.isdisjoint(waiter.gpus):
            line.reserve(waiter)
            for gpu in waiter.gpus:
                turn = self.held.get(gpu)
                if turn:
                    turn.looked = False
                    self._stir(turn)

    def _starves(self, waiter: Waiter) -> bool:
        return waiter.state.rank != SCAVENGER and self.now - waiter.since_us >= self.policy.starvation_us

    def _before(self, one: Waiter, other: Waiter) -> bool:
        return self._starves(one) and one.ticket < other.ticket

    def _blocks(self, state: GangState, other: Waiter) -> bool:
        """Whether the other's reservation waits for what this gang has begun: its engine cannot be ended before."""
        begun = state.trains and state.begun and state.spec.residual_bytes
        if not begun or state.residency is not Residency.HOST or not self.free.issuperset(other.gpus):
            return False
        return self._victims(other.state, ()) is None

    def _backfill(self, waiter: Waiter, others: list[Waiter]) -> None:
        """EASY: ahead of reservations, if the turn and both its switches end before those could begin."""
        state = waiter.state
        if state.residency is Residency.COLD:
            return
        both = 0 if state.residency is Residency.DEVICE else 2 * state.switch.mean
        # Long enough to pay for its switches, and for what it would do there, or half a quantum of it.
        least = max(int(self.policy.min_turn_factor * both / 2), min(waiter.service_us, self.policy.quantum_us // 2))
        shadow = min(self._shadow(other) for other in others)
        if self.now + both + least > shadow:
            return
        victims = self._victims(state, [member for other in others for member in other.state.members])
        if victims is not None:
            self._grant(waiter, victims, "backfill", shadow - both // 2)

    def _owed(self, waiter: Waiter) -> bool:
        """Whether a reservation waits for nothing but turns that went ahead of it."""
        return all(gpu in self.free or self.held[gpu].limit_us is not None for gpu in waiter.gpus)

    def _shadow(self, waiter: Waiter) -> int:
        """When a reservation's gang is expected to begin; now, if it waits for nothing but turns ahead of it."""
        shadow = self._shadows.get(waiter.state.id)
        if shadow is None:
            turns = {id(turn): turn for gpu in waiter.gpus if (turn := self.held.get(gpu)) is not None}
            shadow = self.now
            if any(turn.limit_us is None for turn in turns.values()):
                shadow = max(turn.expected_end(self.policy, self.now) for turn in turns.values())
            self._shadows[waiter.state.id] = shadow
        return shadow

    # ---- a turn

    def _grant(self, waiter: Waiter, victims: Leave, reason: str, limit_us: int | None = None) -> None:
        """The gang's GPUs are free: its turn begins."""
        state = waiter.state
        # Whose prefetch is under way comes last: the first to be told takes the victims with it.
        coming = sorted(self.residence.needs(state.members), key=lambda member: member.arrival is not None)
        cold = state.residency is Residency.COLD
        phase = Phase.BUILD if cold else Phase.SWITCH if coming else Phase.OPEN
        job = state.spec.owner if state.new else state.tenant.job
        turn = OpenTurn(state, waiter.gpus, state.peers, "", phase, self.now, job, state.rank, limit_us=limit_us)
        if state.peers:
            turn.peer = state.peers[0].spec.group
        value = 0.0 if self.policy.order in ("fifo", "round_robin") else score(self, waiter)
        if not reason:
            prefetched = len(coming) == 1 and state.arrival is not None
            reason = phase.value if coming and not prefetched else "prefetched" if prefetched else "resident"
        self._actions.append(Turn(state.id, False, reason, max(0, self.now - waiter.since_us), value))
        self._unlist(state)
        for gpu in turn.gpus:
            self.held[gpu] = turn
        self.free.difference_update(turn.gpus)
        for member in state.members:
            self.turns[member.id] = turn
            self._unlist(member)
        self._stir(turn)
        if not coming:
            turn.open(self.now)
            return
        turn.to_load = coming
        self._load_next(turn, victims)

    def _load_next(self, turn: OpenTurn, victims: Leave) -> None:
        """Bring in the next gang of the turn. The first takes all victims with it."""
        state = turn.to_load[0]
        if state.arrival:  # a prefetch under way: its answer opens the turn
            state.arrival.turn = turn
            return
        state.building = turn.phase is Phase.BUILD
        evict, end = self._arrive(state, victims, turn)
        self._actions.append((Build if turn.phase is Phase.BUILD else Switch)(state.id, evict, end))

    def _loaded(self, turn: OpenTurn) -> None:
        """The gang that was coming in is there."""
        turn.to_load.pop(0)
        while turn.to_load and turn.to_load[0].residency is Residency.DEVICE:
            turn.to_load.pop(0)
        if turn.to_load:
            self._load_next(turn, Leave([], []))
            return
        turn.open(self.now)
        self._changed(turn.state)

    def _end(self, turn: OpenTurn, reason: str) -> None:
        state = turn.state
        if turn.phase in (Phase.OPEN, Phase.PAUSING) and turn.ran:
            end = self.now if turn.drained_us is None else turn.drained_us
            state.service.observe(max(0, end - turn.opened_us))
            state.fruitless = 0 if turn.fruitful else state.fruitless + 1
        for member in (state, *turn.peers):
            if member.arrival and member.arrival.turn is turn:
                member.arrival.turn = None
        turn.deadline = None
        for gpu in turn.gpus:
            del self.held[gpu]
        self.free.update(turn.gpus)
        self._open.update(turn.gpus)
        self._unused.update(turn.gpus)
        self._stirred.pop(id(turn), None)
        self._scavenging.pop(id(turn), None)
        for gpu in turn.gpus:
            holder = self.line.reserved.get(gpu)
            if holder is not None:
                self._stir_limited(holder)
        for member in (state, *turn.peers):
            del self.turns[member.id]
            member.used, member.used_us = self._next(), self.now
        if turn.ran:
            state.since, state.since_us = self._next(), self.now
        self._actions.append(Turn(state.id, True, reason))
        for member in (state, *turn.peers):
            self._enlist(member)

    def _part(self, turn: OpenTurn, peer: GangState, reason: str) -> None:
        """A union turn goes on without the peer, whose engine died: the call that runs will be told to have failed."""
        self._actions.append(Turn(turn.state.id, True, f"peer {reason}"))
        self._actions.append(Turn(turn.state.id, False, "alone"))
        self.meter.cut(self.now, turn.gpus)  # all its GPUs close a span together
        left = [gpu for gpu in turn.gpus if gpu not in turn.state.gpus]
        turn.gpus, turn.peers, turn.peer = turn.state.gpus, (), ""
        del self.turns[peer.id]
        peer.used, peer.used_us = self._next(), self.now
        for gpu in left:
            del self.held[gpu]
        self.free.update(left)
        self._open.update(left)
        self._unused.update(left)
        turn.note_drained(self.now)
        self._stir(turn)

    def _fail(self, state: GangState, reason: str) -> None:
        self._drop([*state.active.values(), *state.queue.values()], state)
        if state.evictor:
            state.evictor.evicting.remove(state)
            self._clear_evictor(state)
        turn = self.turns.get(state.id)
        if state.ending:
            state.ending.ending.remove(state)
        if state.arrival:
            self._broken_off(state.arrival, ())
        state.ending, state.unbuilt, state.wanted, state.switch.build_us = None, False, False, 0
        self._crowded.discard(state.id)  # host memory was short for a state that is no more
        self._move(state, Residency.LOST)
        if turn and turn.state is not state and turn.phase is not Phase.SWITCH:
            self._part(turn, state, reason)
        elif turn:
            self._end(turn, reason)
        self._enlist(state)
        self._tell_unions(state)
