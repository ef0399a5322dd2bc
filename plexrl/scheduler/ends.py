"""When turns have to end, for those who wait."""

from heapq import heappop, heappush

from plexrl.scheduler.actions import Pause
from plexrl.scheduler.gang import NORMAL, SCAVENGER, GangState
from plexrl.scheduler.grants import Grants
from plexrl.scheduler.line import Waiter
from plexrl.scheduler.turn import OpenTurn, Others, Phase


class Ends(Grants):
    """Deadlines of turns."""

    def _turn_in(self, now: int, gang: str, phase: Phase) -> OpenTurn | None:
        self._at(now)
        turn = self.turns.get(gang)
        return turn if turn and turn.phase is phase else None

    def _others(self, turn: OpenTurn) -> Others | None:
        """Who waits for the turn's GPUs; None when nobody does."""
        line = self.line
        joint = [peer for peer in turn.peers if peer.queue]  # in no line while they are in this turn
        if not joint and not any(line.on[gpu] for gpu in turn.gpus):
            return None
        answered = (
            turn.drained_us is not None
            and not joint
            and all(waiter.tenant.job == turn.job for gpu in turn.gpus for waiter in line.on[gpu].values())
        )
        best = NORMAL
        if line.ranks[0] or turn.rank == SCAVENGER or line.ranks[SCAVENGER]:
            ranks = (w.rank for gpu in turn.gpus for w in line.on[gpu].values() if self._may_begin(w, turn.rank))
            best = min((*ranks, *(peer.rank for peer in joint)), default=SCAVENGER)
        owed = False
        if turn.limit_us is not None:
            reserved = {id(w): w for gpu in turn.gpus if (w := line.reserved.get(gpu)) is not None}
            owed = any(self._owed(waiter) for waiter in reserved.values())
        idle = any(gpu in line.reserved for gpu in turn.gpus)
        return Others(best, answered, self.budget.next_us(self.now), owed, idle)

    def _may_begin(self, waiter: Waiter, rank: int) -> bool:
        """Whether a scavenger's end would let the waiter begin: one that waits for others' turns too is no reason."""
        if rank != SCAVENGER:
            return True
        return all(gpu in self.free or self.held[gpu].rank == SCAVENGER for gpu in waiter.gpus)

    def _bound(self, turn: OpenTurn) -> None:
        """Say again until when the turn lasts."""
        state = turn.state
        if state.active or state.queue:
            turn.rank = state.rank
        if turn.rank == SCAVENGER:
            self._scavenging[id(turn)] = turn
        else:
            self._scavenging.pop(id(turn), None)
        if turn.phase is not Phase.OPEN:
            deadline = None
        elif self.draining:
            deadline, turn.why = turn.drained_us, "drained"
        else:
            others = self._others(turn)
            deadline = None
            if others:
                deadline, turn.why = turn.ends_at(self.policy, others)
        if deadline != turn.deadline:
            turn.deadline = deadline
            if deadline is not None:
                heappush(self._due, (deadline, self._next(), turn))

    def _expire(self) -> None:
        """End or pause the turns whose time is over."""
        while self._due and self._due[0][0] <= self.now:
            deadline, _, turn = heappop(self._due)
            if turn.deadline != deadline or turn.phase is not Phase.OPEN:
                continue
            if turn.why == "preempted" and turn.rank != SCAVENGER:
                if self.budget.next_us(self.now) > self.now:
                    self._bound(turn)  # another preemption has used what was left
                    continue
                self.budget.take(self.now)
            if turn.state.active:
                self._pause(turn)
            else:
                self._end(turn, turn.why)

    def _pause(self, turn: OpenTurn) -> None:
        turn.phase, turn.deadline = Phase.PAUSING, None
        self._actions.append(Pause(turn.state.id, self.whole(turn.state)))
        self._stir(turn)

    def whole(self, state: GangState) -> bool:
        """Whether the gang's calls are not broken off, because its engine may have to be ended while it sleeps."""
        return state.trains and any(map(self.floor.crowded, state.gpus))
