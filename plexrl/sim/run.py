"""Runs a workload under a policy: the live Scheduler class, virtual workers, closed-loop jobs."""

from collections.abc import Callable, Mapping
from functools import lru_cache
from time import perf_counter

import msgspec

from plexrl.scheduler import Placed, Policy, Scheduler
from plexrl.scheduler.costs import SwitchModel
from plexrl.sim.alone import Alone, alone, anonymous, least_us, least_wall_us
from plexrl.sim.cluster import VirtualCluster
from plexrl.sim.draws import draw
from plexrl.sim.engine import ADAPTER_SHARE, Engine, SampleEngine, TrainEngine
from plexrl.sim.nodes import gpus_of
from plexrl.sim.program import Loop, Program
from plexrl.sim.recorded import Recording
from plexrl.sim.result import JobResult, Result
from plexrl.sim.workload import Cluster, JobPlan, Workload
from plexrl.types import DoesNotFit, PlexrlError, Tenant

# account -> its shares of the pool, and its users' shares of the account
AccountShares = Mapping[str, tuple[float, Mapping[str, float]]]
_EVERY = 20_000  # events between two reports of progress


def run(
    workload: Workload,
    policy: Policy,
    *,
    name: str = "",
    keep_timeline: bool = False,
    compare_alone: bool = True,
    warm: bool = False,
    virtual: bool = True,
    shares: AccountShares | None = None,
    until_us: int | None = None,
    progress: Callable[[int, int, int], None] | None = None,
) -> Result:
    """Run the whole workload; equal arguments give equal results (`Result.fingerprint`).

    name: the policy's in the result, else its placement and order. keep_timeline: keep bars and marks. compare_alone:
    compute each job's `alone_us`. warm: what a job's groups will be busy is known, as from an earlier run's trace; else
    the scheduler's priors hold. virtual: gangs are resident together when their bytes fit (CUDA); else only when
    their fixed extents do not overlap. shares: of accounts, where they are not all alike. until_us: the run ends there;
    jobs that have not ended then have an end_us of -1. progress: told (jobs ended, events, now_us) now and then.
    Raises PlexrlError when the scheduler leaves jobs waiting for ever, which is a fault of it.
    """
    began = perf_counter()
    simulation = _Simulation(workload, policy, virtual, keep_timeline, compare_alone or warm, warm)
    simulation.share(shares or {})
    simulation.run(progress, until_us)
    return simulation.result(name or f"{policy.placement}/{policy.order}", perf_counter() - began)


def alone_in(workload: Workload, plan: JobPlan) -> Alone:
    """The job alone on as many of the workload's GPUs as it asks for: in closed form, else simulated."""
    if plan.recorded is None and not plan.rollout.stalls.turns_max:
        return alone(plan, workload.seed, workload.switch)
    return _simulated(anonymous(plan), workload.seed, workload.switch, workload.gpus.bytes)


@lru_cache(20_000)
def _simulated(plan: JobPlan, seed: int, switch: SwitchModel, gpu_bytes: int) -> Alone:
    train, sample = plan.train, plan.sample
    apart = Cluster(
        nodes=train.gpus + sample.gpus * sample.replicas,
        per_node=1,
        bytes=gpu_bytes,
        host_bytes=0,
        train_nodes=train.gpus,
        sample_nodes=sample.gpus * sample.replicas,
    )
    own = msgspec.structs.replace(plan, base="")
    by_itself = Workload(name=plan.job, gpus=apart, jobs=(own,), switch=switch, seed=seed)
    found = run(by_itself, Policy(placement="isolated", order="fifo"), compare_alone=False)
    sampled = found.classes["busy"] - found.train_busy_us
    least_sample = 0.0  # how a recorded job's samples were batched is not known, so nothing can be ruled out
    least_wall = found.jobs[0].end_us - found.jobs[0].placed_us
    if plan.recorded is None:
        works = [draw(plan, step, seed) for step in range(plan.steps)]
        # What follows a tool may be on any replica, so all of a rollout may be one batch.
        least_sample = sum(least_us(plan, work, [work.samples]) for work in works) * sample.gpus
        least_wall = least_wall_us(plan, works)
    return Alone(
        wall_us=found.jobs[0].end_us - found.jobs[0].placed_us,
        train_us=found.train_busy_us // train.gpus,
        sample_us=sampled // sample.gpus,
        replicas=sample.replicas,
        least_wall_us=0 if plan.base else int(least_wall),
        least_train_us=found.train_busy_us,
        least_sample_us=int(least_sample),
    )


