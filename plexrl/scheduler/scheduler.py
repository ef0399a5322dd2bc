"""The co-scheduler: events in, actions out. No clock, no sockets, no tensors.

A gang waits in line from its oldest eligible call on. A gang of which some GPUs are free and some not keeps the free
ones (a reservation), which those behind it may use only as long as they do not delay it; so nothing starves. A gang is
granted whole or not at all, so nothing deadlocks. What late or contrary answers mean is said at each event; none of
them raises.
"""

from collections.abc import Collection, Mapping, Sequence
from heapq import heappop

from plexrl.scheduler.actions import Action
from plexrl.scheduler.answers import Answers
from plexrl.scheduler.explain import explain
from plexrl.scheduler.gang import Entry, rivals
from plexrl.scheduler.turn import Phase
from plexrl.types import BadInput, Call, GroupSpec, Placement, Residency, Tenant


class Scheduler(Answers):
    """The scheduler of one pool.

    gpus: name (`<node>:<index>`) -> bytes. roles: GPU -> what may be placed on it (any, if it is not named). hosts:
    node -> bytes of host memory for state that is off the devices (unbounded, if it is not named). virtual: extents
    have no offsets, and any gangs whose bytes fit are resident together; else offsets are fixed for a gang's life.
    `now` is always integer microseconds; a `now` that goes backwards counts as the latest one seen. Every event method
    returns the actions to carry out, in order. Every Build, Switch, Prefetch, Relocate and Pause must be answered, with
    a deadline on the executor's side (a gang that does not answer is `lost`).
    """

    # ---- the pool's life

    def start(self, now: int) -> None:
        """Spans begin here, in class startup. An event before it starts them itself."""
        self._start(now)

    def startup_done(self, now: int) -> list[Action]:
        """What is idle from now on is class idle."""
        self._at(now)
        self.started_up = True
        return self._all_anew()

    def drain(self, now: int) -> list[Action]:
        """Grant no new turns; an open one ends as soon as it has nothing to run. What is idle is class drain."""
        self._at(now)
        self.draining = True
        return self._all_anew()

    def _all_anew(self) -> list[Action]:
        for turn in self.turns.values():
            self._stir(turn)
        self._unused.update(self.free)
        return self._settle()

    # ---- jobs

    def enroll(self, now: int, tenant: Tenant) -> list[Action]:
        """Say who a job is, before its calls come. Calls that wait already keep what was known when they came."""
        self._at(now)
        self.tenants[tenant.job] = tenant
        self._factors.pop(tenant.job, None)
        return self._settle()

    def dismiss(self, now: int, job: str) -> list[Action]:
        """The job has ended: forget who it was, and let it wait for places no longer. Its groups are `remove`d."""
        actions = self.withdraw(now, job)
        self.tenants.pop(job, None)
        self._factors.pop(job, None)
        return actions

    def set_share(self, now: int, account: str, shares: float, users: Mapping[str, float]) -> None:
        """Give an account its shares of the pool, and its users theirs of the account. Raises BadInput below zero."""
        self._at(now)
        self.shares.set(account, shares, users)

    # ---- worker groups

    def place(self, now: int, spec: GroupSpec) -> Placement:
        """Place a group for life and ask for its build. Raises DoesNotFit, BadInput (placed already).

        The Build comes with the next event's actions: `wake_at()` is due at once, so call `tick`.
        """
        self._at(now)
        self._check_new(spec)
        placement = self.floor.choose(spec, self.policy, self.tenant(spec.owner))
        for state in self._adopt(placement, spec, Residency.COLD):
            self._enlist(state)
        return placement

    def request(self, now: int, job: str, specs: Sequence[GroupSpec]) -> list[Action]:
        """Ask for places for all groups of a job together, or a place in the queue for them.

        Answered by Placed, now or later, and then the Builds. Raises DoesNotFit when the empty pool would be too small,
        BadInput when a group is placed already or the job waits already.
        """
        self._at(now)
        for spec in specs:
            self._check_new(spec)
        self.admission.ask(self.now, self.tenant(job), tuple(specs), self.policy)
        self._admit = True
        return self._settle()

    def withdraw(self, now: int, job: str) -> list[Action]:
        """The job does not wait for places any more. Not waiting: nothing happens."""
        self._at(now)
        self.admission.withdraw(job)
        self._admit = True
        return self._settle()

    def restore(
        self,
        now: int,
        placement: Placement,
        spec: GroupSpec,
        resident: bool | Collection[str],
        dead: Collection[str] = (),
        unbuilt: Collection[str] = (),
    ) -> list[Action]:
        """Take up a group that was built before the head restarted.

        resident: whether its gangs are on their devices, or the ids of those that are; all others are on the host.
        dead: ids of gangs whose engines are gone: they count as lost, and `rebuild` follows. unbuilt: of those whose
        engines were ended while they slept. Raises BadInput when the GPUs are not the same, or resident gangs do not
        fit beside each other.
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
        self.floor.occupy(placement, spec, self.tenant(spec.owner))
        for state in self._adopt(placement, spec, Residency.HOST):
            if state.id in on_device or state.id in dead or state.id in unbuilt:
                self.residence.discard(state)
                state.unbuilt = state.id in unbuilt
                state.residency = Residency.COLD if state.unbuilt else Residency.DEVICE
                if state.id in dead:
                    state.residency = Residency.LOST
                self.residence.add(state)
        return self._settle()

    def remove(self, now: int, group: str) -> list[Action]:
        """The group is gone, and its engines with it: its calls are dropped, its turn ends, its extents are free.

        So are calls of others that wanted it in their turns. Unknown group: nothing happens.
        """
        self._at(now)
        states = self.groups.pop(group, [])
        self.specs.pop(group, None)
        self.rollouts.pop(group, None)
        for state in states:
            self._fail(state, "removed")
            self._abandon(state)
        if states:
            self.floor.vacate(group)
            self._admit = True
            for entry, state in [self.calls[name] for name in self._unions]:
                if entry.call.peer == group and entry.call.id in state.queue:
                    self._drop([entry], state)
                    self._changed(state)
        actions = self._settle()
        for state in states:
            self.meter.forget(state.id)
        return actions

    def lost(self, now: int, gang: str) -> list[Action]:
        """A rank of the gang died: its calls are dropped, its turn ends, its device state is gone until `rebuild`.

        Victims of its switch under way count as neither usable nor gone until a later Switch names them. After
        `rebuild` no answer of the old engine may be passed on: it would be taken for the new one's.
        """
        self._at(now)
        if gang in self.gangs:
            self.gangs[gang].moving = False
            self._fail(self.gangs[gang], "lost")
        return self._settle()

    def rebuild(self, now: int, gang: str) -> list[Action]:
        """Build a lost gang, or one that is `unbuilt`, again in its old place. Ignored for any other."""
        self._at(now)
        state = self.gangs.get(gang)
        if state and state.residency is Residency.LOST:
            self._move(state, Residency.COLD)
            state.since, state.since_us = self._next(), self.now
            self._enlist(state)
        elif state and state.unbuilt and not state.wanted:
            state.wanted = True
            self._enlist(state)
        return self._settle()

    # ---- calls

    def submit(self, now: int, call: Call) -> list[Action]:
        """Accept a call; from then on it ends exactly once: by `finished`, or in a Dropped.

        Training calls of a deployment come in seq order. A sample goes to the replica with the fewest outstanding
        units. Raises BadInput: unknown group, an id that is outstanding, a kind that the group's role does not serve, a
        seq not above the deployment's outstanding ones, a peer that is not there or does not fit beside the group.
        """
        self._at(now)
        state = self._route(call)
        tenant = self.tenant(call.job)
        due_us = None if tenant.deadline_us is None else self.now + tenant.deadline_us
        entry = Entry(call, tenant, self._next(), self.now, due_us)
        self.accepted += 1
        self.calls[call.id] = entry, state
        if call.peer:
            self._unions[call.id] = None
            peer = self.groups[call.peer][0]
            if peer.unbuilt:
                peer.wanted = True  # nobody else may want it, and the call waits for it
                self._enlist(peer)
        self._think(state)
        rollout = self.rollouts.get(call.group)
        if rollout is not None:
            rollout.add()
        turn = self.turns.get(state.id)
        if turn and turn.state is state and turn.phase is Phase.OPEN and turn.drained_us is not None:
            if self.now >= turn.hold_until(self.policy, False):
                self._end(turn, "drained")  # it stayed open only because nobody asked; this is another turn
        state.accept(entry)
        self._changed(state)
        return self._settle()

    def cancel(self, now: int, call_id: str) -> list[Action]:
        """A call that waits is dropped. One that runs is the executor's to stop, which it reports as `finished`.

        If it is paused instead, it is dropped then. Unknown call: nothing happens.
        """
        self._at(now)
        if call_id in self.calls:
            entry, state = self.calls[call_id]
            if call_id in state.queue:
                self._drop([entry], state)
                self._changed(state)
            else:
                self.cancelled.add(call_id)
        return self._settle()

    def finished(self, now: int, call_id: str, units: int) -> list[Action]:
        """A call ended, well or not, after so many units. Wherever the call is, it ends; unknown: nothing happens."""
        self._at(now)
        if call_id in self.calls:
            entry, state = self.calls[call_id]
            ran = call_id in state.active
            self.meter.stopped(state.id, entry.call, units)
            self._forget(entry, state)
            if ran:
                state.finished_us, state.last = self.now, entry.call.kind
                if not state.active:
                    state.busy_us += self.now - state.active_us
            turn = self.turns.get(state.id)
            if turn and turn.state is state and turn.phase in (Phase.OPEN, Phase.PAUSING):
                turn.note_finished(self.now, entry)
            self._changed(state)
            if ran:
                self._profile(state, entry, turn)
        return self._settle()

    # ---- time

    def tick(self, now: int) -> list[Action]:
        """Time passed. Wanted at `wake_at()`; harmless at any other time."""
        self._at(now)
        return self._settle()

    def wake_at(self) -> int | None:
        """When `tick` is wanted next if no event comes before."""
        if (self._open and not self.draining) or self._stirred or self._unused:
            return self.now
        while self._due and self._due[0][2].deadline != self._due[0][0]:
            heappop(self._due)
        return self._due[0][0] if self._due else None

    def spans(self, now: int) -> list[Action]:
        """Close every open span at `now`; each goes on with what it was."""
        self._at(now)
        actions = self._settle()
        self.meter.cut(self.now, self.floor.gpus)
        self._hand_out()
        closed, self._actions = self._actions, []
        return actions + closed

    # ---- people

    def explain(self, name: str) -> str:
        """What a job or a call waits for, in words."""
        return explain(self, name)
