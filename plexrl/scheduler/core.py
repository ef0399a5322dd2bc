"""What the scheduler concludes after each event."""

from plexrl.scheduler.actions import Action, Closed, Placed, Run
from plexrl.scheduler.invariants import check
from plexrl.scheduler.samples import Samples
from plexrl.scheduler.spans import Use
from plexrl.scheduler.turn import OpenTurn, Phase
from plexrl.types import Residency, SpanClass


class Core(Samples):
    """What ends, who is granted, what runs, what each GPU went to."""

    def invariants(self) -> None:
        """Raises AssertionError naming the broken rule."""
        check(self)

    def _settle(self) -> list[Action]:
        """Draw the conclusions of an event: what ends, who is granted, what runs, what each GPU went to."""
        self._shadows.clear()
        if self._admit and not self.draining:
            self._admit = False
            self._place_waiting()
        for turn in list(self._stirred.values()):
            self._bound(turn)
        self._expire()
        if self._open:
            if self.draining:
                self._open.clear()
            else:
                self._grants()
        pumped: dict[int, OpenTurn] = {}
        while todo := [turn for number, turn in self._stirred.items() if number not in pumped]:
            for turn in todo:
                pumped[id(turn)] = turn
                self._pump(turn)
            if self._open and not self.draining:
                self._grants()
        uses: dict[str, Use] = {}
        self._stirred.update(self._scavenging)  # who could begin in their place depends on GPUs of others
        for turn in self._stirred.values():
            self._bound(turn)
            use = self._use_of(turn)
            if use != turn.use:
                turn.use = use
                if use.kind in (SpanClass.BUSY, SpanClass.SWITCH):
                    uses.update(dict.fromkeys(turn.gpus, use))
                else:  # copies for others may show on some of them
                    self._unused.update(turn.gpus)
        self._stirred.clear()
        if self._unused:
            for gpu in sorted(self._unused):
                uses[gpu] = self._use(gpu)
            self._unused.clear()
        if uses:
            self.meter.update(self.now, uses)
        self._hand_out()
        actions, self._actions = self._actions, []
        if self.policy.paranoid:
            self.invariants()
        return actions

    def _place_waiting(self) -> None:
        """Give places to jobs whose time has come."""
        for tenant, specs, placements in self.admission.ready(self.now, self.policy):
            for spec, placement in zip(specs, placements, strict=True):
                for state in self._adopt(placement, spec, Residency.COLD):
                    self._enlist(state)
            self._actions.append(Placed(tenant.job, placements))

    def _pump(self, turn: OpenTurn) -> None:
        """Hand the executor what may run now; newcomers join while the turn lasts."""
        if turn.phase is not Phase.OPEN or turn.state.id not in self.turns:
            return
        state = turn.state
        rollout = self.rollouts.get(state.spec.group)
        if rollout is not None and not state.queue and len(self.groups[state.spec.group]) > 1:
            self._share_out(state, turn.ran)
        if state.queue and not state.active:
            if state.first.call.peer != turn.peer:
                self._end(turn, "other gangs")
                return
            if turn.ends_before(self.now, self.policy) and self._others(turn):
                self._end(turn, "natural end")
                return
        idle = not state.active
        entries = state.start(turn.peer)
        if entries:
            if idle:
                state.active_us = self.now
            for entry in entries:
                self.meter.started(self.now, turn.gpus, state.id, entry.call, state.trains)
                turn.note_started(self.now, entry.call)
            turn.ran = True
            turn.note_drained(self.now)
            self._actions.append(Run(state.id, tuple(entry.call.id for entry in entries)))
        if rollout is not None and state.active:
            self._gather(turn, rollout)
        if not turn.looked and self.policy.prefetch and state.active and not self.draining:
            turn.looked = True
            self._look_ahead(turn)

    # ---- spans

    def _use_of(self, turn: OpenTurn) -> Use:
        """What the GPUs of a turn go to. They are all used alike."""
        state = turn.state
        if state.active and turn.phase in (Phase.OPEN, Phase.PAUSING):
            return Use(SpanClass.BUSY, state.id)
        if turn.phase is not Phase.OPEN:
            return Use(SpanClass.SWITCH, state.id, turn.job)
        if turn.deadline is not None and not self.draining:
            return Use(SpanClass.KEPT, state.id, turn.job)
        return self._nobodys()

    def _use(self, gpu: str) -> Use:
        turn = self.held.get(gpu)
        use = self._use_of(turn) if turn else self._nobodys()
        if use.kind not in (SpanClass.BUSY, SpanClass.SWITCH) and self.copies[gpu]:
            arrival = next(iter(self.copies[gpu].values()))
            return Use(SpanClass.SWITCH, arrival.state.id, arrival.turn.job if arrival.turn else arrival.job)
        return use

    def _nobodys(self) -> Use:
        if not self.started_up:
            return Use(SpanClass.STARTUP)
        return Use(SpanClass.DRAIN if self.draining else SpanClass.IDLE)

    def _hand_out(self) -> None:
        """Closed spans become actions, and use that is charged."""
        for span in self.meter.closed:
            self._actions.append(Closed(span))
            if span.shares:
                weight = sum(share for _, share in span.shares)
                for job, share in span.shares:
                    tenant = self.tenant(job)
                    used = (span.end_us - span.start_us) * share // weight
                    self.shares.charge(span.end_us, tenant.account, tenant.user or job, used)
        self.meter.closed = []
