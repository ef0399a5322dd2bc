"""The agent of one node: owns its memory, starts engine hosts, sees their ends. It carries no calls.

It outlives a head and ends when told, on SIGTERM, or when its allocation ends.
"""

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from plexrl.config import PoolConfig
from plexrl.memory.arena import Arena
from plexrl.memory.device import create_memfd
from plexrl.pool import messages as m
from plexrl.pool.harden import harden
from plexrl.pool.intervals import IntervalLog
from plexrl.pool.layout import Layout
from plexrl.pool.peer import HeadLink
from plexrl.types import PlexrlError, Slab
from plexrl.wire.keys import Keys

log = logging.getLogger("plexrl.agent")
_INTERVAL_S = 10.0
_GRACE_S = 10.0
_TAIL_BYTES = 2000
SHARED = -1


class Agent:
    """node: its name in GPU names. gpus: how many. allocated_us: the allocation's StartTime, unix microseconds."""

    def __init__(self, config: PoolConfig, node: str, gpus: int, slurm_job: int, allocated_us: int):
        self._config = config
        self._node = node
        self._gpus = tuple(f"{node}:{i}" for i in range(gpus))
        self._layout = Layout(config.state_dir)
        self._layout.make()
        self._devices = [create_memfd(f"gpu{i}", config.device.bytes) for i in range(gpus)]
        self._arena_fd = create_memfd("arena", config.host.bytes)
        self._arena = Arena(self._arena_fd, config.host.bytes)
        self._children: dict[tuple[str, int], asyncio.subprocess.Process] = {}
        self._filling: dict[str, tuple[str, int]] = {}
        self._lifeline_read, self._lifeline_write = os.pipe()
        self._intervals = IntervalLog(self._layout.agents, node, slurm_job, allocated_us, self._gpus)
        self._stop = asyncio.Event()
        self._tasks: set[asyncio.Task] = set()
        harden()

    async def run(self) -> None:
        """Serve until told to stop. The last act is to close the interval."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        self._intervals.extend(_now_us(), final=False)
        keys = await self._wait_for_keys()
        if keys is not None:
            link = HeadLink(self._layout.control, keys, f"agent:{self._node}", self._hello, self._take)
            self._link = link
            linking = asyncio.create_task(link.run())
            try:
                await self._watch()
            finally:
                await self._end_children()
                linking.cancel()
                await asyncio.gather(linking, return_exceptions=True)
        self._intervals.extend(_now_us(), final=True)

    async def _wait_for_keys(self) -> Keys | None:
        while not self._stop.is_set():
            if self._layout.control.exists():
                return Keys.load(self._layout.keys)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), 0.2)
        return None

    async def _watch(self) -> None:
        while not self._stop.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), _INTERVAL_S)
            self._intervals.extend(_now_us(), final=False)

    def _hello(self) -> m.AgentHello:
        return m.AgentHello(node=self._node, gpus=self._gpus, children=tuple(self._children))

    def _take(self, message: m.Message) -> None:
        match message:
            case m.Shutdown():
                self._stop.set()
            case m.Kill():
                for (gang, _), process in self._children.items():
                    if gang == message.gang:
                        process.kill()
            case m.Allocate() | m.Free() | m.Spawn():
                task = asyncio.create_task(self._obey(message))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _obey(self, message: m.Message) -> None:
        try:
            value = await self._do(message)
            reply = m.Reply(id=message.id, ok=True, value=value)
        except (PlexrlError, OSError) as error:
            reply = m.Reply(id=message.id, ok=False, error=str(error))
        self._link.send(reply)

    async def _do(self, message: m.Message) -> dict[str, object]:
        match message:
            case m.Allocate():
                # Allocating and clearing gigabytes takes a while: in a thread, the arena has its own lock.
                slab = await asyncio.to_thread(self._arena.alloc, message.name, message.size, message.owner)
                return {"slab": slab}
            case m.Free():
                await asyncio.to_thread(self._arena.free, message.name)
                return {}
            case m.Spawn():
                return {"pid": await self._spawn(message)}
        raise PlexrlError(f"an agent does not do {type(message).__name__}")

    async def _spawn(self, order: m.Spawn) -> int:
        key = (order.gang, order.rank)
        if key in self._children:
            return self._children[key].pid
        engine = dict(order.engine)
        ready = None
        if order.base is not None:
            name, size = order.base
            engine["base"] = await asyncio.to_thread(self._arena.alloc, name, size, SHARED)
            ready = self._arena.alloc(f"{name}:ready", 1, SHARED)
            engine["base_fill"] = name not in self._filling
            self._filling.setdefault(name, key)
        if engine.pop("park_bytes", 0):
            park = (f"park:{order.gang}", order.engine["park_bytes"], order.owner)
            engine["park"] = await asyncio.to_thread(self._arena.alloc, *park)
        process = await self._start(order, engine, ready)
        self._children[key] = process
        task = asyncio.create_task(self._reap(key, process))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return process.pid

    async def _start(self, order: m.Spawn, engine: dict, ready: Slab | None) -> asyncio.subprocess.Process:
        settings = {
            "gang": order.gang,
            "node": self._node,
            "first_on_node": order.nodes.index(self._node) == order.rank,
            "engine": engine,
            "ready": ready,
            "device_fd": self._devices[order.gpu],
            "arena_fd": self._arena_fd,
            "arena_bytes": self._config.host.bytes,
            "lifeline_fd": self._lifeline_read,
            "control": str(self._layout.control),
            "keys": str(self._layout.keys),
            "paranoid": self._config.scheduler.paranoid,
        }
        core = self._config.device.core(self._node, order.gpu) % (os.cpu_count() or 1)

        def prepare() -> None:
            os.nice(10)
            os.sched_setaffinity(0, {core})

        with self._log_path(order.gang, order.rank).open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-I",
                "-m",
                "plexrl.pool.enginehost",
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                pass_fds=(self._devices[order.gpu], self._arena_fd, self._lifeline_read),
                preexec_fn=prepare,
                env=_environment(),
                start_new_session=True,
            )
        process.stdin.write(msgspec.msgpack.encode(settings))
        await process.stdin.drain()
        process.stdin.close()
        return process

    async def _reap(self, key: tuple[str, int], process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        del self._children[key]
        for name, filler in list(self._filling.items()):
            # A rank that died while filling leaves the base half written: the next one fills it again.
            ready = next((s for s in self._arena.slabs() if s.name == f"{name}:ready"), None)
            if filler == key and ready is not None and os.pread(self._arena_fd, 1, ready.offset) == b"\0":
                del self._filling[name]
        with contextlib.suppress(FileNotFoundError):
            tail = self._log_path(*key).read_bytes()[-_TAIL_BYTES:].decode(errors="replace")
        self._link.send(m.ChildEnded(gang=key[0], rank=key[1], code=code, tail=tail))

    def _log_path(self, gang: str, rank: int) -> Path:
        return self._layout.logs / f"{gang.replace('/', '.')}.{rank}.log"

    async def _end_children(self) -> None:
        """Closing the lifeline ends them; whoever is left after the grace is killed."""
        os.close(self._lifeline_write)
        deadline = time.monotonic() + _GRACE_S
        while self._children and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        for process in self._children.values():
            process.kill()
        while self._children:
            await asyncio.sleep(0.05)


def _environment() -> dict[str, str]:
    keep = ("PATH", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "TMPDIR")
    return {k: os.environ[k] for k in keep if k in os.environ} | {
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": "",
    }


def _now_us() -> int:
    return time.time_ns() // 1000
