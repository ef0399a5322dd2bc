"""The scheduler's rules over random clusters, gangs, jobs, faults, cancels and clocks, checked after every event."""

import sys
from collections import Counter
from random import Random

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from plexrl.scheduler import Policy, Turn
from plexrl.types import BadInput, CallKind, DoesNotFit, GroupSpec, Placement, Residency, Role, SpanClass
from tests.unit.scheduler.executor import MS, Executor, S

UNIT = 64
TRAINING = [kind for kind in CallKind if kind is not CallKind.SAMPLE]
seeds = st.integers(0, 2**32)


class Pool(RuleBasedStateMachine):
    """A pool under a random life. `events` counts those of all examples."""

    events = 0
    seen: Counter = Counter()

    @initialize(
        nodes=st.integers(1, 3),
        per_node=st.integers(1, 3),
        units=st.integers(4, 12),
        placement=st.sampled_from(["pack", "pack", "isolated"]),
        anticipation=st.sampled_from([0, 50 * MS]),
        quantum=st.sampled_from([1, 300 * MS, 20 * S]),
        start=st.integers(0, 10**15),
        seed=seeds,
    )
    def begin(self, nodes, per_node, units, placement, anticipation, quantum, start, seed):
        gpus = {f"n{n}:{g}": units * UNIT for n in range(nodes) for g in range(per_node)}
        policy = Policy(placement=placement, anticipation_us=anticipation, quantum_us=quantum, paranoid=True)
        self.pool = Executor(gpus, policy, start)
        self.seq = 0
        self.groups = {}
        self.stale = []
        self.placed = 0
        random = Random(seed)
        for _ in range(random.randrange(1, 6)):
            role, gang = random.choice(list(Role)), random.randint(1, min(3, len(gpus)))
            self.place(role, random.randrange(4), gang, random.randint(1, 3), random.randint(units // 3, units))
        self.work(seed, 10)

    def groups_of(self, role):
        return sorted(group for group, spec in self.groups.items() if spec.role is role)

    @precondition(lambda self: len(self.groups) < 8)
    @rule(
        role=st.sampled_from(Role),
        owner=st.integers(0, 3),
        gang=st.integers(1, 3),
        replicas=st.integers(1, 3),
        units=st.integers(1, 10),
    )
    def place_group(self, role, owner, gang, replicas, units):
        self.place(role, owner, gang, replicas, units)

    def place(self, role, owner, gang, replicas, units):
        self.placed += 1
        name = f"g{self.placed}"
        replicas = replicas if role is Role.SAMPLE else 1
        try:
            placement = self.pool.place(name, role, f"job{owner}", units * UNIT - 1, gang, replicas, build=False)
        except DoesNotFit:
            assert name not in self.pool.scheduler.groups
            assert all(
                p.gang.partition("/")[0] != name for g in self.pool.tiled for p in self.pool.scheduler.floor.on(g)
            )
            return
        self.groups[name] = GroupSpec(
            group=name, role=role, owner=f"job{owner}", gang_size=gang, replicas=replicas, device_bytes=units * UNIT
        )
        for member in placement.gangs:
            assert len(set(member.gpus)) == gang
            assert all(e.offset % 64 == 0 and e.size == units * UNIT for e in member.extents)
        if self.pool.scheduler.policy.placement == "isolated":
            for gpu in self.pool.tiled:
                assert len({p.owner for p in self.pool.scheduler.floor.on(gpu)}) <= 1

    @precondition(lambda self: self.groups_of(Role.TRAIN))
    @rule(seed=seeds, n=st.integers(1, 6))
    def train(self, seed, n):
        random = Random(seed)
        group = random.choice(self.groups_of(Role.TRAIN))
        for _ in range(n):
            self.seq += 1
            deployment = f"{group}-m{random.randrange(2)}"
            self.pool.submit(group, deployment, random.choice(TRAINING), self.seq, units=random.randrange(5))

    @precondition(lambda self: self.groups_of(Role.SAMPLE))
    @rule(seed=seeds, n=st.integers(1, 10))
    def sample(self, seed, n):
        random = Random(seed)
        group = random.choice(self.groups_of(Role.SAMPLE))
        for _ in range(n):
            self.seq += 1
            self.pool.submit(
                group, f"{group}-s{random.randrange(3)}", CallKind.SAMPLE, self.seq, units=random.randrange(50)
            )

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
        random.choices([self.lose, self.remove, self.head_restarts, self.late], [5, 1, 1, 5])[0](random)

    def lose(self, random):
        engine = self.pool.engines[random.choice(sorted(self.pool.engines))]
        reports = tuple(engine.running + engine.unreported)
        self.stale.append((engine.gang.id, reports, engine.order.evict if engine.order else ()))
        self.pool.lose(engine, random)
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
        if gang not in self.pool.engines or not (self.pool.engines[gang].order or self.pool.engines[gang].pausing):
            self.pool.do(scheduler.paused(now, gang, calls))
            self.pool.do(scheduler.switched(now, gang, True, {}, evicted))
            self.pool.do(scheduler.switched(now, gang, False, {}, evicted))
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
        new = Executor(dict(old.scheduler.floor.gpus), old.scheduler.policy, old.scheduler.now)
        alive = {name for name, engine in old.engines.items() if engine.built and not engine.order}
        fit = {name for name, engine in old.engines.items() if name in alive and engine.on_device}
        for engine in old.engines.values():
            engine.on_device = engine.gang.id in fit
            engine.order, engine.pausing = None, False
            engine.running.clear()
            engine.unreported.clear()
        new.engines = old.engines
        for group, spec in self.groups.items():
            placement = Placement(group, tuple(state.gang for state in old.scheduler.groups[group]))
            new.do(new.scheduler.restore(new.now, placement, spec, fit))
        for name, engine in new.engines.items():
            if name not in alive:
                engine.built = engine.on_device = False
                new.do(new.scheduler.lost(new.now, name))
                new.do(new.scheduler.rebuild(new.now, name))
        new.events += old.events
        for call in sorted((c for c in old.calls.values() if c.id not in old.ended), key=lambda c: c.id):
            old.ended[call.id] = "handed over"
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
            self.pool.calls.popitem()
        assert self.pool.scheduler.accepted == accepted

    @invariant()
    def explained(self):
        if hasattr(self, "pool"):
            for call in list(self.pool.scheduler.calls)[:1]:
                assert call in self.pool.scheduler.explain(call)

    def teardown(self):
        if not hasattr(self, "pool") or sys.exc_info()[0]:
            return  # it never began, or has failed already
        self.drain_dry()
        self.pool.close()
        Pool.events += self.pool.events
        Pool.seen.update(type(action).__name__ for _, action in self.pool.trace)
        Pool.seen.update(action.reason for _, action in self.pool.trace if isinstance(action, Turn))
        Pool.seen.update(span.kind.value for span in self.pool.spans)

    def drain_dry(self):
        """Nothing new comes and engines live: every call ends, within a bounded number of events."""
        pool, random = self.pool, Random(len(self.pool.trace))
        for _ in range(40 + 40 * len(pool.calls) + 40 * len(pool.engines)):
            for name, state in pool.scheduler.gangs.items():
                if state.residency is Residency.LOST:
                    pool.do(pool.scheduler.rebuild(pool.now, name))
                    break
            if not pool.step(random):
                wake = pool.scheduler.wake_at()
                if wake is None:
                    break
                pool.wait(max(0, wake - pool.now))
        assert set(pool.ended) == set(pool.calls), f"never ended: {set(pool.calls) - set(pool.ended)}"
        assert not pool.scheduler.calls
        done = {call for call, how in pool.ended.items() if how == "done"}
        assert done <= set(pool.started)


def test_the_rules_hold_after_every_event():
    Pool.events = 0
    Pool.seen.clear()
    run_state_machine_as_test(
        Pool,
        settings=settings(
            max_examples=400,
            stateful_step_count=50,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.reuse, Phase.generate],
            print_blob=True,
        ),
    )
    assert Pool.events >= 10_000
    for what in [
        "Pause",
        "Switch",
        "Dropped",
        "quantum",
        "drained",
        "lost",
        "switch failed",
        "build failed",
        "removed",
    ]:
        assert Pool.seen[what] >= 5, f"{what} hardly happened: {Pool.seen}"
    assert {kind.value for kind in SpanClass} - {"drain"} <= set(Pool.seen)
