"""The scheduler's books, and what it concludes from them after each event."""

from collections.abc import Collection, Iterator, Mapping
from heapq import heappop, heappush

from plexrl.scheduler.actions import Action, Build, Closed, Dropped, Pause, Run, Switch, Turn
from plexrl.scheduler.gang import GangState, rivals
from plexrl.scheduler.invariants import check
from plexrl.scheduler.order import ORDERS
from plexrl.scheduler.placement import Floor
from plexrl.scheduler.policy import Policy
from plexrl.scheduler.spans import Meter, Use, use_of
from plexrl.scheduler.turn import OpenTurn, Phase
from plexrl.types import BadInput, Call, CallKind, GroupSpec, Placement, Residency, Role, SpanClass


class Core:
    """Gangs, calls, turns and time. Every event changes them through these methods, then calls `_settle`.

    line: gangs that wait, in order; wanted: the same by GPU. turns: by gang; held: by GPU; free: GPUs of no turn.
    offloads: GPU -> gangs that leave it, and for which turn. What changed is marked dirty, so that `_settle` looks at
    that only.
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

    def invariants(self) -> None:
        """Raises AssertionError naming the broken rule."""
        check(self)

    def _start(self, now: int) -> None:
        self.now = now
        self.meter = Meter(self.floor.gpus, now, Use(SpanClass.STARTUP))

    def _at(self, now: int) -> None:
        if self.meter is None:
            self._start(now)
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

    def _waiters(self, turn: OpenTurn) -> Iterator[GangState]:
        """Who waits for a GPU of the turn; some more than once."""
        return (state for gpu in turn.state.gpus for state in self.wanted[gpu].values())

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
            free = {gpu for gpu in self.free if self.wanted[gpu]}
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
        offload = next(iter(self.offloads[gpu].values()), None)
        return use_of(self.held.get(gpu), offload, self.started_up, self.draining)

    def _closed(self) -> list[Action]:
        closed, self.meter.closed = self.meter.closed, []
        return [Closed(span) for span in closed]
