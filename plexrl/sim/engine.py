"""Virtual engines: what a gang's calls take on the virtual clock. Times in integer microseconds.

A sampler decodes all its live calls together: each advances by one token per decode step, and a step takes
decode_base_us + decode_us_per_sequence x live sequences, so whoever joins or ends changes the rate of all. Prefill
holds decoding up, as engines that do the one or the other do. A trainer works through its calls one by one.
No event per token: between two joins or ends the rate is constant.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush
from math import ceil
from typing import TYPE_CHECKING

from plexrl.scheduler.costs import ServiceModel
from plexrl.sim.tasks import SampleTask, TrainTask
from plexrl.types import CallKind

if TYPE_CHECKING:
    from plexrl.sim.cluster import VirtualCluster

MICRO_US = 500_000  # ours: a forward_backward can stop between micro-batches, so often at least
GRADIENTS = 4  # live gradients add a quarter to a trainer's state: 4 bytes per parameter on 16 (traps B17)
ADAPTER_SHARE = 0.01  # ours: of a base's bytes, a LoRA adapter with its optimizer state
_TINY = 1e-6  # of a token: float error, nothing else


class Engine:
    """A gang's engine. state_bytes: what a load moves, per GPU; changed_bytes: of it, what training changes."""

    __slots__ = (
        "build_us",
        "changed_bytes",
        "cluster",
        "group",
        "gpus",
        "id",
        "loads",
        "service",
        "state_bytes",
        "tag",
    )
    trains = False

    def __init__(
        self,
        cluster: VirtualCluster,
        id: str,
        group: str,
        gpus: tuple[str, ...],
        service: ServiceModel,
        state_bytes: int,
        changed_bytes: int,
        build_us: int,
    ) -> None:
        self.cluster = cluster
        self.id = id
        self.group = group
        self.gpus = gpus
        self.service = service
        self.state_bytes = state_bytes
        self.changed_bytes = changed_bytes
        self.build_us = build_us
        self.loads = 0
        self.tag = 0

    def bytes_in(self) -> int:
        """What a load moves to each GPU."""
        return self.state_bytes

    def bytes_out(self) -> int:
        """What an offload moves from each GPU; nothing that the host has already."""
        return 0

    def offloaded(self) -> None:
        """Its state has left the device."""

    def loaded(self) -> None:
        """Its state has come to the device."""
        self.loads += 1


