"""The scheduler's rules over random clusters, gangs, jobs, faults, cancels and clocks, checked after every event.

Ten runs with other seeds: PLEXRL_SEEDS=10 python -m pytest tests/property/test_scheduler.py
"""

import os
import sys
from collections import Counter
from math import inf
from random import Random

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from plexrl.scheduler import Build, Policy, Switch, Turn
from plexrl.scheduler.order import ORDERS
from plexrl.scheduler.placement import PLACEMENTS
from plexrl.types import (
    BadInput,
    CallKind,
    DoesNotFit,
    GpuRole,
    GroupSpec,
    JobClass,
    Placement,
    Residency,
    Role,
    SpanClass,
)
from tests.unit.scheduler.executor import MS, Executor, S

UNIT = 64
TRAINING = [kind for kind in CallKind if kind is not CallKind.SAMPLE]
SEEDS = int(os.environ.get("PLEXRL_SEEDS", "1"))
seeds = st.integers(0, 2**32)


def any_policy(random: Random) -> Policy:
    """Any policy, with times short enough to matter within a few hundred events."""
    pick = random.choice
    return Policy(
        placement=pick(sorted(PLACEMENTS)),
        order=pick(sorted(ORDERS)),
        anticipation_us=pick([0, 50 * MS]),
        gradient_anticipation_us=pick([0, 1 * S]),
        quantum_us=pick([1, 300 * MS, 20 * S]),
        sample_quantum_us=pick([1, 300 * MS, 20 * S]),
        min_turn_factor=pick([0, 3]),
        starvation_us=pick([1 * S, 20 * S, 300 * S]),
        half_life_us=pick([10 * S, 7 * 86_400 * S]),
        max_stretch=pick([dict.fromkeys(JobClass, inf), dict.fromkeys(JobClass, 3.0)]),
        interactive_switches_per_hour=pick([0, 3, 60]),
        gather_share=pick([0.5, 0.8, 1.0]),
        backfill=pick([True, True, False]),
        prefetch=pick([True, True, False]),
        lazy=pick([True, True, False]),
        end_sleepers=pick([True, True, False]),
        natural_ends=pick([True, False]),
        relocate=pick([True, False]),
        switch_bytes_per_us=pick([1, 20_000]),
        paranoid=True,
    )


