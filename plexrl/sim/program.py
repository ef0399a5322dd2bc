"""A job's program on the virtual clock: a closed loop that submits its next calls when it was given the last results.

Roll out, think for the reward, train, publish, again; synchronous or one step ahead. Times in integer microseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from plexrl.sim.draws import draw
from plexrl.sim.result import StepSpan
from plexrl.sim.tasks import SampleTask, TrainTask
from plexrl.types import Call, CallKind, GroupSpec, Role

if TYPE_CHECKING:
    from plexrl.sim.cluster import VirtualCluster
    from plexrl.sim.engine import SampleEngine
    from plexrl.sim.workload import JobPlan, SampleWork, StepWork

GAP_US = 20_000  # ours: from a result to the client's next call, by way of its proxy and the head


class Program:
    """What every job has: names, the order of its calls, and an end. Groups may be shared by jobs of one base.

    placed_us, start_us, end_us: -1 until then. version: how many times it published, last at published_us. steps: those
    that it did.
    """

    __slots__ = (
        "_sampled_calls",
        "_seq",
        "cluster",
        "end_us",
        "on_end",
        "placed_us",
        "plan",
        "published_us",
        "sample_group",
        "start_us",
        "steps",
        "tokens",
        "train_group",
        "version",
    )

    def __init__(self, cluster: VirtualCluster, plan: JobPlan, on_end: Callable[[Program], None]) -> None:
        self.cluster = cluster
        self.plan = plan
        self.on_end = on_end
        owner = f"base-{plan.base}" if plan.base else plan.job
        self.train_group = f"{owner}.train"
        self.sample_group = f"{owner}.sample"
        self.placed_us = self.start_us = self.end_us = -1
        self.version = self.published_us = 0
        self.tokens = 0
        self.steps: list[StepSpan] = []
        self._seq = 0
        self._sampled_calls = 0

    def specs(self, duty: tuple[float | None, float | None]) -> tuple[GroupSpec, GroupSpec]:
        """Its worker groups, owned by it. duty: expected of trainer and sampler."""
        train, sample = self.plan.train, self.plan.sample
        return (
            GroupSpec(
                group=self.train_group,
                role=Role.TRAIN,
                owner=self.plan.job,
                gang_size=train.gpus,
                replicas=1,
                device_bytes=train.device_bytes,
                host_bytes=train.host_bytes,
                residual_bytes=train.residual_bytes,
                duty=duty[0],
            ),
            GroupSpec(
                group=self.sample_group,
                role=Role.SAMPLE,
                owner=self.plan.job,
                gang_size=sample.gpus,
                replicas=sample.replicas,
                device_bytes=sample.device_bytes,
                host_bytes=sample.host_bytes,
                residual_bytes=sample.residual_bytes,
                duty=duty[1],
            ),
        )

    def start(self) -> None:
        """Its engines are built."""
        raise NotImplementedError

    def _train(self, kind: CallKind, work_us: int, units: int, step: int, done: Callable[[TrainTask], None]) -> None:
        job = self.plan.job
        self._seq += 1
        call = Call(
            id=f"{job}:{self._seq}",
            kind=kind,
            group=self.train_group,
            deployment=job,
            job=job,
            seq=self._seq,
            cost_us=work_us,
            units=units,
        )
        self.cluster.submit(call, TrainTask(call.id, done, kind=kind, work_us=work_us, units=units, about=step))

    def _sample(
        self,
        done: Callable[[SampleTask], None],
        about: Any,
        *,
        prompt: int,
        tokens: float,
        batch: int,
        units: int,
        expected_us: int,
        expected_units: int,
        cache: tuple[SampleEngine, int] | None = None,
    ) -> None:
        """expected_*: what can be known of it before it is drawn."""
        job = self.plan.job
        self._sampled_calls += 1
        call = Call(
            id=f"{job}.s:{self._sampled_calls}",
            kind=CallKind.SAMPLE,
            group=self.sample_group,
            deployment=job,
            job=job,
            cost_us=expected_us,
            units=expected_units,
        )
        task = SampleTask(
            call.id,
            done,
            deployment=job,
            prompt=prompt,
            tokens=tokens,
            batch=batch,
            units=units,
            version=self.version,
            published_us=self.published_us,
            about=about,
            cache=cache,
        )
        self.cluster.submit(call, task)

    def _end(self) -> None:
        self.end_us = self.cluster.now
        self.on_end(self)


class Loop(Program):
    """Steps drawn from the plan. seed: the workload's."""

    __slots__ = ("_begun", "_open", "_rolled", "_rolling", "_seed", "_since", "_to_train", "_training")

    def __init__(self, cluster: VirtualCluster, plan: JobPlan, seed: int, on_end: Callable[[Program], None]) -> None:
        super().__init__(cluster, plan, on_end)
        self._seed = seed
        self._since: dict[int, int] = {}  # step -> begin of its rollout
        self._begun = 0  # rollouts
        self._rolled = 0  # rollouts that have ended
        self._open = 0  # calls of the present rollout
        self._rolling: StepWork
        self._to_train: list[StepWork] = []  # rewarded
        self._training = False

    def start(self) -> None:
        """Its engines are built: the first rollout."""
        self.start_us = self.cluster.now
        self._roll()

    def _roll(self, _: None = None) -> None:
        """Begin the next rollout: when the one before has ended, and the weights of the step before (lag 0), or of the
        one before that (lag 1), are there."""
        step = self._begun
        if step == self.plan.steps or step > self._rolled or self.version < step - self.plan.lag:
            return
        self._begun += 1
        self._since[step] = self.cluster.now
        plan = self.plan
        work = draw(plan, step, self._seed)
        self._rolling = work
        self._open = len(work.samples)
        for sample in work.samples:
            self._draw(sample, sample.tokens, sample.prompt_tokens, sample.units, sample.stall_us)

    def _draw(
        self,
        sample: SampleWork,
        tokens: int,
        prompt: int,
        units: int,
        stall_us: int,
        cache: tuple[SampleEngine, int] | None = None,
    ) -> None:
        """Submit a sample, or what follows its tools. With tools it is two calls with one wait between them, as long as
        all waits of its slowest sequence together: programs call their tools themselves."""
        service, mean = self.plan.sample.service, self.plan.rollout.lengths.mean_tokens
        share, done = 1.0, self._sampled
        if stall_us:
            share, done = 0.5, self._stalled
        elif sample.stall_us:
            share = 0.5
        self._sample(
            done,
            sample,
            prompt=prompt,
            tokens=max(1, tokens // 2) if stall_us else tokens,
            batch=sample.sequences,
            units=units // 2 if stall_us else units,
            expected_us=service.sample_us(prompt, int(mean * share), sample.sequences),
            expected_units=max(1, int(mean * share * sample.sequences)),
            cache=cache,
        )

    def _stalled(self, task: SampleTask) -> None:
        self.cluster.at(self.cluster.now + task.about.stall_us, self._resume, task)

    def _resume(self, task: SampleTask) -> None:
        """Its tools have answered: all that was drawn is prefix now."""
        sample: SampleWork = task.about
        left = max(1, sample.tokens - int(task.tokens))
        self._draw(sample, left, task.prompt + task.units, sample.units - task.units, 0, task.cache)

    def _sampled(self, task: SampleTask) -> None:
        self._open -= 1
        if self._open == 0:
            self._rolled += 1
            cluster = self.cluster
            cluster.at(cluster.now + self._rolling.reward_us, self._rewarded, self._rolling)
            if self.plan.lag:
                cluster.at(cluster.now + GAP_US, self._roll, None)

    def _rewarded(self, work: StepWork) -> None:
        self._to_train.append(work)
        self._learn()

    def _learn(self, _: None = None) -> None:
        """Submit a step's training, one step at a time: gradients are accumulated over all calls, then applied once."""
        if self._training or not self._to_train:
            return
        self._training = True
        work, step, train = self._to_train.pop(0), self.version, self.plan.train
        given = 0
        for i in range(1, train.calls + 1):
            tokens = work.train_tokens * i // train.calls - given
            given += tokens
            us = train.service.train_us(tokens)
            self._train(CallKind.FORWARD_BACKWARD, us, max(1, tokens), step, self._forwarded)
        self.tokens += given
        self._train(CallKind.OPTIM_STEP, train.service.step_optimizer_us(), 1, step, self._stepped)

    def _forwarded(self, task: TrainTask) -> None:
        pass

    def _stepped(self, task: TrainTask) -> None:
        self.cluster.at(self.cluster.now + GAP_US, self._publish, task.about)

    def _publish(self, step: int) -> None:
        self._train(CallKind.PUBLISH, self.plan.train.publish_us, 1, step, self._published)

    def _published(self, task: TrainTask) -> None:
        cluster = self.cluster
        self.version += 1
        self.published_us = cluster.now
        self._training = False
        self.steps.append(StepSpan(self.plan.job, task.about, self._since.pop(task.about), cluster.now))
        if self.version == self.plan.steps:
            self._end()
            return
        cluster.at(cluster.now + GAP_US, self._roll, None)
        if self._to_train:
            cluster.at(cluster.now + GAP_US, self._learn, None)
