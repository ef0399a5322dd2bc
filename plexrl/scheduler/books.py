"""The scheduler's books: jobs, gangs, calls, and who waits."""

from collections.abc import Mapping

from plexrl.scheduler.actions import Action, Dropped
from plexrl.scheduler.admission import Admission
from plexrl.scheduler.bandwidth import Bandwidth, SwitchCost
from plexrl.scheduler.budget import Budget
from plexrl.scheduler.fairshare import Shares
from plexrl.scheduler.gang import SCAVENGER, Entry, GangState
from plexrl.scheduler.line import Line, Waiter
from plexrl.scheduler.order import ORDERS, service_us
from plexrl.scheduler.placement import Floor
from plexrl.scheduler.policy import Policy
from plexrl.scheduler.residence import Arrival, Residence
from plexrl.scheduler.rollout import Rollout
from plexrl.scheduler.spans import Meter, Use
from plexrl.scheduler.turn import OpenTurn, Phase
from plexrl.types import BadInput, Call, CallKind, GpuRole, GroupSpec, Placement, Residency, Role, SpanClass, Tenant

_FACTOR_US = 1_000_000  # for how long a fair-share factor is good
_NEVER = (0, 1.0)


class Books:
    """Gangs, calls, turns and time. Every event changes them through methods of this class and of those built on it.

    line: who waits. turns: by gang; held: by GPU; free: GPUs of no turn. copies: GPU -> gangs that leave it or come in,
    and for whom. bandwidth: of the nodes' links. What changed is marked (`_open` GPUs to grant, `_stirred` turns,
    `_unused` GPUs to meter), so that what follows from an event is looked for there only.
    """

    def __init__(
        self,
        gpus: Mapping[str, int],
        policy: Policy,
        *,
        roles: Mapping[str, GpuRole] | None = None,
        hosts: Mapping[str, int] | None = None,
        virtual: bool = False,
    ) -> None:
        self.policy = policy
        self.order = ORDERS[policy.order]
        self.virtual = virtual
        over = policy.end_sleepers
        self.floor = Floor(gpus, roles=roles or {}, hosts=hosts or {}, virtual=virtual, over=over)
        self.admission = Admission(self.floor)
        self.residence = Residence(gpus)
        self.shares = Shares(policy.half_life_us)
        self.bandwidth = Bandwidth(policy.switch_bytes_per_us)
        self.budget = Budget(policy.interactive_switches_per_hour)
        self.tenants: dict[str, Tenant] = {}
        self._factors: dict[str, tuple[int, float]] = {}
        self.gangs: dict[str, GangState] = {}
        self.groups: dict[str, list[GangState]] = {}
        self.specs: dict[str, GroupSpec] = {}
        self.rollouts: dict[str, Rollout] = {}
        self.relocated_groups: set[str] = set()
        self.calls: dict[str, tuple[Entry, GangState]] = {}
        self.cancelled: set[str] = set()
        self._unions: dict[str, None] = {}  # calls that want a peer
        self.line = Line(gpus)
        self.turns: dict[str, OpenTurn] = {}
        self.held: dict[str, OpenTurn] = {}
        self.free: set[str] = set(gpus)
        self.copies: dict[str, dict[str, Arrival]] = {gpu: {} for gpu in gpus}
        self.meter: Meter | None = None
        self.started_up = False
        self.draining = False
        self.accepted = self.ended = 0
        self.now = 0
        self._ticket = 0
        self._due: list[tuple[int, int, OpenTurn]] = []
        self._open: set[str] = set()
        self._stirred: dict[int, OpenTurn] = {}
        self._scavenging: dict[int, OpenTurn] = {}
        self._unused: set[str] = set()
        self._shadows: dict[str, int] = {}  # of reservations, within one event
        self._admit = False
        self._moves: dict[str, Placement] = {}
        self._crowded: set[str] = set()  # gangs for which everybody leaves their GPUs the next time
        self._actions: list[Action] = []

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

    def factor(self, tenant: Tenant) -> float:
        """The tenant's fair-share factor, at most a second old: it changes over hours."""
        at, factor = self._factors.get(tenant.job, _NEVER)
        if self.now >= at:
            factor = self.shares.factor(self.now, tenant.account, tenant.user or tenant.job)
            self._factors[tenant.job] = self.now + _FACTOR_US, factor
        return factor

    def tenant(self, job: str) -> Tenant:
        """Who a job is; a job that was never enrolled is a user of its own."""
        found = self.tenants.get(job)
        if found is None:
            found = self.tenants[job] = Tenant(job=job, user=job)
        return found

    # ---- worker groups

    def _check_new(self, spec: GroupSpec) -> None:
        if spec.group in self.groups:
            raise BadInput(f"worker group {spec.group} is placed already", "Remove it first")

    def _adopt(self, placement: Placement, spec: GroupSpec, residency: Residency) -> list[GangState]:
        owner = self.tenant(spec.owner)
        states = []
        for gang in placement.gangs:
            nodes = {gpu.rpartition(":")[0] for gpu in gang.gpus}
            cost = SwitchCost(self.bandwidth.switch_us(nodes, spec.device_bytes))
            state = GangState(gang, spec, owner, residency, self._next(), self.now, 0, cost, used_us=self.now)
            self.gangs[state.id] = state
            self.residence.add(state)
            states.append(state)
        self.groups[spec.group] = states
        self.specs[spec.group] = spec
        for entry, at in [self.calls[name] for name in self._unions]:
            peer = self.groups.get(entry.call.peer)
            if peer and entry.call.id in at.queue and not self._fit_together(at, peer[0]):
                self._drop([entry], at)  # what the new group keeps on the device is too much for it
                self._changed(at)
        if spec.role is Role.SAMPLE:
            self.rollouts[spec.group] = Rollout()
        return states

    def _abandon(self, state: GangState) -> None:
        """Forget a gang that has no turn and no calls."""
        self._unlist(state)
        self._crowded.discard(state.id)
        del self.gangs[state.id]
        self.residence.discard(state)
        self._open.update(state.gpus)
        self._unused.update(state.gpus)

    # ---- calls

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
            key=lambda s: (s.residency is Residency.LOST, s.new, s.units),
        )
        if state.trains and (call.seq is None or call.seq <= state.seqs.get(call.deployment, (0, -1))[1]):
            raise BadInput(
                f"call {call.id} of deployment {call.deployment} has seq {call.seq}, and "
                f"{state.seqs.get(call.deployment, (0, None))[1]} is outstanding",
                "Submit training calls in seq order",
            )
        if call.peer:
            self._check_peer(call, state)
        return state

    def _check_peer(self, call: Call, state: GangState) -> None:
        peers = self.groups.get(call.peer)
        if not state.trains or not peers or call.peer == call.group:
            raise BadInput(
                f"call {call.id} wants worker group {call.peer} in its turn, which is not another placed group",
                "Name the sampler's group in a training call",
            )
        if not self._fit_together(state, peers[0]):
            raise BadInput(
                f"call {call.id} wants {state.id} and {peers[0].id} resident at once, and they do not fit together",
                "Publish through the host instead",
            )

    def _fit_together(self, state: GangState, peer: GangState) -> bool:
        """Whether both can be resident at once, beside what the engines of others keep unless those may be ended."""
        if peer.id in state.rivals:
            return False
        for gpu in {*state.gpus, *peer.gpus}:
            both = [s for s in (state, peer) if gpu in s.gpus]
            need = sum(s.size for s in both)
            if not self.policy.end_sleepers:
                need += self.floor.residual(gpu) - sum(s.spec.residual_bytes for s in both)
            if need > self.floor.gpus[gpu]:
                return False
        return True

    def _changed(self, state: GangState) -> None:
        """After any change of a gang's calls."""
        turn = self.turns.get(state.id)
        if turn:
            if turn.state is state and turn.phase in (Phase.OPEN, Phase.PAUSING):
                turn.note_drained(self.now)
            self._stir(turn)
        elif state.spec.residual_bytes:
            self._open.update(gpu for gpu in state.gpus if gpu in self.free)  # its engine may be ended now
        self._enlist(state)

    def _forget(self, entry: Entry, state: GangState) -> None:
        state.forget(entry)
        rollout = self.rollouts.get(state.spec.group)
        if rollout is not None:
            rollout.end()
        del self.calls[entry.call.id]
        self._unions.pop(entry.call.id, None)
        self.cancelled.discard(entry.call.id)
        self.ended += 1

    def _drop(self, entries: list[Entry], state: GangState) -> None:
        for entry in entries:
            self.meter.stopped(state.id, entry.call, entry.call.units)
            self._forget(entry, state)
        if entries:
            self._actions.append(Dropped(tuple(entry.call.id for entry in entries)))

    # ---- the line

    def _enlist(self, state: GangState) -> None:
        """Put the gang where it belongs in line, or out of it."""
        old, first = self.line.get(state.id), state.first
        state.peers, state.reach = (), state.gpus
        if first is not None and first.call.peer in self.groups and state.residency is not Residency.COLD:
            state.peers = (self.groups[first.call.peer][0],)
            state.reach = tuple(dict.fromkeys((*state.gpus, *state.peers[0].gpus)))
        if state.id in self.turns or not state.eligible:
            if old:
                self._unlist(state)
            return
        ticket, since_us, due_us = state.since, state.since_us, None
        if first is not None and not state.new:
            ticket, since_us = max(ticket, first.number), max(since_us, first.since_us)
            due_us = first.due_us
        rank, tenant = state.rank, first.tenant if first else state.owner
        if old and old.gpus == state.reach and old.rank == rank and old.tenant.job == tenant.job:
            old.tenant, old.ticket, old.since_us, old.due_us = tenant, ticket, since_us, due_us
            old.service_us = service_us(state, self.policy)
            return
        kept = old and old.gpus == state.reach and rank != SCAVENGER and self.line.holds(old)
        self._unlist(state)
        waiter = Waiter(state, tenant, ticket, since_us, due_us, state.reach, rank, service_us(state, self.policy))
        self.line.put(waiter)
        if kept:
            self.line.reserve(waiter)
        for gpu in waiter.gpus:
            turn = self.held.get(gpu)
            if turn is None:
                self._open.add(gpu)
            else:
                if len(self.line.on[gpu]) == 1:
                    turn.looked = False
                self._stir(turn)

    def _unlist(self, state: GangState) -> None:
        waiter = self.line.get(state.id)
        if waiter is None:
            return
        self._release(waiter)
        self.line.discard(state.id)
        for gpu in waiter.gpus:
            turn = self.held.get(gpu)
            if turn is not None:
                self._stir(turn)

    def _release(self, waiter: Waiter) -> None:
        """Give up the waiter's reservations, if it has any. All that were in their way may want ones of their own."""
        if self.line.holds(waiter):
            self.line.release(waiter)
            for gpu in waiter.gpus:
                turn = self.held.get(gpu)
                if turn is not None:
                    self._stir(turn)
                self._open.update(gpu for other in self.line.on[gpu].values() for gpu in other.gpus)

    def _stir(self, turn: OpenTurn) -> None:
        self._stirred[id(turn)] = turn

    def _stir_limited(self, holder: Waiter) -> None:
        """Those that went ahead of a reservation: it may wait for nothing but them now."""
        for gpu in holder.gpus:
            turn = self.held.get(gpu)
            if turn is not None and turn.limit_us is not None:
                self._stir(turn)

    def _tell_unions(self, peer: GangState) -> None:
        """A gang is ready for union turns now, or is not any more."""
        for name in list(self._unions):
            entry, state = self.calls[name]
            if entry.call.peer == peer.spec.group:
                self._enlist(state)