class SampleEngine(Engine):
    """One replica of a sampler. position: decode steps since the turn began; ends: (position, tie, task)."""

    __slots__ = (
        "_at_us",
        "_base",
        "_batch",
        "_blocked_us",
        "_ends",
        "_loaded_us",
        "_position",
        "_prefill",
        "_sequence",
        "_versions",
        "live",
    )

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.live: dict[str, SampleTask] = {}
        self._versions: dict[str, int] = {}
        self._base = self.service.decode_base_us
        self._sequence = self.service.decode_us_per_sequence
        self._prefill = self.service.prefill_us_per_token
        self._ends: list[tuple[float, int, SampleTask]] = []
        self._position = 0.0
        self._batch = 0
        self._at_us = 0
        self._loaded_us = 0
        self._blocked_us = 0.0

    def loaded(self) -> None:
        """It comes with the newest weights, and without any cache."""
        self.loads += 1
        self._loaded_us = self.cluster.now
        self._versions.clear()

    def run(self, tasks: Iterable[SampleTask]) -> None:
        """The tasks join the batch after their prefill, which takes new weights in first where they are wanted."""
        cluster = self.cluster
        now = cluster.now
        self._advance(now)
        work = 0.0
        for task in tasks:
            self.live[task.call] = task
            work += self.service.call_us
            has = self._versions.get(task.deployment)
            if has != task.version:
                self._versions[task.deployment] = task.version
                if has is not None or task.published_us > self._loaded_us:  # else the load has brought them
                    work += cluster.switch.in_us(self.changed_bytes)
            work += self._prefill * task.prefill(self)
            task.end = self._position + task.left
            heappush(self._ends, (task.end, cluster.next(), task))
            self._batch += task.batch
        self._blocked_us = max(self._blocked_us, now) + work
        self._plan(now)

    def pause_us(self, whole: bool = False) -> int:
        """How long until it has stopped: one decode step."""
        return ceil(self._base + self._sequence * self._batch)

    def pause(self) -> tuple[str, ...]:
        """Stop; what is unfinished, with its progress kept."""
        self._advance(self.cluster.now)
        for end, _, task in self._ends:
            task.left = max(0.0, end - self._position)
            task.cache = (self, self.loads)
        unfinished = tuple(self.live)
        self.live.clear()
        self._ends.clear()
        self._batch = 0
        self._blocked_us = 0.0
        self.tag += 1
        return unfinished

    def _advance(self, now: int) -> None:
        if self._ends:
            begin = self._at_us if self._at_us > self._blocked_us else self._blocked_us
            if now > begin:
                self._position += (now - begin) / (self._base + self._sequence * self._batch)
        self._at_us = now

    def _plan(self, now: int) -> None:
        """Set the time of the next end, unless something changes the rate before."""
        self.tag += 1
        if self._ends:
            begin = now if now > self._blocked_us else self._blocked_us
            left = self._ends[0][0] - self._position
            end = begin + left * (self._base + self._sequence * self._batch)
            self.cluster.at(ceil(end - _TINY), self._reached, self.tag)

    def _reached(self, tag: int) -> None:
        if tag != self.tag:
            return
        cluster = self.cluster
        self._advance(cluster.now)
        ends, ended = self._ends, []
        limit = self._position + _TINY
        while ends and ends[0][0] <= limit:
            task = heappop(ends)[2]
            self._batch -= task.batch
            task.cache = (self, self.loads)
            del self.live[task.call]
            ended.append(task)
        self._plan(cluster.now)
        for task in ended:
            cluster.finished(task)


class TrainEngine(Engine):
    """A trainer. changed: since the last offload, so that its state must be copied out. gradients: are live."""

    __slots__ = ("changed", "gradients", "running")
    trains = True

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.running: TrainTask | None = None
        self.changed = self.gradients = False

    def bytes_in(self) -> int:
        """Live gradients come back with the rest."""
        return self.state_bytes + (self.changed_bytes // GRADIENTS if self.gradients else 0)

    def bytes_out(self) -> int:
        """What training changed since the host has it, and live gradients."""
        return (self.changed_bytes if self.changed else 0) + (self.changed_bytes // GRADIENTS if self.gradients else 0)

    def offloaded(self) -> None:
        """The host has it all."""
        self.changed = False

    def run(self, tasks: Iterable[TrainTask]) -> None:
        """The one task that may run begins, or goes on after a pause."""
        (task,) = tasks
        now = self.cluster.now
        self.running = task
        task.start_us, task.end_us = now, now + task.left_us
        self.tag += 1
        self.cluster.at(task.end_us, self._reached, self.tag)

    def pause_us(self, whole: bool = False) -> int:
        """How long until it has stopped: at the next micro-batch, and only at the end of any other call, or of any."""
        task = self.running
        if task is None:
            return 0
        now = self.cluster.now
        if whole or task.kind is not CallKind.FORWARD_BACKWARD:
            return task.end_us - now
        return min(MICRO_US - (now - task.start_us) % MICRO_US, task.end_us - now)

    def pause(self) -> tuple[str, ...]:
        """Stop; what is unfinished, with its progress kept."""
        task, self.running = self.running, None
        self.tag += 1
        if task is None:
            return ()
        task.left_us = task.end_us - self.cluster.now
        self.gradients = True
        return (task.call,)

    def _reached(self, tag: int) -> None:
        if tag != self.tag:
            return
        task, self.running = self.running, None
        if task.kind is CallKind.FORWARD_BACKWARD:
            self.gradients = True
        elif task.kind is CallKind.OPTIM_STEP:
            self.gradients, self.changed = False, True
        self.cluster.finished(task)
