"""The co-scheduler: events in, actions out. No clock, no sockets, no tensors.

A gang waits in line from its oldest eligible call on. A gang that cannot be granted reserves its GPUs against all that
are behind it, so nothing starves; a gang is granted whole or not at all, so nothing deadlocks. What late or contrary
answers mean is said at each event; none of them raises.
"""

from collections.abc import Collection, Mapping
from heapq import heappop

from plexrl.scheduler.actions import Action
from plexrl.scheduler.core import Core
from plexrl.scheduler.explain import explain
from plexrl.scheduler.gang import rivals
from plexrl.scheduler.turn import Phase
from plexrl.types import BadInput, Call, GroupSpec, Moved, Placement, Residency


class Scheduler(Core):
    """The scheduler of one pool.

    gpus: name (`<node>:<index>`) -> bytes. `now` is always integer microseconds; a `now` that goes backwards counts as
    the latest one seen. Every event method returns the actions to carry out, in order. Every Build, Switch and Pause
    must be answered, with a deadline on the executor's side (a gang that does not answer is `lost`).
    """

    # ---- the pool's life

    def start(self, now: int) -> None:
        """Spans begin here, in class startup. An event before it starts them itself."""
        self._start(now)

    def startup_done(self, now: int) -> list[Action]:
        """What is idle from now on is class idle."""
        self._at(now)
        self.started_up = True
        self._dirty.update(self.floor.gpus)
        return self._settle()

    def drain(self, now: int) -> list[Action]:
        """Grant no new turns; an open one ends as soon as it has nothing to run. What is idle is class drain."""
        self._at(now)
        self.draining = True
        self._dirty.update(self.floor.gpus)
        return self._settle()

    # ---- worker groups

    def place(self, now: int, spec: GroupSpec) -> Placement:
        """Place a group for life and ask for its build. Raises DoesNotFit, BadInput (placed already).

        The Build comes with the next event's actions: `wake_at()` is due at once, so call `tick`.
        """
        self._at(now)
        self._check_new(spec)
        placement = self.floor.choose(spec, self.policy.placement)
        for state in self._adopt(placement, spec, Residency.COLD):
            self._enlist(state)
        return placement

    def restore(
        self, now: int, placement: Placement, spec: GroupSpec, resident: bool | Collection[str]
    ) -> list[Action]:
        """Take up a group that was built before the head restarted.

        resident: whether its gangs are on their devices, or the ids of those that are; all others are on the host. A
        gang whose engine is gone: `lost` and `rebuild` follow. Raises BadInput when the GPUs are not the same, or two
        resident gangs overlap.
        """
        self._at(now)
        self._check_new(spec)
        on_device = {g.id for g in placement.gangs if resident is True or (resident and g.id in resident)}
        for gang in placement.gangs:
            for other in self.gangs.values():
                if gang.id in on_device and other.occupies and rivals(gang, other.gang):
                    raise BadInput(
                        f"gangs {gang.id} and {other.id} overlap and cannot both be resident",
                        "Offload one of them first",
                    )
        self.floor.occupy(placement, spec.owner)
        for state in self._adopt(placement, spec, Residency.HOST):
            if state.id in on_device:
                state.residency = Residency.DEVICE
        return self._settle()

    def remove(self, now: int, group: str) -> list[Action]:
        """The group is gone, and its engines with it: its calls are dropped, its turn ends, its extents are free.

        Unknown group: nothing happens.
        """
        self._at(now)
        states = self.groups.pop(group, [])
        for state in states:
            self._fail(state, "removed")
            del self.gangs[state.id]
            self._unlist(state)
            for rival in state.rivals.values():
                del rival.rivals[state.id]
        self.floor.vacate(group, [state.gang for state in states])
        actions = self._settle()
        for state in states:
            self.meter.forget(state.id)
        return actions

    def built(self, now: int, gang: str, evicted: Collection[str] | None = None) -> list[Action]:
        """The answer to Build: the engine is up and the gang resident, all of `evict` offloaded.

        Ignored unless that build is under way.
        """
        turn = self._turn_in(now, gang, Phase.BUILD)
        if turn:
            self._offloaded(turn, None)
            turn.state.move(Residency.DEVICE)
            self._end(turn, "built")
        return self._settle()

    def build_failed(self, now: int, gang: str, evicted: Collection[str] = ()) -> list[Action]:
        """The gang is lost and its calls are dropped; `rebuild` tries again. evicted: victims that were offloaded.

        Ignored unless that build is under way.
        """
        turn = self._turn_in(now, gang, Phase.BUILD)
        if turn:
            self._offloaded(turn, evicted)
            self._fail(turn.state, "build failed")
        return self._settle()

    def lost(self, now: int, gang: str) -> list[Action]:
        """A rank of the gang died: its calls are dropped, its turn ends, its device state is gone until `rebuild`.

        Victims of its switch under way count as neither usable nor gone until a later Switch names them. After
        `rebuild` no answer of the old engine may be passed on: it would be taken for the new one's.
        """
        self._at(now)
        if gang in self.gangs:
            self._fail(self.gangs[gang], "lost")
        return self._settle()

    def rebuild(self, now: int, gang: str) -> list[Action]:
        """Build a lost gang again, in its old place. Ignored unless it is lost."""
        self._at(now)
        state = self.gangs.get(gang)
        if state and state.residency is Residency.LOST:
            state.move(Residency.COLD)
            state.since = self._next()
            self._enlist(state)
        return self._settle()

    # ---- calls

    def submit(self, now: int, call: Call) -> list[Action]:
        """Accept a call; from then on it ends exactly once: by `finished`, or in a Dropped.

        Training calls of a deployment come in seq order. A sample goes to the replica with the fewest outstanding
        units. Raises BadInput: unknown group, an id that is outstanding, a kind that the group's role does not serve, a
        seq not above the deployment's outstanding ones.
        """
        self._at(now)
        state = self._route(call)
        self._numbers[call.id] = self._next()
        self.accepted += 1
        self.calls[call.id] = call, state
        turn = self.turns.get(state.id)
        if turn and turn.phase is Phase.OPEN and turn.drained_us is not None:
            if self.now >= turn.hold_until(self.policy, self._waiters(turn)):
                self._end(turn, "drained")  # it stayed open only because nobody asked; this is another turn
        state.accept(call)
        self._changed(state)
        return self._settle()

    def cancel(self, now: int, call_id: str) -> list[Action]:
        """A call that waits is dropped. One that runs is the executor's to stop, which it reports as `finished`.

        If it is paused instead, it is dropped then. Unknown call: nothing happens.
        """
        self._at(now)
        if call_id in self.calls:
            call, state = self.calls[call_id]
            if call_id in state.queue:
                self._drop([call], state)
                self._changed(state)
            else:
                self.cancelled.add(call_id)
        return self._settle()

    def finished(self, now: int, call_id: str, units: int) -> list[Action]:
        """A call ended, well or not, after so many units. Wherever the call is, it ends; unknown: nothing happens."""
        self._at(now)
        if call_id in self.calls:
            call, state = self.calls[call_id]
            self.meter.stopped(state.id, call, units)
            self._forget(call, state)
            turn = self.turns.get(state.id)
            if turn and turn.phase in (Phase.OPEN, Phase.PAUSING):
                turn.note_finished(self.now, call)
            self._changed(state)
        return self._settle()

    def paused(self, now: int, gang: str, unfinished: Collection[str]) -> list[Action]:
        """The answer to Pause: these calls go back to the front of the gang's queue; its turn ends.

        Running calls that are not named are still expected in `finished`; a training gang gets no other call before
        that. Without a Pause under way the calls are put back and run again while the turn lasts.
        """
        self._at(now)
        state = self.gangs.get(gang)
        if state:
            for call in state.put_back(set(unfinished)):
                self.meter.stopped(gang, call, call.units)
                if call.id in self.cancelled:
                    self._drop([call], state)
            turn = self.turns.get(gang)
            if turn and turn.phase is Phase.PAUSING:
                self._end(turn, "quantum")
            self._changed(state)
        return self._settle()

    def switched(
        self, now: int, gang: str, ok: bool, moved: Mapping[str, Moved], evicted: Collection[str]
    ) -> list[Action]:
        """The answer to Switch. ok: the gang is resident and all victims are on the host.

        Not ok: the gang is lost, its calls are dropped; victims not in `evicted` count as in `lost`. Ignored unless the
        switch is under way. moved: GPU -> what was moved; the head journals it, the scheduler needs the time only.
        """
        turn = self._turn_in(now, gang, Phase.SWITCH)
        if turn:
            self._offloaded(turn, None if ok else evicted)
            if ok:
                turn.state.move(Residency.DEVICE)
                turn.open(self.now)
                self._changed(turn.state)
            else:
                self._fail(turn.state, "switch failed")
        return self._settle()

    # ---- time

    def tick(self, now: int) -> list[Action]:
        """Time passed. Wanted at `wake_at()`; harmless at any other time."""
        self._at(now)
        return self._settle()

    def wake_at(self) -> int | None:
        """When `tick` is wanted next if no event comes before."""
        if self._dirty:
            return self.now
        while self._due and self._due[0][2].deadline != self._due[0][0]:
            heappop(self._due)
        return self._due[0][0] if self._due else None

    def spans(self, now: int) -> list[Action]:
        """Close every open span at `now`; each goes on with what it was."""
        self._at(now)
        actions = self._settle()
        self.meter.cut(self.now, self.floor.gpus)
        return actions + self._closed()

    # ---- people

    def explain(self, name: str) -> str:
        """What a job or a call waits for, in words."""
        return explain(self, name)