class Pool(RuleBasedStateMachine):
    """A pool under a random life. `events` counts those of all examples."""

    events = 0
    starved = 0
    nearest = 0.0
    seen: Counter = Counter()

    @initialize(nodes=st.integers(1, 4), per_node=st.integers(1, 4), start=st.integers(0, 10**15), seed=seeds)
    def begin(self, nodes, per_node, start, seed):
        random = Random(seed)
        self.units = random.randint(4, 12)
        self.heavy = random.random() < 0.3  # what sleeps keeps much
        gpus = {f"n{n}:{g}": self.units * UNIT for n in range(nodes) for g in range(per_node)}
        roles = {gpu: random.choice(list(GpuRole)) for gpu in gpus} if random.random() < 0.2 else {}
        hosts = {f"n{n}": random.randint(1, 60) * UNIT for n in range(nodes)} if random.random() < 0.2 else {}
        self.pool = Executor(gpus, any_policy(random), start, roles=roles, hosts=hosts, virtual=random.random() < 0.5)
        self.seq = 0
        self.groups = {}
        self.stale = []
        self.placed = 0
        for owner in range(4):
            self.enroll(random, owner)
        for _ in range(random.randrange(1, 6)):
            self.place(random, at_will=random.random() < 0.4)
        self.work(seed, 10)

    def enroll(self, random, owner):
        self.pool.enroll(
            f"job{owner}",
            random.choice([*JobClass, JobClass.NORMAL]),
            account=f"account{owner % 2}",
            user=random.choice(["", f"user{owner}"]),
            priority=random.choice([0, 0, 5]),
            deadline_us=random.choice([None, None, 1 * S, 100 * S]),
        )

    def groups_of(self, role):
        return sorted(group for group, spec in self.groups.items() if spec.role is role)

    def spec(self, random, name, owner):
        role = random.choice(list(Role))
        size = random.randint(1, self.units) * UNIT
        return GroupSpec(
            group=name,
            role=role,
            owner=owner,
            gang_size=random.randint(1, min(4, len(self.pool.gpus))),
            replicas=random.randint(1, 3) if role is Role.SAMPLE else 1,
            device_bytes=size - random.randrange(2),
            host_bytes=random.choice([0, size]),
            residual_bytes=random.randint(size // 4, size // 2) if self.heavy else random.choice([0, 0, UNIT // 4]),
            duty=random.choice([None, None, 0.05]),
        )

    @precondition(lambda self: len(self.groups) < 9)
    @rule(seed=seeds)
    def place_group(self, seed):
        self.place(Random(seed), at_will=False)

    @precondition(lambda self: len(self.groups) < 9)
    @rule(seed=seeds)
    def put_group(self, seed):
        """A group of an earlier head, on any GPUs: gangs overlap in every way."""
        self.place(Random(seed), at_will=True)

    def place(self, random, at_will):
        self.placed += 1
        name, owner = f"g{self.placed}", f"job{random.randrange(4)}"
        spec, pool = self.spec(random, name, owner), self.pool
        size = -(-spec.device_bytes // UNIT) * UNIT
        fields = {"host_bytes": spec.host_bytes, "residual_bytes": spec.residual_bytes, "duty": spec.duty}
        try:
            if at_will:
                rows = [random.sample(sorted(pool.gpus), spec.gang_size) for _ in range(spec.replicas)]
                offset = random.randrange(0, self.units * UNIT - size + 1, UNIT)
                if not all(self.asleep(gpu) + size <= self.units * UNIT for row in rows for gpu in row):
                    return  # no earlier head would have placed it there
                pool.put(name, spec.role, owner, rows, size, offset, duty=spec.duty)
            else:
                pool.place(
                    name, spec.role, owner, spec.device_bytes, spec.gang_size, spec.replicas, build=False, **fields
                )
        except (DoesNotFit, BadInput):
            assert name not in pool.scheduler.groups
            assert all(p.group != name for gpu in pool.gpus for p in pool.scheduler.floor.on(gpu))
            return
        self.groups[name] = spec
        if pool.scheduler.policy.placement == "isolated" and not at_will:
            mine = {gpu for gang in pool.scheduler.groups[name] for gpu in gang.gpus}
            for gpu in mine:
                assert {p.owner for p in pool.scheduler.floor.on(gpu)} == {owner}

    def asleep(self, gpu):
        """Bytes that processes on the GPU keep."""
        return sum(e.spec.residual_bytes for e in self.pool.engines.values() if gpu in e.gang.gpus)

    @precondition(lambda self: len(self.groups) < 9)
    @rule(seed=seeds)
    def ask_for_places(self, seed):
        """A trainer and samplers, placed together, now or later."""
        random, pool = Random(seed), self.pool
        owner = f"job{random.randrange(4)}"
        if owner in pool.requests:
            pool.withdraw(owner)
            return
        self.placed += 1
        specs = [self.spec(random, f"g{self.placed}{letter}", owner) for letter in "ab"[: random.randint(1, 2)]]
        try:
            pool.request(owner, specs)
        except DoesNotFit:
            return

    def note_placed(self):
        """Requests that were answered."""
        for name, states in self.pool.scheduler.groups.items():
            self.groups.setdefault(name, states[0].spec)

    @rule(seed=seeds)
    def people(self, seed):
        """Somebody becomes another class, leaves, or gets another share."""
        random = Random(seed)
        owner = random.randrange(4)
        what = random.choice(["enroll", "dismiss", "share"])
        if what == "enroll":
            self.enroll(random, owner)
        elif what == "dismiss":
            self.pool.dismiss(f"job{owner}")
        else:
            self.pool.scheduler.set_share(self.pool.now, f"account{owner % 2}", random.choice([0, 1, 4]), {"user1": 2})

    @precondition(lambda self: self.groups_of(Role.TRAIN))
    @rule(seed=seeds, n=st.integers(1, 6))
    def train(self, seed, n):
        random = Random(seed)
        self.train_group(random, random.choice(self.groups_of(Role.TRAIN)), n)

    def train_group(self, random, group, n):
        for _ in range(n):
            self.seq += 1
            self.pool.submit(
                group,
                f"{group}-m{random.randrange(2)}",
                random.choice(TRAINING),
                self.seq,
                f"job{random.randrange(4)}",
                random.randrange(5),
                random.choice([0, 1 * S, 60 * S]),
            )

    @precondition(lambda self: self.groups_of(Role.SAMPLE))
    @rule(seed=seeds, n=st.integers(1, 10))
    def sample(self, seed, n):
        random = Random(seed)
        self.sample_group(random, random.choice(self.groups_of(Role.SAMPLE)), n)

    def sample_group(self, random, group, n):
        for _ in range(n):
            self.seq += 1
            self.pool.submit(
                group,
                f"{group}-s{random.randrange(3)}",
                CallKind.SAMPLE,
                self.seq,
                f"job{random.randrange(4)}",
                random.randrange(50),
            )

    @precondition(lambda self: self.groups_of(Role.SAMPLE))
    @rule(seed=seeds)
    def long_tail(self, seed):
        """A rollout of which one sample per replica is left, when others come for the GPUs."""
        random, pool = Random(seed), self.pool
        group = max(self.groups_of(Role.SAMPLE), key=lambda name: (self.groups[name].replicas, random.random()))
        engines = [engine for engine in pool.engines.values() if engine.gang.group == group]
        self.sample_group(random, group, 12)
        for _ in range(60):
            if sum(len(engine.running) > 1 for engine in engines) > 1 or not pool.step(random):
                break
            pool.wait(5 * MS)
        for engine in engines:
            while len(engine.running) > 1:
                pool.finish(engine.running[0])
        self.note_placed()
        gpus = {gpu for engine in engines for gpu in engine.gang.gpus}
        for name in sorted({e.gang.group for e in pool.engines.values() if gpus & set(e.gang.gpus)} - {group}):
            if self.groups[name].role is Role.SAMPLE:
                self.sample_group(random, name, 2)
            else:
                self.train_group(random, name, 2)
        self.work(seed, 10)

    @precondition(lambda self: self.groups_of(Role.TRAIN) and self.groups_of(Role.SAMPLE))
    @rule(seed=seeds)
    def publish_directly(self, seed):
        """A union turn of a trainer and a sampler, or a refusal where they cannot be there together."""
        random, pool = Random(seed), self.pool
        group, peer = random.choice(self.groups_of(Role.TRAIN)), random.choice(self.groups_of(Role.SAMPLE))
        self.seq += 1
        accepted = pool.scheduler.accepted
        try:
            pool.submit(group, f"{group}-m0", CallKind.PUBLISH, self.seq, f"job{random.randrange(4)}", peer=peer)
        except BadInput:
            assert pool.scheduler.accepted == accepted
            one, other = (pool.scheduler.groups[name][0].gang for name in (group, peer))
            assert set(one.gpus) & set(other.gpus), "they share no GPU, and do not fit beside each other?"

    @rule(seed=seeds, n=st.integers(5, 30))
    def some_work(self, seed, n):
        self.work(seed, n)

    @rule(seed=seeds, n=st.integers(5, 30))
    def more_work(self, seed, n):
        self.work(seed, n)

    def work(self, seed, n):
        random = Random(seed)
        for _ in range(n):
            self.pool.wait(random.choice([0, 1, 5 * MS, 60 * MS, 500 * MS, 3 * S]))
            self.pool.step(random)
        self.note_placed()

    @rule(us=st.integers(-100 * S, 100 * S))
    def jump(self, us):
        """The clock was set, or the loop was away: no tick came for a long time."""
        self.pool.now += us
        if us < 0:
            self.pool.tick()

    @precondition(lambda self: len(self.pool.calls) > len(self.pool.ended))
    @rule(seed=seeds)
    def cancel(self, seed):
        outstanding = sorted(set(self.pool.calls) - set(self.pool.ended))
        self.pool.do(self.pool.scheduler.cancel(self.pool.now, Random(seed).choice(outstanding)))

    @precondition(lambda self: self.groups)
    @rule(seed=seeds)
    def fault(self, seed):
        random = Random(seed)
        random.choices([self.lose, self.remove, self.head_restarts, self.late], [5, 3, 1, 5])[0](random)
        self.note_placed()

    def lose(self, random):
        engine = self.pool.engines[random.choice(sorted(self.pool.engines))]
        reports = tuple(engine.running + engine.unreported)
        self.stale.append((engine.gang.id, reports, tuple(engine.leaving)))
        self.pool.lose(engine, random)
        Pool.seen["a rank died"] += 1  # seldom in its turn
        if random.random() < 0.7:
            self.pool.do(self.pool.scheduler.rebuild(self.pool.now, engine.gang.id))

    def late(self, random):
        """Answers of an engine that was lost, or is gone, arrive now."""
        if not self.stale:
            return
        gang, calls, evicted = self.stale.pop()
        scheduler, now = self.pool.scheduler, self.pool.now
        for call in calls:
            self.pool.do(scheduler.finished(now, call, 1))
        engine = self.pool.engines.get(gang)
        if engine is None or not (engine.order or engine.pausing or engine.moving):
            self.pool.do(scheduler.paused(now, gang, calls))
            self.pool.do(scheduler.switched(now, gang, True, {}, evicted))
            self.pool.do(scheduler.switched(now, gang, False, {}, evicted))
            self.pool.do(scheduler.prefetched(now, gang, True, {}, evicted))
            self.pool.do(scheduler.prefetched(now, gang, False, {}, ()))
            self.pool.do(scheduler.undone(now, gang, evicted))
            self.pool.do(scheduler.relocated(now, gang.partition("/")[0], True))
            self.pool.do(scheduler.built(now, gang))
            self.pool.do(scheduler.build_failed(now, gang, evicted))

    @precondition(lambda self: self.pool.engines)
    @rule(seed=seeds)
    def rebuild(self, seed):
        gang = Random(seed).choice(sorted(self.pool.engines))
        self.pool.do(self.pool.scheduler.rebuild(self.pool.now, gang))

    def remove(self, random):
        group = random.choice(sorted(self.groups))
        del self.groups[group]
        self.pool.remove(group)

    def head_restarts(self, random):
        """A new scheduler takes the groups up as the engines have them; calls are submitted again in their order."""
        old = self.pool
        new = Executor(
            dict(old.gpus), old.policy, old.scheduler.now, roles=old.roles, hosts=old.hosts, virtual=old.virtual
        )
        for tenant in old.tenants.values():
            new.enroll(tenant.job, tenant.kind, **{f: getattr(tenant, f) for f in TENANT})
        alive = {name for name, engine in old.engines.items() if engine.built and not engine.order}
        fit = {name for name in alive if old.engines[name].on_device}
        for engine in old.engines.values():
            engine.on_device = engine.gang.id in fit
            engine.order, engine.pausing, engine.moving = None, False, None
            for calls in (engine.running, engine.unreported, engine.partial, engine.leaving, engine.ending):
                calls.clear()
        unbuilt = {name for name, state in old.scheduler.gangs.items() if state.unbuilt and not state.building}
        dead = set(old.engines) - alive - unbuilt
        for name in dead:
            old.engines[name].die()
        for group, states in old.scheduler.groups.items():
            placement = Placement(group, tuple(state.gang for state in states))
            new.engines.update({gang.id: old.engines[gang.id] for gang in placement.gangs})
            new.do(new.scheduler.restore(new.now, placement, states[0].spec, fit, dead, unbuilt))
        for name in new.engines:
            if name in dead:
                new.do(new.scheduler.rebuild(new.now, name))
        for job, specs in old.requests.items():
            new.request(job, list(specs.values()))
        new.events += old.events
        for call in sorted(old.outstanding.values(), key=lambda c: int(c.id.rpartition(":")[2])):
            seq = int(call.id.rpartition(":")[2])
            try:
                new.submit(call.group, call.deployment, call.kind, seq, call.job, call.units, call.cost_us, call.peer)
            except BadInput:
                assert call.peer
        self.count()
        self.pool, self.stale = new, []

    @rule()
    def minute(self):
        self.pool.close()

    @rule()
    def ready(self):
        self.pool.do(self.pool.scheduler.startup_done(self.pool.now))

    @rule(seed=seeds)
    def refused(self, seed):
        """A wrong call changes nothing and is said to be wrong."""
        random = Random(seed)
        accepted = self.pool.scheduler.accepted
        for group in ["nowhere", *self.groups_of(Role.SAMPLE)[:1]]:
            with pytest.raises(BadInput):
                self.pool.submit(group, f"bad{random.random()}", CallKind.OPTIM_STEP, 1)
        assert self.pool.scheduler.accepted == accepted

    @invariant()
    def explained(self):
        if hasattr(self, "pool"):
            for call in list(self.pool.scheduler.calls)[:1]:
                assert call in self.pool.scheduler.explain(call)

    def teardown(self):
        if not hasattr(self, "pool") or sys.exc_info()[0]:
            return  # it never began, or has failed already
        if len(self.pool.trace) % 3 == 0:
            self.end_in_order()
        self.drain_dry()
        self.pool.close()
        Pool.events += self.pool.events
        self.count()

    def count(self):
        pool = self.pool
        Pool.starved += pool.watch.starved
        Pool.nearest = max(Pool.nearest, pool.watch.nearest)
        Pool.seen.update(type(action).__name__ for _, action in pool.trace)
        Pool.seen.update(action.reason for _, action in pool.trace if isinstance(action, Turn))
        Pool.seen.update(span.kind.value for span in pool.spans)
        Pool.seen["union"] += pool.unions
        Pool.seen["ended"] += sum(len(a.end) for _, a in pool.trace if isinstance(a, Build | Switch))

    def end_in_order(self):
        """The pool drains: nothing begins any more, what runs ends; another head goes on."""
        pool, random = self.pool, Random(len(self.pool.trace))
        at = len(pool.trace)
        pool.do(pool.scheduler.drain(pool.now))
        while pool.step(random):
            pool.wait(100 * MS)
        began = [action for _, action in pool.trace[at:] if isinstance(action, Turn) and not action.ended]
        assert not began and not pool.turns, f"while it drains {began} began, {pool.turns} go on"
        pool.close()
        self.head_restarts(random)

    def drain_dry(self):
        """Nothing new comes and engines live: every call ends, within a bounded number of events."""
        pool, random = self.pool, Random(len(self.pool.trace))
        for _ in range(60 + 60 * len(pool.calls) + 60 * len(pool.engines)):
            for name, state in pool.scheduler.gangs.items():
                if state.residency is Residency.LOST:
                    pool.do(pool.scheduler.rebuild(pool.now, name))
                    break
            if not pool.step(random):
                wake = pool.scheduler.wake_at()
                if wake is None:
                    break
                pool.wait(max(0, wake - pool.now))
        assert not pool.outstanding, f"never ended: {sorted(pool.outstanding)}"
        assert not pool.scheduler.calls
        done = {call for call, how in pool.ended.items() if how == "done"}
        assert done <= set(pool.started)


TENANT = ("account", "user", "priority", "deadline_us")


@pytest.mark.parametrize("number", range(SEEDS))
def test_the_rules_hold_after_every_event(number):
    Pool.events = Pool.starved = 0
    Pool.nearest = 0.0
    Pool.seen.clear()
    run_state_machine_as_test(
        seed(number)(Pool),
        settings=settings(
            max_examples=140,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.reuse, Phase.generate],
            print_blob=True,
        ),
    )
    print(f"{Pool.events} events, {Pool.starved} gangs waited beyond B, {Pool.seen}")
    assert Pool.events >= 10_000
    # What the draws seldom reach (Gather, Prefetch, removed) has tests of its own.
    often = ["Pause", "Switch", "Dropped", "Placed", "union", "quantum", "drained", "preempted", "a rank died", "ended"]
    often += ["switch failed", "build failed", "undone", "backfill"]
    assert not [what for what in often if not Pool.seen[what]], Pool.seen
    assert Pool.starved >= 1
    assert {kind.value for kind in SpanClass} <= set(Pool.seen)
