"""The engine processes of gangs: started by the nodes' agents, known by their leaders, ended whole."""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable, Collection

from plexrl.pool import messages as m
from plexrl.pool.book import Group, Version
from plexrl.pool.core import Core
from plexrl.pool.links import OrderFailed
from plexrl.pool.needs import beside_extent, group_sizes
from plexrl.pool.slabs import Slabs
from plexrl.types import Gang, PlexrlError, Role, Unavailable, records

log = logging.getLogger("plexrl.head")
_BUILD_S = 600.0
_KILL_S = 30.0
_EXIT_S = 10.0


def node_of(gpu: str) -> str:
    """The node of a GPU name."""
    return gpu.rpartition(":")[0]


def version_left(core: Core, version: Version, nodes: Collection[str]) -> None:
    """These nodes have a version no more."""
    left, name = tuple(node for node in version.nodes if node not in nodes), version.published.version
    if left and left != version.nodes:
        core.commit(records.VersionKept(now_us=core.now_us(), version=name, nodes=left))
    elif left != version.nodes:
        core.commit(records.VersionDropped(now_us=core.now_us(), version=name))


def nodes_of(gang: Gang) -> tuple[str, ...]:
    """The nodes that a gang is on, each once, in the order of its ranks."""
    return tuple(dict.fromkeys(map(node_of, gang.gpus)))


