"""What the executor answers to actions. Late and contrary answers are ignored; none of them raises."""

from collections.abc import Collection, Iterable, Mapping

from plexrl.scheduler.actions import Action
from plexrl.scheduler.profiles import Profiles
from plexrl.scheduler.turn import Phase
from plexrl.types import Moved, Residency


class Answers(Profiles):
    """To Build, Switch, Prefetch and Pause. That to Relocate stands with what relocation is."""

    def built(self, now: int, gang: str, evicted: Collection[str] | None = None) -> list[Action]:
        """The answer to Build: the engine is up and the gang resident, all of `evict` offloaded.

        One that was ended while it slept is built in the turn of the calls that want it. Ignored unless that build is
        under way.
        """
        turn = self._turn_in(now, gang, Phase.BUILD)
        if turn and turn.state.arrival:
            again = turn.state.unbuilt and bool(turn.state.queue)
            self._arrived(turn.state.arrival)
            if again:
                self._loaded(turn)
            else:
                self._end(turn, "built")
        return self._settle()

    def unbuilt(self, now: int, gang: str) -> list[Action]:
        """The engine of a gang that sleeps, or was told to leave, has ended, and its state is whole in host memory.

        Said of each of `end`, and of who keeps more of its device than was promised. It is built again when a call of
        it, or `rebuild`, wants it. Ignored where an engine is at work or lost, or holds a training call that was begun.
        """
        self._at(now)
        state = self.gangs.get(gang)
        asleep = state and not (state.moving or state.active or gang in self.turns)
        asleep = asleep and not (state.trains and state.begun)
        if asleep and (state.residency is Residency.HOST or state.evictor):
            self._unbuild(state)
        return self._settle()

    def build_failed(self, now: int, gang: str, evicted: Collection[str] = ()) -> list[Action]:
        """The gang is lost and its calls are dropped; `rebuild` tries again. evicted: victims that were offloaded.

        Ignored unless that build is under way.
        """
        turn = self._turn_in(now, gang, Phase.BUILD)
        if turn and turn.state.arrival:
            self._broken_off(turn.state.arrival, evicted)
            self._fail(turn.state, "build failed")
        return self._settle()

    def paused(self, now: int, gang: str, unfinished: Collection[str]) -> list[Action]:
        """The answer to Pause: these calls go back to the front of the gang's queue; its turn ends.

        Running calls that are not named are still expected in `finished`; a training gang gets no other call before
        that. Without a Pause under way the calls are put back and run again while the turn lasts.
        """
        self._at(now)
        state = self.gangs.get(gang)
        if state:
            busy = bool(state.active)
            for entry in state.put_back(set(unfinished)):
                self.meter.stopped(gang, entry.call, entry.call.units)
                if entry.call.id in self.cancelled:
                    self._drop([entry], state)
            if busy and not state.active:
                state.busy_us += self.now - state.active_us
            turn = self.turns.get(gang)
            if turn and turn.state is state and turn.phase is Phase.PAUSING:
                if turn.gather:
                    self._gathered(turn)
                self._end(turn, "gathered" if turn.gather else turn.why)
            self._changed(state)
        return self._settle()

    def switched(
        self, now: int, gang: str, ok: bool, moved: Mapping[str, Moved], evicted: Collection[str]
    ) -> list[Action]:
        """The answer to Switch. ok: the gang is resident and all victims are on the host.

        Not ok: the gang is lost, its calls are dropped; victims not in `evicted` count as in `lost`. Ignored unless the
        switch is under way. moved: GPU -> what was moved; the head journals it, the scheduler needs the time only.
        """
        self._at(now)
        state = self.gangs.get(gang)
        arrival = state.arrival if state else None
        if arrival and not (arrival.turn and arrival.turn.phase is Phase.BUILD):
            turn = arrival.turn
            if ok:
                self._arrived(arrival)
                if turn:
                    self._loaded(turn)
            else:
                self._broken_off(arrival, evicted)
                self._fail(state, "switch failed")
        return self._settle()

    def prefetched(
        self, now: int, gang: str, ok: bool, moved: Mapping[str, Moved], evicted: Collection[str]
    ) -> list[Action]:
        """The answer to Prefetch, as `switched`. If the gang has been given its turn meanwhile, that begins now."""
        return self.switched(now, gang, ok, moved, evicted)

    def undone(self, now: int, gang: str, evicted: Collection[str], crowded: bool = False) -> list[Action]:
        """The answer to a Build, Switch or Prefetch that was taken back, and nobody was lost by it.

        The gang is where it was before, and so are its victims but for those in `evicted`, which are on the host. It
        is in line again with the place that it had, and told again when it is next. crowded: host memory was short, so
        the next time everybody leaves its GPUs, and it is not prefetched. Ignored unless that is under way.
        """
        self._at(now)
        state = self.gangs.get(gang)
        arrival = state.arrival if state else None
        if arrival:
            before = Residency.COLD if state.building else Residency.HOST
            self._broken_off(arrival, evicted, undone=True)
            self._move(state, before)
            if crowded:
                self._crowded.add(gang)
            if arrival.turn:
                self._end(arrival.turn, "undone")
            else:
                self._enlist(state)
        return self._settle()

    def refills(self, gang: str, sizes: Iterable[tuple[str, int]], spent_us: int = 0) -> None:
        """What of a gang's state lies on NVMe now: (node, bytes). spent_us: a refill for its switch under way took so
        long. Unknown gang: nothing happens.
        """
        state = self.gangs.get(gang)
        if state:
            state.switch.refill_us = self.bandwidth.refill_us(sizes)
            state.switch.spent_us += spent_us
