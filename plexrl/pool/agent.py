"""The agent of one node: owns its memory, starts engine hosts, sees their ends. It carries no calls.

It outlives a head and ends when told, on SIGTERM, or when its allocation ends.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import time
from pathlib import Path

import msgspec

from plexrl.config import PoolConfig
from plexrl.memory.nvme import Damaged
from plexrl.pool import gpus as real
from plexrl.pool import messages as m
from plexrl.pool.harden import harden
from plexrl.pool.intervals import IntervalLog
from plexrl.pool.layout import Layout
from plexrl.pool.nodememory import SHARED, NodeMemory
from plexrl.pool.nursery import Nursery, rank_fds
from plexrl.pool.peer import HeadLink, Replies
from plexrl.types import DoesNotFit, PlexrlError, Slab

log = logging.getLogger("plexrl.agent")
_INTERVAL_S = 10.0
_GRACE_S = 10.0
_TERM_S = 20.0
_TAIL_BYTES = 2000
_CATEGORIES = {DoesNotFit: "user", Damaged: "damaged"}


class Child(msgspec.Struct, frozen=True):
    """A running engine host: which life of its gang it belongs to, and its seat at its GPU's gate."""

    pid: int
    build: str
    gpu: int
    seat: int


class Agent:
    """node: its name in GPU names. gpus: how many. allocated_us: the allocation's StartTime, unix microseconds."""

    def __init__(self, config: PoolConfig, node: str, gpus: int, slurm_job: int, allocated_us: int):
        self._config = config
        self._node = node
        self._gpus = tuple(f"{node}:{i}" for i in range(gpus))
        self._layout = Layout(config.state_dir)
        self._layout.make()
        self._names = real.names(os.environ, gpus) if config.device.kind == "cuda" else ("",) * gpus
        self._memory = NodeMemory(config, node, gpus)
        self._birth = secrets.token_hex(6)
        self._children: dict[tuple[str, int], Child] = {}
        self._killed: set[int] = set()
        self._bearing: dict[str, int] = {}  # ranks of a gang that are being born
        self._early: dict[int, int] = {}  # ends of ranks that were told before their births
        self._changed = asyncio.Event()  # set whenever a child was born or has ended
        self._replies = Replies()
        self._filling: dict[str, tuple[str, int]] = {}
        self._lifeline_read, self._lifeline_write = os.pipe()
        self._intervals = IntervalLog(self._layout.agents, node, slurm_job, allocated_us, self._gpus)
        self._stop = asyncio.Event()
        self._code = 0
        self._tasks: set[asyncio.Task] = set()
        harden()

    async def run(self) -> int:
        """Serve until told to stop. The last act is to close the interval. Exit code 75: another should take over."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._stop.set)
        # scancel sends SIGTERM to everybody at once: the head drains first and tells us when it has.
        loop.add_signal_handler(signal.SIGTERM, lambda: loop.call_later(_TERM_S, self._stop.set))
        self._intervals.extend(_now_us(), final=False)
        models = [model.path for model in self._config.models.values() if model.engine != "noop"]
        self._nursery = Nursery(models, self._died, self._nursery_gone, self._config.device.kind)
        self._link = HeadLink(self._layout.control, self._layout.keys, f"agent:{self._node}", self._hello, self._take)
        linking = asyncio.create_task(self._link.run())
        try:
            await self._watch()
        finally:
            await self._end_children()
            linking.cancel()
            await asyncio.gather(linking, return_exceptions=True)
            await asyncio.to_thread(self._memory.close)
        self._intervals.extend(_now_us(), final=True)
        return self._code

    async def _watch(self) -> None:
        while not self._stop.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), _INTERVAL_S)
            self._intervals.extend(_now_us(), final=False)

    def _hello(self) -> m.AgentHello:
        slabs, spilled = self._memory.names()
        return m.AgentHello(
            node=self._node,
            gpus=self._gpus,
            birth=self._birth,
            children=tuple((gang, rank, child.build) for (gang, rank), child in self._children.items()),
            slabs=slabs,
            spilled=spilled,
        )

    def _take(self, message: m.Message) -> None:
        match message:
            case m.Shutdown():
                self._stop.set()
            case m.Allocate() | m.Free() | m.Spill() | m.Refill() | m.Fill() | m.Spawn() | m.Kill():
                new, reply = self._replies.take(message.id)
                if new:
                    task = asyncio.create_task(self._obey(message))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
                elif reply is not None:
                    self._link.send(reply)

    async def _obey(self, message: m.Message) -> None:
        try:
            value = await self._do(message)
            reply = m.Reply(id=message.id, ok=True, value=value)
        except (PlexrlError, OSError) as error:
            category = next((word for kind, word in _CATEGORIES.items() if isinstance(error, kind)), "server")
            reply = m.Reply(id=message.id, ok=False, error=str(error), category=category)
        self._link.send(self._replies.give(reply))

    async def _do(self, message: m.Message) -> dict[str, object]:
        match message:
            case m.Allocate() | m.Free() | m.Spill() | m.Refill() | m.Fill():
                return await self._memory.do(message)
            case m.Spawn():
                return {"pid": await self._spawn(message)}
            case m.Kill():
                await self._kill(message.gang)
                return {}
        raise PlexrlError(f"an agent does not do {type(message).__name__}")

    async def _kill(self, gang: str) -> None:
        """End the ranks of a gang, of whatever build, and wait until they are gone."""
        while True:
            self._changed.clear()
            left = [child.pid for (name, _), child in self._children.items() if name == gang]
            if not left and gang not in self._bearing:
                return
            for pid in left:
                self._killed.add(pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            await self._changed.wait()

    async def _spawn(self, order: m.Spawn) -> int:
        if any(name == order.gang and child.build != order.build for (name, _), child in self._children.items()):
            await self._kill(order.gang)
        key = (order.gang, order.rank)
        seat = self._memory.take_seat(order.gpu)
        self._bearing[order.gang] = self._bearing.get(order.gang, 0) + 1
        try:
            pid = await self._start(order, seat, *await self._slabs(order, key))
            self._children[key] = Child(pid, order.build, order.gpu, seat)
            if pid in self._early:
                self._died(pid, self._early.pop(pid))
        except BaseException:
            self._memory.leave_seat(order.gpu, seat)
            self._filling = {name: filler for name, filler in self._filling.items() if filler != key}
            raise
        finally:
            self._bearing[order.gang] -= 1
            if not self._bearing[order.gang]:
                del self._bearing[order.gang]
            self._changed.set()
        return pid

    async def _slabs(self, order: m.Spawn, key: tuple[str, int]) -> tuple[dict, Slab | None, bool]:
        """A new rank's engine spec with its slabs, the base's ready mark, and whether it waits for that."""
        engine = dict(order.engine)
        park_bytes = engine.pop("park_bytes", 0)
        if park_bytes:
            # Before the base: what does not fit must not leave a base that nobody fills.
            engine["park"] = await self._memory.alloc(f"park:{order.gang}", park_bytes, order.owner, order.gpu)
        if order.base is None:
            return engine, None, False
        name, size = order.base
        ready = await self._memory.alloc(f"{name}:ready", 1, SHARED)
        engine["base"] = await self._memory.alloc(name, size, SHARED)
        engine["base_fill"] = name not in self._filling
        filler, _ = self._filling.setdefault(name, key)
        # Ranks of the filler's own gang meet it while they build; those of other gangs wait for its mark.
        return engine, ready, filler != order.gang

    async def _start(self, order: m.Spawn, seat: int, engine: dict, ready: Slab | None, waits: bool) -> int:
        fds = (self._memory.arena_fd, self._lifeline_read, *self._memory.device_fds(order.gpu))
        arena_fd, lifeline_fd, gate_fd, *device_fd = rank_fds(len(fds))
        settings = {
            "gang": order.gang,
            "build": order.build,
            "node": self._node,
            "first_on_node": order.nodes.index(self._node) == order.rank,
            "engine": engine,
            "ready": ready,
            "wait_for_base": waits,
            "gpu": self._names[order.gpu],
            "device_fd": next(iter(device_fd), -1),
            "arena_fd": arena_fd,
            "arena_bytes": self._config.host.bytes,
            "lifeline_fd": lifeline_fd,
            "gate_fd": gate_fd,
            "gate_seat": seat,
            "control": str(self._layout.control),
            "keys": str(self._layout.keys),
            "paranoid": self._config.scheduler.paranoid,
        }
        with self._log_path(order.gang, order.rank).open("ab") as output:
            return await self._nursery.bear(
                msgspec.msgpack.encode(settings), self._memory.core(order.gpu), output.fileno(), fds
            )

    def _died(self, pid: int, code: int) -> None:
        key = next((key for key, child in self._children.items() if child.pid == pid), None)
        if key is None:
            if self._bearing:
                self._early[pid] = code
            return
        child = self._children.pop(key)
        self._memory.leave_seat(child.gpu, child.seat)
        self._changed.set()
        for name, filler in list(self._filling.items()):
            # A rank that died while filling leaves the base half written: the next one fills it again.
            if filler == key and not self._memory.filled(f"{name}:ready"):
                del self._filling[name]
        if pid in self._killed:
            self._killed.discard(pid)
            return
        tail = self._log_path(*key).read_bytes()[-_TAIL_BYTES:].decode(errors="replace")
        self._link.send(m.ChildEnded(gang=key[0], rank=key[1], build=child.build, code=code, tail=tail))

    def _nursery_gone(self) -> None:
        """Nobody tells us any more how our children fare: end them, and let another agent take over."""
        log.critical("the nursery ended")
        for child in self._children.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)
        self._children.clear()
        self._code = 75
        self._stop.set()

    def _log_path(self, gang: str, rank: int) -> Path:
        return self._layout.logs / f"{gang.replace('/', '.')}.{rank}.log"

    async def _end_children(self) -> None:
        """Closing the lifeline ends them; whoever is left after the grace is killed."""
        os.close(self._lifeline_write)
        deadline = time.monotonic() + _GRACE_S
        while self._children and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        for gang in {name for name, _ in self._children}:
            await self._kill(gang)
        self._nursery.close()


def _now_us() -> int:
    return time.time_ns() // 1000