class Gangs:
    """hosts: what the leaders that are there said at their hello. attached: versions that each gang knows.

    on_kept(group, bytes): called with what a process of it was seen to keep of its device.
    """

    on_kept: Callable[[str, int], None] = staticmethod(lambda group, size: None)

    def __init__(self, core: Core, slabs: Slabs):
        self._core = core
        self._slabs = slabs
        self._built: dict[str, asyncio.Future] = {}
        self._builds: dict[str, str] = {}  # gang -> which life of it is ours
        self._exits: dict[str, asyncio.Queue[str]] = {}  # gangs that were told to end: what their ranks said
        self.hosts: dict[str, m.HostHello] = {}
        self.attached: dict[str, set[str]] = {}

    def find(self, gang_id: str) -> tuple[Group, Gang]:
        """A gang and its group. Raises KeyError."""
        group = self._core.book.groups[gang_id.rpartition("/")[0]]
        return group, next(g for g in group.placed.placement.gangs if g.id == gang_id)

    async def order(self, gang_id: str, verb: str, args: dict[str, object], timeout: float = 300.0) -> dict:
        """Have a gang's leader do something; its reply's value. Raises OrderFailed, Unavailable."""
        return await self._core.links.order(f"gang:{gang_id}", m.Order(id=0, verb=verb, args=args), timeout)

    async def let_go(self, gang_id: str, verb: str, args: dict[str, object]) -> bool:
        """Have an engine host let go of a slab. False when it may still use it: then it must not be freed."""
        if gang_id not in self.hosts:
            return True
        try:
            await self.order(gang_id, verb, args)
        except OrderFailed as error:
            log.warning("%s of %s: %s", verb, gang_id, error)
        except Unavailable as error:
            log.error("%s of %s: %s; unless it has ended, the host memory stays taken", verb, gang_id, error)
            return gang_id not in self.hosts
        return True

    # -- building ------------------------------------------------------------------------------------------------------

    async def build(self, gang_id: str) -> None:
        """Start a gang's ranks and wait until its leader says hello. Raises PlexrlError with what they said."""
        core = self._core
        group, gang = self.find(gang_id)
        if group.ended:
            raise Unavailable(f"group {group.placed.spec.group} has ended: {group.ended}")
        rendezvous = core.layout.run / f"{gang_id.replace('/', '.')}.{core.now_us()}.rendezvous"
        future = self._built[gang_id] = asyncio.get_running_loop().create_future()
        build = self._builds[gang_id] = secrets.token_hex(6)
        self.attached[gang_id] = set()
        try:
            for rank in range(len(gang.gpus)):
                spawn = self._spawn(group.placed, gang, rank, build, str(rendezvous))
                await self._slabs.order(node_of(gang.gpus[rank]), spawn)
            async with asyncio.timeout(_BUILD_S):
                await future
        except TimeoutError:
            raise Unavailable(f"the engine of {gang_id} was not ready within {_BUILD_S:.0f} s") from None
        except PlexrlError:
            if future.done():
                future.exception()  # one reason is enough
            raise
        finally:
            self._built.pop(gang_id, None)
            for path in (rendezvous, rendezvous.with_name(f"{rendezvous.name}.steps")):
                path.unlink(missing_ok=True)

    def _spawn(self, placed: records.GroupPlaced, gang: Gang, rank: int, build: str, rendezvous: str) -> m.Spawn:
        core = self._core
        config = core.config.models[placed.base]
        sizes = group_sizes(config, placed.spec.role, placed.kind)
        beside = beside_extent(core.config.device.kind, sizes, placed.spec.residual_bytes)
        gpu, extent = gang.gpus[rank], gang.extents[rank]
        model = core.book.models.get(placed.model)
        base = ("base", placed.base, config.dtype, sizes.base_form)
        return m.Spawn(
            id=0,
            gang=gang.id,
            rank=rank,
            build=build,
            gpu=int(gpu.rpartition(":")[2]),
            engine={
                "engine": config.engine_of(placed.spec.role),
                "role": placed.spec.role,
                "kind": placed.kind,
                "model_dir": config.path,
                "dtype": config.dtype,
                "rank": rank,
                "world": len(gang.gpus),
                "rendezvous": rendezvous if len(gang.gpus) > 1 else "",
                "interface": core.config.interface,
                "extent_offset": extent.offset,
                "extent_size": extent.size - beside,
                "device_bytes": core.config.device.bytes,
                "lora_slots": config.lora.slots,
                "lora_max_rank": config.lora.max_rank,
                "kv_bytes": config.sample.kv_bytes,
                "max_batch": config.sample.max_batch,
                "max_context": config.max_context,
                "micro_batch_tokens": config.micro_batch_tokens,
                "zero_stage": config.train.zero_stage or 0,
                "cache_dir": core.config.cache,
                "park_bytes": sizes.park_bytes if placed.spec.role is Role.SAMPLE else 0,
            },
            nodes=tuple(node_of(each) for each in gang.gpus),
            base=(":".join(filter(None, base)), sizes.base_bytes) if sizes.base_bytes else None,
            owner=model.created.uid if model else -1,
        )

    def hello(self, hello: m.HostHello) -> bool:
        """A gang's leader is there. False when it is none of ours: an earlier life, or of a group that has ended."""
        group = self._core.book.groups.get(hello.gang.rpartition("/")[0])
        if group is None or group.ended or self._builds.setdefault(hello.gang, hello.build) != hello.build:
            return False
        self.hosts[hello.gang] = hello
        self.keeps(hello.gang, hello.kept)
        self.attached.setdefault(hello.gang, set()).update(hello.versions)
        future = self._built.get(hello.gang)
        if future is not None and not future.done():
            future.set_result(None)
        return True

    def keeps(self, gang_id: str, size: int) -> None:
        """A process of the gang keeps so many bytes of its device, whoever is on it."""
        if size:
            self.on_kept(gang_id.rpartition("/")[0], size)

    def ours(self, gang_id: str, build: str) -> bool:
        """Whether this is the life of the gang that counts."""
        return self._builds.get(gang_id) == build

    # -- ending --------------------------------------------------------------------------------------------------------

    def rank_ended(self, gang_id: str, build: str, why: str) -> bool:
        """A rank of the gang is gone. True when that makes a gang that was built a lost one."""
        if gang_id in self._exits:
            self._exits[gang_id].put_nowait(why)
        if self._builds.get(gang_id) != build:
            return False
        future = self._built.get(gang_id)
        if future is None:
            return self.disown(gang_id)
        if not future.done():
            future.set_exception(PlexrlError(f"a rank of {gang_id} ended while it was built: {why}"))
        self._core.links.forget(f"gang:{gang_id}")
        return False

    def missing(self, node: str, children: set[tuple[str, int, str]]) -> dict[str, str]:
        """Gangs of ours that should have a rank on the node which is not among these children, with their build."""
        return {
            gang_id: build
            for gang_id, build in self._builds.items()
            if gang_id not in self._built
            for rank, gpu in enumerate(self.find(gang_id)[1].gpus)
            if node_of(gpu) == node and (gang_id, rank, build) not in children
        }

    def node_lost(self, node: str) -> list[str]:
        """The node's agent is another one: its ranks and memory are gone. Gangs that are lost by that."""
        for name, future in self._built.items():
            if node in nodes_of(self.find(name)[1]) and not future.done():
                future.set_exception(Unavailable(f"the agent of {node} ended while {name} was built"))
        for version in self._core.book.versions.values():
            version_left(self._core, version, {node})
        groups = self._core.book.groups.values()
        gangs = (gang for group in groups if not group.ended for gang in group.placed.placement.gangs)
        asleep = [gang.id for gang in gangs if self.unbuilt(gang.id) and node in nodes_of(gang)]
        return [*self.missing(node, set()), *asleep]

    def unbuilt(self, gang_id: str) -> bool:
        """Whether its engine was ended while it slept."""
        return gang_id not in self._builds and gang_id in self.find(gang_id)[0].unbuilt

    def disown(self, gang_id: str) -> bool:
        """Whatever is left of the gang is not ours any more. False when it was not ours."""
        self.hosts.pop(gang_id, None)
        self.attached.pop(gang_id, None)
        self._core.links.forget(f"gang:{gang_id}")
        return self._builds.pop(gang_id, None) is not None

    async def end(self, gang_id: str) -> None:
        """End every rank of a gang in order, and wait until all are gone; whoever takes long is killed."""
        _, gang = self.find(gang_id)
        said = self._exits[gang_id] = asyncio.Queue()
        self._core.links.send(f"gang:{gang_id}", m.Exit())
        self.disown(gang_id)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_EXIT_S):
                    for _ in gang.gpus:
                        await said.get()
        finally:
            del self._exits[gang_id]
        await self.kill(gang_id)

    async def kill(self, gang_id: str) -> None:
        """End every rank of a gang and wait until all are gone: then nobody writes to its memory any more."""
        self.disown(gang_id)
        _, gang = self.find(gang_id)
        await asyncio.gather(*(self.kill_on(node, gang_id) for node in nodes_of(gang)))

    async def kill_on(self, node: str, gang_id: str) -> None:
        """The same on one node. An agent that has gone has taken its ranks with it."""
        try:
            await self._core.links.order(f"agent:{node}", m.Kill(id=0, gang=gang_id), _KILL_S)
        except Unavailable as error:
            log.warning("the ranks of %s on %s were not ended by its agent: %s", gang_id, node, error)
