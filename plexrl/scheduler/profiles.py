"""What is learnt of jobs and groups, and the one time that a group may be placed anew for it."""

from plexrl.scheduler.actions import Action, Relocate
from plexrl.scheduler.core import Core
from plexrl.scheduler.costs import Learned
from plexrl.scheduler.gang import Entry, GangState
from plexrl.scheduler.turn import OpenTurn
from plexrl.types import CallKind, Residency, Role

_PROFILED = 3  # optim_steps or rollouts after which what a group needs counts as known (ours)


class Profiles(Core):
    """Think times, duties, relocation."""

    def _think(self, state: GangState) -> None:
        """Learn how long the gang's users take from a result to the next call."""
        if state.finished_us is not None and not state.active and not state.queue:
            gap = self.now - state.finished_us
            think = state.think.get(state.last)
            if think is None:
                think = state.think[state.last] = Learned()
            think.observe(gap)
            state.idle_us += gap

    def _profile(self, state: GangState, entry: Entry, turn: OpenTurn | None) -> None:
        """Count what tells how much of its GPUs a group needs; when that is known, placement goes by it."""
        group = state.spec.group
        if state.spec.role is Role.SAMPLE:
            if not self.rollouts[group].over:
                return
        elif entry.call.kind is not CallKind.OPTIM_STEP:
            return
        state.steps += 1
        gangs = self.groups[group]
        if state.steps < _PROFILED or (state.steps > _PROFILED and not self.policy.relocate):
            return
        duties = [gang.duty for gang in gangs if gang.duty is not None]
        if not duties:
            return
        self.floor.set_duty(group, sum(duties) / len(duties))
        if self.policy.relocate and state.trains and turn and not turn.gradients and turn.drained_us is not None:
            self._relocate(state, turn)

    def _relocate(self, state: GangState, turn: OpenTurn) -> None:
        """At the natural end of a turn: go where there is clearly more room, once."""
        group = state.spec.group
        if group in self.relocated_groups:
            return
        better = self.floor.better(group, self.policy, state.owner)
        if better is None:
            return
        self.relocated_groups.add(group)
        state.moving = True
        self._tell_unions(state)
        self._moves[group] = better
        self._end(turn, "relocated")
        self._actions.append(Relocate(group, better))

    def relocated(self, now: int, group: str, ok: bool) -> list[Action]:
        """The answer to Relocate. ok: its state is saved and its engines have ended; it is built anew at its new place.

        Not ok: it stays where it is. Ignored unless that is under way.
        """
        self._at(now)
        placement = self._moves.pop(group, None)
        states = self.groups.get(group)
        if placement is None or not states or not states[0].moving:
            return self._settle()
        old = states[0]
        old.moving = False
        if ok:
            entries = list(old.queue.values())
            for entry in entries:
                old.forget(entry)
            self._fail(old, "relocated")
            self._abandon(old)
            self.floor.move(group, placement)
            (new,) = self._adopt(placement, old.spec, Residency.COLD)
            new.think, new.service, new.cycle, new.steps = old.think, old.service, old.cycle, old.steps
            new.finished_us, new.last = old.finished_us, old.last
            for entry in entries:
                new.accept(entry)
                self.calls[entry.call.id] = entry, new
            self._admit = True
        self._enlist(self.groups[group][0])
        self._tell_unions(self.groups[group][0])
        return self._settle()
