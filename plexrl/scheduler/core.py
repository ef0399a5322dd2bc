"""The scheduler's books, and what it concludes from them after each event."""

from collections.abc import Collection, Mapping
from heapq import heappop, heappush

from plexrl.scheduler.actions import Action, Build, Closed, Dropped, Gather, Pause, Prefetch, Run, Switch, Turn
from plexrl.scheduler.admission import Admission
from plexrl.scheduler.budget import Budget
from plexrl.scheduler.costs import Learned
from plexrl.scheduler.fairshare import Shares
from plexrl.scheduler.gang import NORMAL, SCAVENGER, Entry, GangState
from plexrl.scheduler.invariants import check
from plexrl.scheduler.line import Line, Waiter
from plexrl.scheduler.order import ORDERS, key, score, service_us
from plexrl.scheduler.placement import Floor
from plexrl.scheduler.policy import Policy
from plexrl.scheduler.residence import Arrival, Residence
from plexrl.scheduler.rollout import Rollout
from plexrl.scheduler.spans import Meter, Use
from plexrl.scheduler.turn import OpenTurn, Others, Phase
from plexrl.types import BadInput, Call, CallKind, GpuRole, GroupSpec, Placement, Residency, Role, SpanClass, Tenant

_FACTOR_US = 1_000_000  # for how long a fair-share factor is good
_NEVER = (0, 1.0)