class _Home:
    """The worker groups of a job, or of all jobs of a base. users: jobs that have not ended; left: engines to build."""

    __slots__ = ("engines", "left", "users")

    def __init__(self) -> None:
        self.users: list[Program] = []
        self.engines: list[Engine] = []
        self.left = -1  # not placed


class _Simulation:
    def __init__(
        self, workload: Workload, policy: Policy, virtual: bool, keep_timeline: bool, compare_alone: bool, warm: bool
    ) -> None:
        gpus, roles, hosts = gpus_of(workload.gpus)
        self._workload = workload
        self._policy = policy
        self._scheduler = Scheduler(gpus, policy, roles=roles, hosts=hosts, virtual=virtual)
        self._cluster = VirtualCluster(self._scheduler, workload.switch, keep_timeline=keep_timeline)
        self._cluster.on_placed = self._placed
        self._cluster.on_built = self._built
        self._warm = warm
        self._compare = compare_alone
        self._homes: dict[str, _Home] = {}
        self._requested: dict[str, tuple[Program, _Home]] = {}  # by the job that asked
        self._programs: dict[str, Program] = {}
        self._refused: dict[str, str] = {}
        self._alone: dict[str, int] = {}
        self._left = len(workload.jobs)

    def share(self, shares: AccountShares) -> None:
        for account, (part, users) in shares.items():
            self._scheduler.set_share(0, account, part, users)

    def run(self, progress: Callable[[int, int, int], None] | None, until_us: int | None) -> None:
        cluster, workload = self._cluster, self._workload
        self._scheduler.start(0)
        cluster.do(self._scheduler.startup_done(0))
        cluster.events += 1
        for plan in workload.jobs:
            cluster.at(plan.arrival_us, self._arrive, plan)
        told = 0
        step = cluster.step
        while self._left and (until_us is None or cluster.now < until_us):
            if not step():
                waiting = [job for job, program in self._programs.items() if program.end_us < 0]
                raise PlexrlError(
                    f"{len(waiting)} jobs wait for ever, {waiting[0]} first: {self._scheduler.explain(waiting[0])}",
                    "This is a fault of the scheduler or of the workload's plan",
                )
            if progress is not None and cluster.events - told >= _EVERY:
                told = cluster.events
                progress(len(workload.jobs) - self._left, told, cluster.now)
        cluster.events += 1
        cluster.do(self._scheduler.spans(cluster.now))

    # ---- jobs come and go

    def _arrive(self, plan: JobPlan) -> None:
        cluster, scheduler = self._cluster, self._scheduler
        if plan.recorded is not None:
            program: Program = Recording(cluster, plan, self._ended)
        else:
            program = Loop(cluster, plan, self._workload.seed, self._ended)
        duty: tuple[float | None, float | None] = (None, None)
        if self._compare:
            found = alone_in(self._workload, plan)
            self._alone[plan.job] = found.wall_us
            if self._warm:
                duty = found.train_duty, found.sample_duty
        tenant = Tenant(job=plan.job, account=plan.account, user=plan.user or plan.job, kind=plan.kind)
        cluster.events += 1
        cluster.do(scheduler.enroll(cluster.now, tenant))
        home = self._homes.get(program.train_group)
        if home is not None:
            home.users.append(program)
            self._programs[plan.job] = program
            if home.left >= 0:
                program.placed_us = cluster.now
            if home.left == 0:
                program.start()
            return
        home = _Home()
        home.users.append(program)
        self._requested[plan.job] = program, home
        cluster.events += 1
        try:
            actions = scheduler.request(cluster.now, plan.job, program.specs(duty))
        except DoesNotFit as error:
            del self._requested[plan.job]
            self._refused[plan.job] = str(error)
            self._left -= 1
            cluster.events += 1
            cluster.do(scheduler.dismiss(cluster.now, plan.job))
            return
        self._homes[program.train_group] = home
        self._programs[plan.job] = program
        cluster.do(actions)

    def _placed(self, action: Placed) -> None:
        program, home = self._requested.pop(action.job)
        plan, cluster = program.plan, self._cluster
        now = cluster.now
        for user in home.users:
            user.placed_us = now
        for placement, kind, side in zip(
            action.placements, (TrainEngine, SampleEngine), (plan.train, plan.sample), strict=True
        ):
            state = side.host_bytes or side.device_bytes
            changed = int(state * ADAPTER_SHARE) if plan.base else state
            for gang in placement.gangs:
                engine = kind(cluster, gang.id, gang.group, gang.gpus, side.service, state, changed, side.build_us)
                cluster.install(engine)
                home.engines.append(engine)
        home.left = len(home.engines)

    def _built(self, engine: Engine) -> None:
        home = self._homes[f"{engine.group.rpartition('.')[0]}.train"]
        home.left -= 1
        if not home.left:
            for program in home.users:
                program.start()

    def _ended(self, program: Program) -> None:
        self._left -= 1
        cluster, scheduler = self._cluster, self._scheduler
        home = self._homes[program.train_group]
        home.users.remove(program)
        if not home.users:
            del self._homes[program.train_group]
            # Before the scheduler is told: its answer may place the next job on these GPUs.
            for engine in home.engines:
                cluster.uninstall(engine)
            for group in (program.train_group, program.sample_group):
                cluster.events += 1
                cluster.do(scheduler.remove(cluster.now, group))
        cluster.events += 1
        cluster.do(scheduler.dismiss(cluster.now, program.plan.job))

    # ---- what it came to

    def result(self, name: str, wall_s: float) -> Result:
        cluster, workload = self._cluster, self._workload
        charged = cluster.charged
        jobs = tuple(
            JobResult(
                job=plan.job,
                account=plan.account,
                user=plan.user,
                kind=plan.kind,
                gpus_train=plan.train.gpus,
                gpus_sample=plan.sample.gpus * plan.sample.replicas,
                arrival_us=plan.arrival_us,
                placed_us=program.placed_us,
                start_us=program.start_us,
                end_us=program.end_us,
                steps=len(program.steps),
                alone_us=self._alone.get(plan.job, 0),
                busy_us=charged.get((plan.job, "busy"), 0),
                switch_us=charged.get((plan.job, "switch"), 0),
                kept_us=charged.get((plan.job, "kept"), 0),
                tokens=program.tokens,
            )
            for plan in workload.jobs
            if (program := self._programs.get(plan.job))
        )
        return Result(
            policy=name,
            placement=self._policy.placement,
            order=self._policy.order,
            workload=workload.name,
            digest=workload.digest(),
            seed=workload.seed,
            gpus=workload.gpus.size,
            wall_us=cluster.now,
            held_us=cluster.held_us,
            classes=cluster.gpu_us,
            jobs=jobs,
            switches=cluster.switches,
            prefetches=cluster.prefetches,
            builds=cluster.builds,
            pauses=cluster.pauses,
            gathers=cluster.gathers,
            relocations=cluster.relocations,
            hidden_us=cluster.hidden_us,
            train_busy_us=cluster.train_busy_us,
            train_held_us=cluster.train_held_us,
            jobs_refused=self._refused,
            events=cluster.events,
            wall_s=wall_s,
            steps=tuple(step for program in self._programs.values() for step in program.steps),
            timeline=tuple(cluster.timeline),
            marks=tuple(cluster.marks),
        )
