"""Samples that change their replica: shared out when one has its turn, gathered when a rollout's long tail is left."""

from plexrl.scheduler.actions import Gather
from plexrl.scheduler.ends import Ends
from plexrl.scheduler.gang import GangState
from plexrl.scheduler.rollout import Rollout
from plexrl.scheduler.turn import OpenTurn, Phase


class Samples(Ends):
    """A sampler's replicas."""

    def _share_out(self, state: GangState, ran: bool) -> None:
        """A replica that gets its turn takes its part of what waits at replicas without one; idle again, all of it."""
        takes_all = ran and not state.active
        siblings = [s for s in self.groups[state.spec.group] if s is not state and s.queue and s.id not in self.turns]
        for sibling in sorted(siblings, key=lambda s: (-s.units, s.id)):
            for entry in reversed(list(sibling.queue.values())):
                if entry.call.id in sibling.begun:
                    continue
                if not takes_all and state.units and sibling.units - entry.call.units < state.units:
                    break
                sibling.forget(entry)
                state.accept(entry)
                self.calls[entry.call.id] = entry, state
            self._enlist(sibling)

    def _gather(self, turn: OpenTurn, rollout: Rollout) -> None:
        """Long tails: when most of a rollout is done, its rest moves together for those who wait for the GPUs."""
        if not rollout.is_tail(self.policy.gather_share):
            return
        at_work = [
            other
            for s in self.groups[turn.state.spec.group]
            if (other := self.turns.get(s.id)) is not None and other.phase is Phase.OPEN and s.active
        ]
        wanted = [
            other
            for other in at_work
            if any(waiter.rank <= other.rank for gpu in other.gpus for waiter in self.line.on[gpu].values())
        ]
        if len(at_work) < 2 or not wanted:
            return
        unwanted = [other for other in at_work if other not in wanted]
        target = max(unwanted or wanted, key=lambda other: (other.state.units, other.state.id))
        for other in wanted:
            if other is not target:
                other.gather = target.state
                self._pause(other)

    def _gathered(self, turn: OpenTurn) -> None:
        """The samples of a replica that paused for it go on in another."""
        state, target = turn.state, turn.gather
        if not target.built or target.ending or target.id not in self.gangs:
            return
        moved, begun = list(state.queue.values()), state.begun.copy()
        for entry in moved:
            state.forget(entry)
            target.accept(entry)
            self.calls[entry.call.id] = entry, target
        target.begun |= begun
        if begun:
            self._actions.append(Gather(state.id, target.id, tuple(e.call.id for e in moved if e.call.id in begun)))
        self._changed(target)