class Core:
    """Gangs, calls, turns and time. Every event changes them through these methods, then calls `_settle`.

    line: who waits. turns: by gang; held: by GPU; free: GPUs of no turn. copies: GPU -> gangs that leave it or come in,
    and for whom. What changed is marked (`_open` GPUs to grant, `_stirred` turns, `_unused` GPUs to meter), so that
    `_settle` looks at that only.
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
        self.floor = Floor(gpus, roles=roles or {}, hosts=hosts or {}, virtual=virtual)
        self.admission = Admission(self.floor)
        self.residence = Residence(gpus)
        self.shares = Shares(policy.half_life_us)
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
        self._actions: list[Action] = []

    def invariants(self) -> None:
        """Raises AssertionError naming the broken rule."""
        check(self)

    # ---- time and names

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
        prior = spec.device_bytes // self.policy.switch_bytes_per_us
        states = []
        for gang in placement.gangs:
            state = GangState(gang, spec, owner, residency, self._next(), self.now, 0, Learned(prior), used_us=self.now)
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
            key=lambda s: (s.residency is Residency.LOST, s.residency is Residency.COLD, s.units),
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
        """Whether both can be resident at once, beside what the engines of all others keep on the device."""
        if peer.id in state.rivals:
            return False
        for gpu in {*state.gpus, *peer.gpus}:
            need = self.floor.residual(gpu)
            need += sum(s.size - s.spec.residual_bytes for s in (state, peer) if gpu in s.gpus)
            if need > self.floor.gpus[gpu]:
                return False
        return True

    def _turn_in(self, now: int, gang: str, phase: Phase) -> OpenTurn | None:
        self._at(now)
        turn = self.turns.get(gang)
        return turn if turn and turn.phase is phase else None

    def _stir(self, turn: OpenTurn) -> None:
        self._stirred[id(turn)] = turn

    def _changed(self, state: GangState) -> None:
        """After any change of a gang's calls."""
        turn = self.turns.get(state.id)
        if turn:
            if turn.state is state and turn.phase in (Phase.OPEN, Phase.PAUSING):
                turn.note_drained(self.now)
            self._stir(turn)
        self._enlist(state)

    def _enlist(self, state: GangState) -> None:
        """Put the gang where it belongs in line, or out of it."""
        old, first = self.line.get(state.id), state.first
        state.peers, state.reach = (), state.gpus
        if first is not None and first.call.peer in self.groups:
            state.peers = (self.groups[first.call.peer][0],)
            state.reach = tuple(dict.fromkeys((*state.gpus, *state.peers[0].gpus)))
        if state.id in self.turns or not state.eligible:
            if old:
                self._unlist(state)
            return
        ticket, since_us, due_us = state.since, state.since_us, None
        if first is not None and state.residency is not Residency.COLD:
            ticket, since_us = max(ticket, first.number), max(since_us, first.since_us)
            due_us = first.due_us
        rank, tenant = state.rank, first.tenant if first else state.owner
        if old and old.gpus == state.reach and old.rank == rank:
            old.tenant, old.ticket, old.since_us, old.due_us = tenant, ticket, since_us, due_us
            old.service_us = service_us(state, self.policy)
            return
        self._unlist(state)
        waiter = Waiter(state, tenant, ticket, since_us, due_us, state.reach, rank, service_us(state, self.policy))
        self.line.put(waiter)
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

    def _fail(self, state: GangState, reason: str) -> None:
        self._drop([*state.active.values(), *state.queue.values()], state)
        if state.evictor:
            state.evictor.evicting.remove(state)
            self._clear_evictor(state)
        turn = self.turns.get(state.id)
        if state.arrival:
            self._broken_off(state.arrival, ())
        self._move(state, Residency.LOST)
        if turn and turn.state is not state and turn.phase is not Phase.SWITCH:
            self._part(turn, state, reason)
        elif turn:
            self._end(turn, reason)
        self._enlist(state)
        self._tell_unions(state)

    def _tell_unions(self, peer: GangState) -> None:
        """A gang is ready for union turns now, or is not any more."""
        for name in list(self._unions):
            entry, state = self.calls[name]
            if entry.call.peer == peer.spec.group:
                self._enlist(state)

    # ---- memory

    def _move(self, state: GangState, to: Residency) -> None:
        self.residence.move(state, to)
        self._open.update(gpu for gpu in state.gpus if gpu in self.free)

    def _arrive(self, state: GangState, victims: list[GangState], turn: OpenTurn | None) -> tuple[str, ...]:
        """The gang begins to come in, and others to leave for it; their names."""
        arrival = Arrival(state, self.now, turn.job if turn else state.tenant.job, victims, turn)
        state.arrival = arrival
        for victim in victims:
            self._move(victim, Residency.OFFLOADING)
            victim.evictor = arrival
        self._move(state, Residency.LOADING)
        for one in (state, *victims):
            for gpu in one.gpus:
                self.copies[gpu][one.id] = arrival
            self._unused.update(one.gpus)
        return tuple(victim.id for victim in victims)

    def _arrived(self, arrival: Arrival) -> None:
        """It is there, and the others have left."""
        for victim in arrival.evicting:
            self._clear_evictor(victim)
            self._move(victim, Residency.HOST)
        arrival.evicting = []
        self._copied(arrival.state)
        arrival.state.arrival = None
        if arrival.turn is None or arrival.turn.phase is not Phase.BUILD:
            arrival.state.switch.observe(self.now - arrival.begun_us)
        self._move(arrival.state, Residency.DEVICE)
        if arrival.state.building:
            arrival.state.building = False
            self._tell_unions(arrival.state)
        self._look_again(arrival.state)

    def _broken_off(self, arrival: Arrival, evicted: Collection[str]) -> None:
        """It will not come. evicted: those that have left."""
        for victim in arrival.evicting:
            self._clear_evictor(victim)
            if victim.id in evicted:
                self._move(victim, Residency.HOST)
        arrival.evicting = []
        self._copied(arrival.state)
        arrival.state.arrival, arrival.state.building = None, False
        self._look_again(arrival.state)

    def _copied(self, state: GangState) -> None:
        """Nothing of the gang moves any more."""
        for gpu in state.gpus:
            self.copies[gpu].pop(state.id, None)
        self._unused.update(state.gpus)

    def _look_again(self, state: GangState) -> None:
        """Somebody who waits beside a turn on these GPUs may fit now."""
        for gpu in state.gpus:
            turn = self.held.get(gpu)
            if turn:
                turn.looked = False
                self._stir(turn)

    def _clear_evictor(self, victim: GangState) -> None:
        self._copied(victim)
        self._open.update(gpu for gpu in victim.gpus if gpu in self.free)
        victim.evictor = None
        self._look_again(victim)

    # ---- grants

    def _grant(self, waiter: Waiter, victims: list[GangState], reason: str, limit_us: int | None = None) -> None:
        """The gang's GPUs are free: its turn begins."""
        state = waiter.state
        # Whose prefetch is under way comes last: the first to be told takes the victims with it.
        coming = sorted(self.residence.needs(state.members), key=lambda member: member.arrival is not None)
        cold = state.residency is Residency.COLD
        phase = Phase.BUILD if cold else Phase.SWITCH if coming else Phase.OPEN
        job = state.spec.owner if cold else state.tenant.job
        turn = OpenTurn(state, waiter.gpus, state.peers, "", phase, self.now, job, state.rank, limit_us=limit_us)
        if state.peers:
            turn.peer = state.peers[0].spec.group
        value = 0.0 if self.policy.order in ("fifo", "round_robin") else score(self, waiter)
        if not reason:
            prefetched = len(coming) == 1 and state.arrival is not None
            reason = phase.value if coming and not prefetched else "prefetched" if prefetched else "resident"
        self._actions.append(Turn(state.id, False, reason, max(0, self.now - waiter.since_us), value))
        self._unlist(state)
        for gpu in turn.gpus:
            self.held[gpu] = turn
        self.free.difference_update(turn.gpus)
        for member in state.members:
            self.turns[member.id] = turn
            self._unlist(member)
        self._stir(turn)
        if not coming:
            turn.open(self.now)
            return
        turn.to_load = coming
        self._load_next(turn, victims)

    def _load_next(self, turn: OpenTurn, victims: list[GangState]) -> None:
        """Bring in the next gang of the turn. The first takes all victims with it."""
        state = turn.to_load[0]
        if state.arrival:  # a prefetch under way: its answer opens the turn
            state.arrival.turn = turn
            return
        state.building = turn.phase is Phase.BUILD
        evict = self._arrive(state, victims, turn)
        self._actions.append(Build(state.id, evict) if turn.phase is Phase.BUILD else Switch(state.id, evict))

    def _loaded(self, turn: OpenTurn) -> None:
        """The gang that was coming in is there."""
        turn.to_load.pop(0)
        while turn.to_load and turn.to_load[0].residency is Residency.DEVICE:
            turn.to_load.pop(0)
        if turn.to_load:
            self._load_next(turn, [])
            return
        turn.open(self.now)
        self._changed(turn.state)

    def _end(self, turn: OpenTurn, reason: str) -> None:
        state = turn.state
        if turn.phase in (Phase.OPEN, Phase.PAUSING) and turn.ran:
            end = self.now if turn.drained_us is None else turn.drained_us
            state.service.observe(max(0, end - turn.opened_us))
            state.fruitless = 0 if turn.fruitful else state.fruitless + 1
        for member in (state, *turn.peers):
            if member.arrival and member.arrival.turn is turn:
                member.arrival.turn = None
        turn.deadline = None
        for gpu in turn.gpus:
            del self.held[gpu]
        self.free.update(turn.gpus)
        self._open.update(turn.gpus)
        self._unused.update(turn.gpus)
        self._stirred.pop(id(turn), None)
        self._scavenging.pop(id(turn), None)
        for gpu in turn.gpus:
            holder = self.line.reserved.get(gpu)
            if holder is not None:
                self._stir_limited(holder)
        for member in (state, *turn.peers):
            del self.turns[member.id]
            member.used, member.used_us = self._next(), self.now
        if turn.ran:
            state.since, state.since_us = self._next(), self.now
        self._actions.append(Turn(state.id, True, reason))
        for member in (state, *turn.peers):
            self._enlist(member)

    def _part(self, turn: OpenTurn, peer: GangState, reason: str) -> None:
        """A union turn goes on without the peer, whose engine died: the call that runs will be told to have failed."""
        self._actions.append(Turn(turn.state.id, True, f"peer {reason}"))
        self._actions.append(Turn(turn.state.id, False, "alone"))
        self.meter.cut(self.now, turn.gpus)  # all its GPUs close a span together
        left = [gpu for gpu in turn.gpus if gpu not in turn.state.gpus]
        turn.gpus, turn.peers, turn.peer = turn.state.gpus, (), ""
        del self.turns[peer.id]
        peer.used, peer.used_us = self._next(), self.now
        for gpu in left:
            del self.held[gpu]
        self.free.update(left)
        self._open.update(left)
        self._unused.update(left)
        turn.note_drained(self.now)
        self._stir(turn)

    def _grants(self) -> None:
        """Give the free GPUs to those who are next."""
        while self._open:
            opened = self._open & self.free
            self._open.clear()
            # Who has starved may take a reservation over, also where it has lain for long.
            kept = {gpu for at in opened if (holder := self.line.reserved.get(at)) for gpu in holder.gpus}
            waiters = {
                name: waiter for gpu in opened | (kept & self.free) for name, waiter in self.line.on[gpu].items()
            }
            able = list(waiters.values())
            if not any(self._starves(waiter) for waiter in able):
                able = [waiter for waiter in able if not self._stuck(waiter)]
            if len(able) > 1:
                able.sort(key=lambda waiter: key(self, waiter))
            for waiter in able:
                self._try(waiter)
                if self._open:  # a reservation is gone: those who were passed over for it come first again
                    self._open |= opened
                    break

    def _stuck(self, waiter: Waiter) -> bool:
        """Whether nothing can be done for it now: a part of its gang is not free, and on another part there is the
        reservation of a gang that cannot be granted either."""
        free = self.free
        return not free.issuperset(waiter.gpus) and any(
            holder is not None and holder is not waiter and not free.issuperset(holder.gpus)
            for holder in map(self.line.reserved.get, waiter.gpus)
        )

    def _try(self, waiter: Waiter) -> None:
        """Grant the gang, or keep its GPUs for it, or let it go ahead of another's reservation, or leave it waiting."""
        state, line = waiter.state, self.line
        whole = self.free.issuperset(waiter.gpus)
        others = line.others(waiter)
        if others and self._starves(waiter) and not any(self._before(other, waiter) for other in others):
            for other in others:
                self._release(other)
            others = []
        if others:
            if whole and self.policy.backfill:
                self._backfill(waiter, others)
            return
        if whole:
            victims = self._victims(state, ())
            if victims is not None:
                self._grant(waiter, victims, "")
                return
        if state.rank != SCAVENGER and not line.holds(waiter) and not self.free.isdisjoint(waiter.gpus):
            line.reserve(waiter)
            for gpu in waiter.gpus:
                turn = self.held.get(gpu)
                if turn:
                    turn.looked = False
                    self._stir(turn)

    def _release(self, waiter: Waiter) -> None:
        """Give up the waiter's reservations, if it has any. All that were in their way may want ones of their own."""
        if self.line.holds(waiter):
            self.line.release(waiter)
            self._stir_limited(waiter)
            for gpu in waiter.gpus:
                self._open.update(gpu for other in self.line.on[gpu].values() for gpu in other.gpus)

    def _stir_limited(self, holder: Waiter) -> None:
        """Those that went ahead of a reservation: it may wait for nothing but them now."""
        for gpu in holder.gpus:
            turn = self.held.get(gpu)
            if turn is not None and turn.limit_us is not None:
                self._stir(turn)

    def _starves(self, waiter: Waiter) -> bool:
        return waiter.state.rank != SCAVENGER and self.now - waiter.since_us >= self.policy.starvation_us

    def _before(self, one: Waiter, other: Waiter) -> bool:
        return self._starves(one) and one.ticket < other.ticket

    def _victims(self, state: GangState, keep: Collection[GangState]) -> list[GangState] | None:
        """Who leaves so that the gang can have its turn; None while it cannot."""
        coming = self.residence.needs(state.members)
        if any(member.evictor for member in state.members):
            return None  # on its way out for somebody else
        coming = [member for member in coming if member.arrival is None]
        if not coming:
            return []
        return self.residence.victims(coming, self.now, {*state.members, *keep}, self.policy.lazy)

    def _backfill(self, waiter: Waiter, others: list[Waiter]) -> None:
        """EASY: ahead of reservations, if the turn and both its switches end before those could begin."""
        state = waiter.state
        if state.residency is Residency.COLD:
            return
        both = 0 if state.residency is Residency.DEVICE else 2 * state.switch.mean
        # Long enough to pay for its switches, and for what it would do there, or half a quantum of it.
        least = max(int(self.policy.min_turn_factor * both / 2), min(waiter.service_us, self.policy.quantum_us // 2))
        shadow = min(self._shadow(other) for other in others)
        if self.now + both + least > shadow:
            return
        victims = self._victims(state, [member for other in others for member in other.state.members])
        if victims is not None:
            self._grant(waiter, victims, "backfill", shadow - both // 2)

    def _may_begin(self, waiter: Waiter, rank: int) -> bool:
        """Whether a scavenger's end would let the waiter begin: one that waits for others' turns too is no reason."""
        if rank != SCAVENGER:
            return True
        return all(gpu in self.free or self.held[gpu].rank == SCAVENGER for gpu in waiter.gpus)

    def _owed(self, waiter: Waiter) -> bool:
        """Whether a reservation waits for nothing but turns that went ahead of it."""
        return all(gpu in self.free or self.held[gpu].limit_us is not None for gpu in waiter.gpus)

    def _shadow(self, waiter: Waiter) -> int:
        """When a reservation's gang is expected to begin; now, if it waits for nothing but turns ahead of it."""
        shadow = self._shadows.get(waiter.state.id)
        if shadow is None:
            turns = {id(turn): turn for gpu in waiter.gpus if (turn := self.held.get(gpu)) is not None}
            shadow = self.now
            if any(turn.limit_us is None for turn in turns.values()):
                shadow = max(turn.expected_end(self.policy, self.now) for turn in turns.values())
            self._shadows[waiter.state.id] = shadow
        return shadow

    # ---- ends of turns

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
            best = min(ranks, default=SCAVENGER)
        owed = False
        if turn.limit_us is not None:
            reserved = {id(w): w for gpu in turn.gpus if (w := line.reserved.get(gpu)) is not None}
            owed = any(self._owed(waiter) for waiter in reserved.values())
        idle = any(gpu in line.reserved for gpu in turn.gpus)
        return Others(best, answered, self.budget.next_us(self.now), owed, idle)

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
        self._actions.append(Pause(turn.state.id))
        self._stir(turn)

    # ---- conclusions

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
        """Give places to jobs whose time has come. Set by the scheduler's events."""
        raise NotImplementedError

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
        if target.residency is Residency.LOST or target.id not in self.gangs:
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

    def _look_ahead(self, turn: OpenTurn) -> None:
        """Bring in the next gang beside the turn, if its bytes fit."""
        if any(self.copies[gpu] for gpu in turn.gpus):
            return
        held = [w for gpu in turn.gpus if (w := self.line.reserved.get(gpu)) is not None]
        waiters = held[:1] or list({id(w): w for gpu in turn.gpus for w in self.line.on[gpu].values()}.values())
        if not any(waiter.state.residency is Residency.HOST for waiter in waiters):
            return
        state = min(waiters, key=lambda waiter: key(self, waiter)).state
        if state.residency is not Residency.HOST or state.peers:
            return
        at_work = {member for gpu in state.gpus if (t := self.held.get(gpu)) for member in (t.state, *t.peers)}
        victims = self.residence.victims([state], self.now, {state, *at_work, *(w.state for w in held)})
        if victims is None:
            return
        evict = self._arrive(state, victims, None)
        self._actions.append(Prefetch(state.id, evict))

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
