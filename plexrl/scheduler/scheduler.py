"""The co-scheduler: events in, actions out. No clock, no sockets, no tensors.

A gang waits in line from its oldest eligible call on. A gang that cannot be granted reserves its GPUs against all that
are behind it, so nothing starves; a gang is granted whole or not at all, so nothing deadlocks. What late or contrary
answers mean is said at each event; none of them raises.
"""

from collections.abc import Collection, Mapping
from heapq import heappop, heappush

from plexrl.scheduler.actions import Action, Build, Closed, Dropped, Pause, Run, Switch, Turn
from plexrl.scheduler.explain import explain
from plexrl.scheduler.gang import GangState, rivals
from plexrl.scheduler.invariants import check
from plexrl.scheduler.order import ORDERS
from plexrl.scheduler.placement import Floor
from plexrl.scheduler.policy import Policy
from plexrl.scheduler.spans import Meter, Use
from plexrl.scheduler.turn import OpenTurn, Phase
from plexrl.types import BadInput, Call, CallKind, GroupSpec, Moved, Placement, Residency, Role, SpanClass

IDLE = Use(SpanClass.IDLE)


class Scheduler:
    """The scheduler of one pool.

    gpus: name (`<node>:<index>`) -> bytes. `now` is always integer microseconds; a `now` that goes backwards counts as
    the latest one seen. Every event method returns the actions to carry out, in order. Every Build, Switch and Pause
    must be answered, with a deadline on the executor's side (a gang that does not answer is `lost`).
    """

    def __init__(self, gpus: Mapping[str, int], policy: Policy) -> None:
        self.policy = policy
        self.floor = Floor(gpus)
        self.gangs: dict[str, GangState] = {}
        self.groups: dict[str, list[GangState]] = {}
        self.calls: dict[str, tuple[Call, GangState]] = {}
        self.cancelled: set[str] = set()
        self.line = ORDERS[policy.order]()
        self.turns: dict[str, OpenTurn] = {}
        self.held: dict[str, OpenTurn] = {}
        self.free: set[str] = set(gpus)
        self.wanted: dict[str, dict[str, GangState]] = {gpu: {} for gpu in gpus}
        self.offloads: dict[str, dict[str, OpenTurn]] = {gpu: {} for gpu in gpus}
        self.meter: Meter | None = None
        self.started_up = False
        self.draining = False
        self.accepted = self.ended = 0
        self.now = 0
        self._numbers: dict[str, int] = {}
        self._ticket = 0
        self._due: list[tuple[int, int, OpenTurn]] = []
        self._dirty: set[str] = set()
        self._regrant = False
        self._actions: list[Action] = []

    # ---- the pool's life

    def start(self, now: int) -> None:
        """Spans begin here, in class startup. An event before it starts them itself."""
        self.now = now
        self.meter = Meter(self.floor.gpus, now, Use(SpanClass.STARTUP))

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

        Victims of its switch under way count as neither usable nor gone until a later Switch names them.
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

    def invariants(self) -> None:
        """Raises AssertionError naming the broken rule."""
        check(self)

    # ---- inside

    def _at(self, now: int) -> None:
        if self.meter is None:
            self.start(now)
        self.now = max(self.now, now)

    def _next(self) -> int:
        self._ticket += 1
        return self._ticket

    def _check_new(self, spec: GroupSpec) -> None:
        if spec.group in self.groups:
            raise BadInput(f"worker group {spec.group} is placed already", "Remove it first")

    def _adopt(self, placement: Placement, spec: GroupSpec, residency: Residency) -> list[GangState]:
        states = [GangState(gang, spec, residency, self._next(), 0) for gang in placement.gangs]
        self.groups[spec.group] = states
        for state in states:
            for other in self.gangs.values():
                if rivals(state.gang, other.gang):
                    state.rivals[other.id] = other
                    other.rivals[state.id] = state
            self.gangs[state.id] = state
        return states

    def _route(self, call: Call) -> GangState:
        if call.id in self.calls:
            raise BadInput(f"call {call.id} is outstanding already", "Submit each call once")
        states = self.groups.get(call.group)
        if not states:
            raise BadInput(f"call {call.id} names worker group {call.group}, which is not placed", "Place it first")
        if (call.kind is CallKind.SAMPLE) != (states[0].spec.role is Role.SAMPLE):
            raise BadInput(
                f"call {call.id} is a {call.kind}, and worker group {call.group} is for {states[0].spec.role}",
                "Send it to a group of the other role",
            )
        state = min(
            states,
            key=lambda s: (s.residency is Residency.LOST, s.residency is Residency.COLD, s.units),
        )
        if state.trains and (call.seq is None or call.seq <= state.seqs.get(call.deployment, (0, -1))[1]):
            raise BadInput(
                f"call {call.id} of deployment {call.deployment} has seq {call.seq}, and "
                f"{state.seqs.get(call.deployment, (0, None))[1]} is outstanding",
                "Submit training calls in seq order",
            )
        return state

    def _turn_in(self, now: int, gang: str, phase: Phase) -> OpenTurn | None:
        self._at(now)
        turn = self.turns.get(gang)
        return turn if turn and turn.phase is phase else None

    def _touch(self, state: GangState) -> None:
        self._dirty.update(state.gpus)

    def _changed(self, state: GangState) -> None:
        """After any change of a gang's calls."""
        turn = self.turns.get(state.id)
        if turn and turn.phase in (Phase.OPEN, Phase.PAUSING):
            turn.note_drained(self.now)
        self._enlist(state)
        self._touch(state)

    def _enlist(self, state: GangState) -> None:
        """Put the gang where it belongs in line, or out of it."""
        ticket = None
        if state.id not in self.turns and state.eligible:
            first = next(iter(state.queue), None)
            ticket = state.since
            if first is not None and state.residency is not Residency.COLD:
                ticket = max(ticket, self._numbers[first])
        if ticket == self.line.ticket(state.id):
            return
        if ticket is None:
            self._unlist(state)
        else:
            self.line.put(state.id, ticket)
            for gpu in state.gpus:
                self.wanted[gpu][state.id] = state
        self._regrant = True
        self._touch(state)

    def _unlist(self, state: GangState) -> None:
        self.line.discard(state.id)
        for gpu in state.gpus:
            self.wanted[gpu].pop(state.id, None)
        self._regrant = True
        self._touch(state)

    def _forget(self, call: Call, state: GangState) -> None:
        state.forget(call)
        del self.calls[call.id], self._numbers[call.id]
        self.cancelled.discard(call.id)
        self.ended += 1

    def _drop(self, calls: list[Call], state: GangState) -> None:
        for call in calls:
            self.meter.stopped(state.id, call, call.units)
            self._forget(call, state)
        if calls:
            self._actions.append(Dropped(tuple(call.id for call in calls)))

    def _fail(self, state: GangState, reason: str) -> None:
        self._drop([*state.active.values(), *state.queue.values()], state)
        if state.evictor:
            state.evictor.evicting.remove(state)
            self._clear_evictor(state)
        state.move(Residency.LOST)
        turn = self.turns.get(state.id)
        if turn:
            self._end(turn, reason)
        self._enlist(state)
        self._touch(state)

    def _offloaded(self, turn: OpenTurn, evicted: Collection[str] | None) -> None:
        """The victims' offload was answered; None: all of them made it."""
        for victim in turn.evicting:
            self._clear_evictor(victim)
            if evicted is None or victim.id in evicted:
                victim.move(Residency.HOST)
        turn.evicting = []

    def _clear_evictor(self, victim: GangState) -> None:
        for gpu in victim.gpus:
            self.offloads[gpu].pop(victim.id, None)
        victim.evictor = None
        self._regrant = True
        self._touch(victim)

    def _grant(self, state: GangState) -> None:
        """The gang's GPUs are free: its turn begins."""
        resident = state.residency is Residency.DEVICE
        phase = Phase.OPEN if resident else Phase.BUILD if state.residency is Residency.COLD else Phase.SWITCH
        job = state.spec.owner if phase is Phase.BUILD else state.job
        turn = OpenTurn(state, phase, self.now, job)
        self.turns[state.id] = turn
        for gpu in state.gpus:
            self.held[gpu] = turn
        self.free.difference_update(state.gpus)
        self._unlist(state)
        self._actions.append(Turn(state.id, False, "resident" if resident else phase.value))
        if resident:
            turn.open(self.now)
            return
        turn.evicting = sorted((r for r in state.rivals.values() if r.occupies), key=lambda r: (r.used, r.id))
        for victim in turn.evicting:
            victim.move(Residency.OFFLOADING)
            victim.evictor = turn
            for gpu in victim.gpus:
                self.offloads[gpu][victim.id] = turn
            self._touch(victim)
        state.move(Residency.LOADING)
        evict = tuple(victim.id for victim in turn.evicting)
        self._actions.append(Build(state.id, evict) if phase is Phase.BUILD else Switch(state.id, evict))

    def _end(self, turn: OpenTurn, reason: str) -> None:
        state = turn.state
        for victim in turn.evicting:
            self._clear_evictor(victim)
        turn.evicting, turn.deadline = [], None
        del self.turns[state.id]
        for gpu in state.gpus:
            del self.held[gpu]
        self.free.update(state.gpus)
        state.used = self._next()
        if turn.ran:
            state.since = self._next()
        self._actions.append(Turn(state.id, True, reason))
        self._regrant = True
        self._enlist(state)
        self._touch(state)

    def _waiters(self, turn: OpenTurn) -> list[GangState]:
        return list({name: state for gpu in turn.state.gpus for name, state in self.wanted[gpu].items()}.values())

    def _bound(self, gpus: set[str]) -> None:
        """Say again until when the turns on these GPUs last."""
        for turn in {id(self.held[gpu]): self.held[gpu] for gpu in sorted(gpus) if gpu in self.held}.values():
            self._touch(turn.state)
            if self.draining:
                deadline = turn.drained_us if turn.phase is Phase.OPEN else None
            else:
                deadline = turn.ends_at(self.policy, self._waiters(turn))
            if deadline != turn.deadline:
                turn.deadline = deadline
                if deadline is not None:
                    heappush(self._due, (deadline, self._next(), turn))

    def _expire(self) -> None:
        """End or pause the turns whose time is over."""
        while self._due and self._due[0][0] <= self.now:
            deadline, _, turn = heappop(self._due)
            if turn.deadline != deadline:
                continue
            if turn.state.active:
                turn.phase, turn.deadline = Phase.PAUSING, None
                self._actions.append(Pause(turn.state.id))
            else:
                self._end(turn, "drained" if turn.drained_us is not None else "quantum")

    def _settle(self) -> list[Action]:
        """Draw the conclusions of an event: what ends, who is granted, what runs, what each GPU went to."""
        self._bound(self._dirty)
        self._expire()
        if self._regrant and not self.draining:
            free = set(self.free)
            for name in list(self.line):
                if not free:
                    break
                state = self.gangs[name]
                if free.issuperset(state.gpus) and not any(r.evictor for r in state.rivals.values()):
                    self._grant(state)
                free.difference_update(state.gpus)  # taken, or reserved against those behind
        self._regrant = False
        holders = {id(self.held[gpu]): self.held[gpu] for gpu in sorted(self._dirty) if gpu in self.held}
        for turn in holders.values():
            self._pump(turn)
        self._bound(set(self._dirty))
        self.meter.update(self.now, {gpu: self._use(gpu) for gpu in sorted(self._dirty)})
        self._dirty.clear()
        actions, self._actions = self._actions + self._closed(), []
        if self.policy.paranoid:
            self.invariants()
        return actions

    def _pump(self, turn: OpenTurn) -> None:
        """Hand the executor what may run now; newcomers join while the turn lasts."""
        if turn.phase is not Phase.OPEN:
            return
        state = turn.state
        calls = state.start()
        for call in calls:
            self.meter.started(self.now, state.gpus, state.id, call, state.trains)
        if calls:
            turn.ran = True
            turn.note_drained(self.now)
            self._touch(state)
            self._actions.append(Run(state.id, tuple(call.id for call in calls)))

    def _use(self, gpu: str) -> Use:
        """Rule 11's precedence for one GPU, now."""
        turn = self.held.get(gpu)
        if turn and turn.phase in (Phase.OPEN, Phase.PAUSING) and turn.state.active:
            return Use(SpanClass.BUSY, turn.state.id)
        switch = turn if turn and turn.phase is not Phase.OPEN else next(iter(self.offloads[gpu].values()), None)
        if switch:
            return Use(SpanClass.SWITCH, switch.state.id, switch.job)
        if turn and turn.deadline is not None and not self.draining:
            return Use(SpanClass.KEPT, turn.state.id, turn.job)
        if not self.started_up:
            return Use(SpanClass.STARTUP)
        return Use(SpanClass.DRAIN) if self.draining else IDLE

    def _closed(self) -> list[Action]:
        closed, self.meter.closed = self.meter.closed, []
        return [Closed(span) for span in closed]
