"""A node's memory as its agent owns it: pretend GPUs with their gates, the host arena, the NVMe tier below it."""

import asyncio
import logging
import os
from weakref import WeakValueDictionary

import psutil

from plexrl.config import PoolConfig
from plexrl.memory import numa, pages, room
from plexrl.memory.arena import Arena
from plexrl.memory.gate import GATE_BYTES, SEATS, Gate
from plexrl.memory.nvme import Tier
from plexrl.memory.pages import create_memfd
from plexrl.pool import messages as m
from plexrl.pool import versionfile
from plexrl.types import BadInput, Slab, Unavailable

log = logging.getLogger("plexrl.agent")
SHARED = -1

SlabOrder = m.Allocate | m.Free | m.Spill | m.Refill | m.Fill


class NodeMemory:
    """arena, arena_fd: the host arena and its file."""

    def __init__(self, config: PoolConfig, node: str, gpus: int) -> None:
        """Raises DoesNotFit, with figures, when the node has not the memory that the pool may come to take of it."""
        reserved = pages.reserved_huge_bytes(config.host.bytes)
        _check(config, node, gpus, reserved)
        self._config = config
        self._node = node
        pretend = range(gpus) if config.device.kind == "cpu" else ()
        self._devices = [create_memfd(f"gpu{i}", config.device.bytes) for i in pretend]
        self._gate_fds = [create_memfd(f"gate{i}", GATE_BYTES) for i in range(gpus)]
        self._gates = [Gate(fd) for fd in self._gate_fds]
        self._seats: set[tuple[int, int]] = set()
        self.arena_fd = create_memfd("arena", config.host.bytes, reserved)
        # Without swap there is nothing to lock slabs against.
        self.arena = Arena(self.arena_fd, config.host.bytes, numa.nodes(), lock=psutil.swap_memory().total > 0)
        self._tier = Tier(self.arena, config.nvme.path, config.nvme.bytes) if config.nvme else None
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        log.info("host memory of %s: %s", node, self.arena.told())

    def close(self) -> None:
        """Remove the NVMe tier's files; the memory goes with the process."""
        if self._tier is not None:
            self._tier.close()

    # -- slabs ---------------------------------------------------------------------------------------------------------

    def names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The slabs in the arena, and those that are on NVMe."""
        spilled = self._tier.names() if self._tier else ()
        return tuple(slab.name for slab in self.arena.slabs() if slab.name not in spilled), spilled

    async def alloc(self, name: str, size: int, owner: int, gpu: int = -1) -> Slab:
        """A slab next to a GPU (-1: anywhere). Raises what Arena.alloc raises."""
        return (await self.do(m.Allocate(id=0, name=name, size=size, owner=owner, gpu=gpu)))["slab"]

    async def do(self, order: SlabOrder) -> dict[str, object]:
        """Carry out an order about one slab; its value. Raises PlexrlError (DoesNotFit, Damaged, ...), OSError."""
        # Gigabytes take a while: in a thread. One thing at a time with one slab.
        async with self._locks.setdefault(order.name, asyncio.Lock()):
            return await asyncio.to_thread(self._do, order)

    def filled(self, ready: str) -> bool:
        """Whether whoever fills a base has set its ready mark, the one byte of the slab of this name."""
        slab = self.arena.get(ready)
        return slab is not None and os.pread(self.arena_fd, 1, slab.offset) != b"\0"

    def _do(self, order: SlabOrder) -> dict[str, object]:
        name, tier = order.name, self._tier
        if isinstance(order, m.Free):
            self.arena.free(name)
            if tier is not None:
                tier.free(name)
            return {}
        if isinstance(order, m.Allocate):
            if tier is not None and name in tier.names():
                raise BadInput(f"slab {name!r} is on NVMe", "Refill it")
            return {"slab": self.arena.alloc(name, order.size, order.owner, self._numa(order.gpu))}
        if isinstance(order, m.Fill):
            return {"slab": versionfile.fill(self.arena, order, self._numa(order.gpu))}
        if tier is None:
            raise BadInput(f"{self._node} has no tier below its host memory", "Add section nvme to plexrl.yaml")
        if isinstance(order, m.Spill):
            moved, seconds = tier.spill(name)
            return {"bytes": moved, "seconds": seconds}
        slab, moved, seconds = tier.refill(name, self._numa(order.gpu))
        return {"slab": slab, "bytes": moved, "seconds": seconds}

    # -- GPUs ----------------------------------------------------------------------------------------------------------

    def core(self, gpu: int) -> int | None:
        """The core that a GPU's ranks run on; None: any."""
        core = self._config.device.core(self._node, gpu)
        return None if core is None else core % (os.cpu_count() or 1)

    def device_fds(self, gpu: int) -> tuple[int, ...]:
        """A GPU's gate, and the memory of a pretend one."""
        return self._gate_fds[gpu], *self._devices[gpu : gpu + 1]

    def take_seat(self, gpu: int) -> int:
        """A free seat at a GPU's gate for a new rank. Raises Unavailable: no memory that anybody gives helps."""
        seat = next((seat for seat in range(SEATS) if (gpu, seat) not in self._seats), None)
        if seat is None:
            raise Unavailable(
                f"the gate of GPU {gpu} of {self._node} has {SEATS} seats, and as many engine hosts are there already",
                "End models that nobody uses, or give the pool more GPUs: it is not memory that is short",
            )
        self._seats.add((gpu, seat))
        return seat

    def leave_seat(self, gpu: int, seat: int) -> None:
        """The rank that had it is gone: what it held of the device is nobody's, and who waits for it goes on."""
        self._gates[gpu].clear(seat)
        self._seats.discard((gpu, seat))

    def _numa(self, gpu: int) -> int | None:
        core = None if gpu < 0 else self.core(gpu)
        return None if core is None else numa.node_of_core(core)


def _check(config: PoolConfig, node: str, gpus: int, reserved: bool) -> None:
    # Huge pages that were set aside are not among the memory that is free.
    arena = 0 if reserved else config.host.bytes
    devices = gpus * config.device.bytes if config.device.kind == "cpu" else 0
    room.require(
        devices + arena,
        f"node {node} with {gpus} GPUs of device.bytes {config.device.bytes} and host.bytes {config.host.bytes}",
        "Lower host.bytes or device.bytes, give the pool's job more memory (--mem), or run fewer pools on the node",
    )
