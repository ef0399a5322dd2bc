"""A recorded job on the virtual clock: the calls of a real run, each think time after what it had waited for there."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from plexrl.sim.program import Program
from plexrl.sim.result import StepSpan
from plexrl.types import BadInput, CallKind, Role

if TYPE_CHECKING:
    from plexrl.sim.cluster import VirtualCluster
    from plexrl.sim.tasks import SampleTask, TrainTask
    from plexrl.sim.workload import JobPlan


class Recording(Program):
    """The calls of a recorded job, with their causal edges."""

    __slots__ = ("_ended", "_given", "_open", "_released", "_spans")

    def __init__(self, cluster: VirtualCluster, plan: JobPlan, on_end: Callable[[Program], None]) -> None:
        super().__init__(cluster, plan, on_end)
        if plan.sample.service.step_us(1) <= 0 and any(c.role is Role.SAMPLE for c in plan.recorded.calls):
            raise BadInput(f"recorded job {plan.job} has samples, and decoding takes no time", "Fit its service model")
        self._ended: set[int] = set()
        self._given = 0  # results
        self._released = 0
        self._open = len(plan.recorded.calls)
        self._spans: dict[int, list[int]] = {}

    def start(self) -> None:
        """Its engines are built."""
        self.start_us = self.cluster.now
        if self._open:
            self._release()
        else:
            self._end()

    def _release(self) -> None:
        calls = self.plan.recorded.calls
        while self._released < len(calls) and calls[self._released].seen <= self._given:
            call = calls[self._released]
            self.cluster.at(self.cluster.now + call.think_us, self._submit, self._released)
            self._released += 1

    def _submit(self, index: int) -> None:
        recorded = self.plan.recorded.calls[index]
        span = self._spans.setdefault(recorded.step, [self.cluster.now, 0])
        span[1] = self.cluster.now
        if recorded.role is Role.TRAIN:
            self._train(recorded.kind, recorded.service_us, recorded.units, index, self._over)
            return
        self._sample(
            self._over,
            index,
            prompt=0,
            tokens=max(1.0, recorded.service_us / self.plan.sample.service.step_us(1)),
            batch=1,
            units=recorded.units,
            expected_us=recorded.service_us,
            expected_units=recorded.units,
        )

    def _over(self, task: SampleTask | TrainTask) -> None:
        recorded = self.plan.recorded
        call = recorded.calls[task.about]
        if call.kind is CallKind.FORWARD_BACKWARD:
            self.tokens += call.units
        elif call.kind is CallKind.PUBLISH:
            self.version += 1
            self.published_us = self.cluster.now
        self._spans[call.step][1] = self.cluster.now
        self._ended.add(task.about)
        self._open -= 1
        while self._given < len(recorded.delivered) and recorded.delivered[self._given] in self._ended:
            self._given += 1
            self._release()
        if not self._open:
            self.steps = [StepSpan(self.plan.job, step, *span) for step, span in sorted(self._spans.items())]
            self._end()
