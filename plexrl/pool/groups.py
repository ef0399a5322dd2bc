"""Worker groups: sizing, placing, building; deployments and versions on them; their host memory."""

import asyncio
import logging
import math
import secrets
from collections.abc import Callable, Iterable
from typing import NamedTuple

from msgspec import structs

from plexrl.config.schema import Model as ModelConfig
from plexrl.engines import noop, sizing
from plexrl.pool import messages as m
from plexrl.pool.book import Group, Model, Version
from plexrl.pool.core import Core
from plexrl.pool.links import OrderFailed
from plexrl.pool.profiles import Profiles
from plexrl.scheduler import Action
from plexrl.types import (
    BadInput,
    DoesNotFit,
    Gang,
    GroupSpec,
    JobClass,
    Placement,
    PlexrlError,
    Role,
    Slab,
    Unavailable,
    records,
)

log = logging.getLogger("plexrl.head")
_BUILD_S = 600.0
_KILL_S = 30.0


def node_of(gpu: str) -> str:
    """The node of a GPU name."""
    return gpu.rpartition(":")[0]


class Asked(NamedTuple):
    """A group that is to be placed. model: the owning deployment of a full-parameter one, else ""."""

    spec: GroupSpec
    base: str
    kind: str
    model: str


class Groups:
    """The worker groups of a pool and what is on them. asked: those that wait for a place, by id."""

    perform: Callable[[Iterable[Action]], None]
    """Carries out the scheduler's actions; set by who can."""

    def __init__(self, core: Core, profiles: Profiles):
        self._core = core
        self._profiles = profiles
        self._built: dict[str, asyncio.Future] = {}
        self._builds: dict[str, str] = {}  # gang -> which life of it is ours
        self.asked: dict[str, Asked] = {}
        self.hosts: dict[str, m.HostHello] = {}
        self.attached: dict[str, set[str]] = {}

    # -- finding and placing -------------------------------------------------------------------------------------------

    def find(self, base: str, role: Role, kind: str, model: str, owner: str) -> Group | None:
        """The live group for this use. LoRA groups of a base are shared by all jobs, unless jobs are isolated."""
        isolated = self._core.config.scheduler.placement == "isolated"
        for group in self._core.book.groups.values():
            placed = group.placed
            if (
                not group.ended
                and (placed.base, placed.spec.role, placed.kind, placed.model) == (base, role, kind, model)
                and (kind == "full" or not isolated or placed.spec.owner == owner)
            ):
                return group
        return None

    def ensure(self, base: str, role: Role, kind: str, model: str, owner: str) -> str:
        """The id of the group for this use, placed now if there is none yet; the scheduler then wants a tick.

        model: the owning deployment of a full-parameter group, else "". Where a trainer was let in, its samplers are
        placed if their bytes fit, however loaded the GPUs are. Raises DoesNotFit, BadInput.
        """
        found = self.find(base, role, kind, model, owner)
        if found is not None:
            return found.placed.spec.group
        core = self._core
        spec = self._spec(base, role, kind, owner, self._name(base, role, kind))
        try:
            placement, actions = core.scheduler.place(core.now_us(), spec), []
        except DoesNotFit:
            if role is Role.TRAIN or self.find(base, Role.TRAIN, kind, model, owner) is None:
                raise
            placement, actions = self._squeeze(spec)
        self._keep(Asked(spec, base, kind, model), placement)
        self.perform(actions)
        return spec.group

    def ask(self, base: str, kind: str, model: str, owner: str, group: str = "") -> str:
        """A trainer that finds no place now waits for one; its id. `placed` ends the wait, `withdraw` gives it up.

        group: its id, when a new head asks again. Raises DoesNotFit when the empty pool would be too small.
        """
        core = self._core
        group = group or self._name(base, Role.TRAIN, kind)
        spec = self._spec(base, Role.TRAIN, kind, owner, group)
        actions = core.scheduler.request(core.now_us(), owner, [spec])
        self.asked[group] = Asked(spec, base, kind, model)
        self.perform(actions)
        return group

    def placed(self, placements: Iterable[Placement]) -> None:
        """Groups that were asked for have their places."""
        for placement in placements:
            self._keep(self.asked.pop(placement.group), placement)

    def withdraw(self, group: str) -> None:
        """Nobody wants the group any more for which a place was asked."""
        core = self._core
        gone = self.asked.pop(group, None)
        if gone is None:
            return
        owner = gone.spec.owner
        self.perform(core.scheduler.withdraw(core.now_us(), owner))
        for asked in [asked for asked in self.asked.values() if asked.spec.owner == owner]:
            self.perform(core.scheduler.request(core.now_us(), owner, [asked.spec]))

    def _keep(self, asked: Asked, placement: Placement) -> None:
        self._core.commit(
            records.GroupPlaced(
                now_us=self._core.now_us(),
                spec=asked.spec,
                placement=placement,
                base=asked.base,
                kind=asked.kind,
                model=asked.model,
            )
        )

    def _squeeze(self, spec: GroupSpec) -> tuple[Placement, list[Action]]:
        """Place a group whatever stretch that predicts. Raises DoesNotFit for its bytes."""
        core = self._core
        scheduler, now_us = core.scheduler, core.now_us()
        anyhow = structs.replace(scheduler.policy, max_stretch=dict.fromkeys(JobClass, math.inf))
        placement = scheduler.floor.choose(spec, anyhow, scheduler.tenant(spec.owner))
        # The scheduler takes up a group that has its place as one whose engines are gone, and builds them.
        scheduler.floor.vacate(spec.group)
        gangs = [gang.id for gang in placement.gangs]
        actions = scheduler.restore(now_us, placement, spec, resident=False, dead=gangs)
        for gang in gangs:
            actions += scheduler.rebuild(now_us, gang)
        return placement, actions

    def _name(self, base: str, role: Role, kind: str) -> str:
        book = self._core.book
        known = {*book.groups, *self.asked, *(model.created.group for model in book.models.values())}
        return f"{base.replace('/', '_')}.{kind}.{role}.{len(known) + 1}"

    def _spec(self, base: str, role: Role, kind: str, owner: str, group: str) -> GroupSpec:
        config = self._core.config.models[base]
        sizes = self._sizes(config, role, kind)
        return GroupSpec(
            group=group,
            role=role,
            owner=owner,
            gang_size=config.train.gpus if role is Role.TRAIN else 1,
            replicas=1 if role is Role.TRAIN else config.sample.replicas,
            device_bytes=sizes.device_bytes,
            host_bytes=self._host_bytes(config, role, kind),
            duty=self._profiles.duty(self._profiles.key(base, role, kind, owner)),
        )

    def gangs(self, group: str) -> tuple[Gang, ...]:
        """The gangs of a group."""
        return self._core.book.groups[group].placed.placement.gangs

    def gang(self, gang_id: str) -> tuple[Group, Gang]:
        """A gang and its group. Raises KeyError."""
        group = self._core.book.groups[gang_id.rpartition("/")[0]]
        return group, next(g for g in group.placed.placement.gangs if g.id == gang_id)

    def _sizes(self, config: ModelConfig, role: Role, kind: str) -> sizing.Sizes:
        if config.engine == "noop":
            return noop.SIZES
        return sizing.sizes(
            config.path,
            config.dtype,
            role,
            kind,
            config.lora.slots,
            config.lora.max_rank,
            config.sample.kv_bytes,
            config.micro_batch_tokens,
        )

    def _host_bytes(self, config: ModelConfig, role: Role, kind: str) -> int:
        """What the group's arena must have for it alone; adapters and versions come with slabs of their own."""
        if role is Role.SAMPLE:
            return self._sizes(config, role, kind).park_bytes
        if kind == "lora":
            return 0
        return self._state_bytes(config, kind, None, True, True, True)

    def _state_bytes(
        self, config: ModelConfig, kind: str, rank: int | None, attn: bool, mlp: bool, unembed: bool
    ) -> int:
        """A deployment's host slab."""
        if config.engine == "noop":
            return noop.BYTES
        return sizing.state_bytes(config.path, config.dtype, kind, rank, attn, mlp, unembed)

    # -- building ------------------------------------------------------------------------------------------------------

    async def build(self, gang_id: str) -> None:
        """Start a gang's ranks and wait until its leader says hello. Raises PlexrlError with what they said."""
        core = self._core
        group, gang = self.gang(gang_id)
        if group.ended:
            raise Unavailable(f"group {group.placed.spec.group} has ended: {group.ended}")
        placed = group.placed
        config = core.config.models[placed.base]
        sizes = self._sizes(config, placed.spec.role, placed.kind)
        nodes = tuple(node_of(gpu) for gpu in gang.gpus)
        rendezvous = core.layout.run / f"{gang_id.replace('/', '.')}.{core.now_us()}.rendezvous"
        owner = self._owner(group)
        future = self._built[gang_id] = asyncio.get_running_loop().create_future()
        build = self._builds[gang_id] = secrets.token_hex(6)
        self.attached[gang_id] = set()
        try:
            for rank, (gpu, extent) in enumerate(zip(gang.gpus, gang.extents, strict=True)):
                engine = {
                    "engine": config.engine,
                    "role": placed.spec.role,
                    "kind": placed.kind,
                    "model_dir": config.path,
                    "dtype": config.dtype,
                    "rank": rank,
                    "world": len(gang.gpus),
                    "rendezvous": str(rendezvous) if len(gang.gpus) > 1 else "",
                    "interface": core.config.interface,
                    "extent_offset": extent.offset,
                    "extent_size": extent.size,
                    "device_bytes": core.config.device.bytes,
                    "lora_slots": config.lora.slots,
                    "lora_max_rank": config.lora.max_rank,
                    "kv_bytes": config.sample.kv_bytes,
                    "max_batch": config.sample.max_batch,
                    "max_context": config.max_context,
                    "micro_batch_tokens": config.micro_batch_tokens,
                    "park_bytes": sizes.park_bytes if placed.spec.role is Role.SAMPLE else 0,
                }
                await core.links.order(
                    f"agent:{node_of(gpu)}",
                    m.Spawn(
                        id=0,
                        gang=gang_id,
                        rank=rank,
                        build=build,
                        gpu=int(gpu.rpartition(":")[2]),
                        engine=engine,
                        nodes=nodes,
                        base=(f"base:{placed.base}:{config.dtype}", sizes.base_bytes) if sizes.base_bytes else None,
                        owner=owner,
                    ),
                )
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

    def hello(self, hello: m.HostHello) -> bool:
        """A gang's leader is there. False when it is none of ours: an earlier life, or of a group that has ended."""
        group = self._core.book.groups.get(hello.gang.rpartition("/")[0])
        if group is None or group.ended or self._builds.setdefault(hello.gang, hello.build) != hello.build:
            return False
        self.hosts[hello.gang] = hello
        self.attached.setdefault(hello.gang, set()).update(hello.versions)
        future = self._built.get(hello.gang)
        if future is not None and not future.done():
            future.set_result(None)
        return True

    def rank_ended(self, gang_id: str, build: str, why: str) -> bool:
        """A rank of the gang is gone. True when that makes a gang that was built a lost one."""
        if self._builds.get(gang_id) != build:
            return False
        future = self._built.get(gang_id)
        if future is None:
            return self.disown(gang_id)
        if not future.done():
            future.set_exception(PlexrlError(f"a rank of {gang_id} ended while it was built: {why}"))
        self._core.links.forget(f"gang:{gang_id}")
        return False

    def ours(self, gang_id: str, build: str) -> bool:
        """Whether this is the life of the gang that counts."""
        return self._builds.get(gang_id) == build

    def missing(self, node: str, children: set[tuple[str, int, str]]) -> dict[str, str]:
        """Gangs of ours that should have a rank on the node which is not among these children, with their build."""
        return {
            gang_id: build
            for gang_id, build in self._builds.items()
            if gang_id not in self._built
            for rank, gpu in enumerate(self.gang(gang_id)[1].gpus)
            if node_of(gpu) == node and (gang_id, rank, build) not in children
        }

    def node_lost(self, node: str) -> list[str]:
        """The node's agent is another one: its ranks and memory are gone. Gangs that are lost by that."""
        for name, future in self._built.items():
            if node in {node_of(gpu) for gpu in self.gang(name)[1].gpus} and not future.done():
                future.set_exception(Unavailable(f"the agent of {node} ended while {name} was built"))
        for name, version in self._core.book.versions.items():
            if version.in_memory and node in version.published.nodes:
                self._core.commit(records.VersionDropped(now_us=self._core.now_us(), version=name))
        return list(self.missing(node, set()))

    def disown(self, gang_id: str) -> bool:
        """Whatever is left of the gang is not ours any more. False when it was not ours."""
        self.hosts.pop(gang_id, None)
        self.attached.pop(gang_id, None)
        self._core.links.forget(f"gang:{gang_id}")
        return self._builds.pop(gang_id, None) is not None

    async def kill(self, gang_id: str) -> None:
        """End every rank of a gang and wait until all are gone: then nobody writes to its memory any more."""
        self.disown(gang_id)
        _, gang = self.gang(gang_id)
        await asyncio.gather(*(self.kill_on(node, gang_id) for node in dict.fromkeys(map(node_of, gang.gpus))))

    async def kill_on(self, node: str, gang_id: str) -> None:
        """The same on one node. An agent that has gone has taken its ranks with it."""
        try:
            await self._core.links.order(f"agent:{node}", m.Kill(id=0, gang=gang_id), _KILL_S)
        except Unavailable as error:
            log.warning("the ranks of %s on %s were not ended by its agent: %s", gang_id, node, error)

    async def retire(self, group_id: str, reason: str) -> bool:
        """End a group: its processes, its place, its host memory. False when another has begun to.

        When it returns nothing of the group runs any more, and the scheduler may give its place away.
        """
        core = self._core
        group = core.book.groups[group_id]
        if group.ended:
            return False
        self._profiles.end(group_id)
        await core.commit(records.GroupEnded(now_us=core.now_us(), group=group_id, reason=reason))
        gangs = group.placed.placement.gangs
        await asyncio.gather(*(self.kill(gang.id) for gang in gangs))
        for gang in gangs:
            for node in dict.fromkeys(map(node_of, gang.gpus)):
                await self._free(node, f"park:{gang.id}")
        return True

    # -- deployments ---------------------------------------------------------------------------------------------------

    async def create(self, model: Model) -> None:
        """Make the deployment on every rank of its trainer. Raises PlexrlError; `close` takes back what is left."""
        core, created = self._core, model.created
        (gang,) = self.gangs(created.group)
        kind = core.book.groups[created.group].placed.kind
        config = core.config.models[created.base]
        size = self._state_bytes(config, kind, created.lora_rank, created.attn, created.mlp, created.unembed)
        slabs = [
            await self._allocate(node_of(gpu), f"state:{model.id}:{rank}", size, created.uid)
            for rank, gpu in enumerate(gang.gpus)
        ]
        await core.links.order(
            f"gang:{gang.id}",
            m.Order(
                id=0,
                verb="create",
                args={
                    "deployment": model.id,
                    "slabs": slabs,
                    "lora_rank": created.lora_rank,
                    "seed": created.seed,
                    "attn": created.attn,
                    "mlp": created.mlp,
                    "unembed": created.unembed,
                    "folder": created.init_path,
                    "optimizer": created.init_optimizer,
                },
            ),
        )

    async def close(self, model: Model) -> list[str]:
        """Take an ended deployment off its gang and free its memory; retire groups that served it alone: their ids."""
        core, created = self._core, model.created
        self.withdraw(created.group)
        group = core.book.groups.get(created.group)
        if group is None:
            return []
        for version in core.book.model_versions(model.id):
            await self.drop_version(version)
        full = group.placed.kind == "full"
        isolated = core.config.scheduler.placement == "isolated"
        retired = []
        if full or (isolated and not core.book.live_models(created.group)):
            sampler = self.find(created.base, Role.SAMPLE, group.placed.kind, model.id if full else "", created.job)
            for one in (group, sampler):
                if one is not None and await self.retire(one.placed.spec.group, f"{model.id} ended"):
                    retired.append(one.placed.spec.group)
        elif not group.ended:
            (gang,) = group.placed.placement.gangs
            if not await self._let_go(gang.id, "drop", {"deployment": model.id}):
                return retired
        await self._free_state(model)
        return retired

    async def _let_go(self, gang_id: str, verb: str, args: dict[str, object]) -> bool:
        """Have an engine host let go of a slab. False when it may still use it: then it must not be freed."""
        if gang_id not in self.hosts:
            return True
        try:
            await self._core.links.order(f"gang:{gang_id}", m.Order(id=0, verb=verb, args=args))
        except OrderFailed as error:
            log.warning("%s of %s: %s", verb, gang_id, error)
        except Unavailable as error:
            log.error("%s of %s: %s; unless it has ended, the host memory stays taken", verb, gang_id, error)
            return gang_id not in self.hosts
        return True

    def _owner(self, group: Group) -> int:
        model = self._core.book.models.get(group.placed.model)
        return model.created.uid if model else -1

    async def _free_state(self, model: Model) -> None:
        (gang,) = self.gangs(model.created.group)
        for rank, gpu in enumerate(gang.gpus):
            await self._free(node_of(gpu), f"state:{model.id}:{rank}")

    # -- versions ------------------------------------------------------------------------------------------------------

    def nodes(self, group: str) -> tuple[str, ...]:
        """The nodes of a trainer, where its versions are published."""
        (gang,) = self.gangs(group)
        return tuple(dict.fromkeys(node_of(gpu) for gpu in gang.gpus))

    def snapshot_bytes(self, model: Model) -> int:
        """Bytes of one version of a model."""
        created = model.created
        config = self._core.config.models[created.base]
        if config.engine == "noop":
            return noop.BYTES
        kind = self._core.book.groups[created.group].placed.kind
        return sizing.snapshot_bytes(
            config.path, config.dtype, kind, created.lora_rank, created.attn, created.mlp, created.unembed
        )

    async def snapshot(self, model: Model, version: str) -> dict[str, Slab]:
        """Slabs for a new version on every node of the trainer; older versions beyond the limit go first."""
        core = self._core
        keep = core.config.limits.versions_per_model - 1
        in_use = {core.book.entries[id].accepted.call.deployment for ids in core.book.open_calls.values() for id in ids}
        held = core.book.model_versions(model.id)
        for old in held[: max(0, len(held) - keep)]:
            if old.published.version not in in_use:
                await self.drop_version(old)
        size = self.snapshot_bytes(model)
        try:
            return {
                node: await self._allocate(node, f"version:{version}", size, model.created.uid)
                for node in self.nodes(model.created.group)
            }
        except PlexrlError:
            await self.discard(model.created.group, version)
            raise

    async def discard(self, group: str, version: str) -> None:
        """Give back the memory of a version that was not published after all."""
        for node in self.nodes(group):
            await self._free(node, f"version:{version}")

    async def attach(self, gang_id: str, version: Version) -> None:
        """Make a version known to a sampler's replica. Raises PlexrlError."""
        core, published = self._core, version.published
        known = self.attached.setdefault(gang_id, set())
        if published.version in known:
            return
        _, gang = self.gang(gang_id)
        node = node_of(gang.gpus[0])
        if node not in published.nodes or not version.in_memory:
            raise BadInput(
                f"version {published.version} is no longer in memory",
                f"Only the newest {core.config.limits.versions_per_model} of a model are kept; publish it again",
            )
        slab = await self._allocate(node, f"version:{published.version}", published.size, published.uid)
        await core.links.order(
            f"gang:{gang_id}",
            m.Order(
                id=0,
                verb="attach",
                args={
                    "version": published.version,
                    "slabs": {node: slab},
                    "lora_rank": published.lora_rank,
                    "attn": published.attn,
                    "mlp": published.mlp,
                    "unembed": published.unembed,
                },
            ),
        )
        known.add(published.version)

    async def drop_version(self, version: Version) -> None:
        """Let go of a version in memory. One with a folder stays on disk."""
        core, name = self._core, version.published.version
        if not version.in_memory:
            return
        core.commit(records.VersionDropped(now_us=core.now_us(), version=name))
        free = True
        for gang_id, known in list(self.attached.items()):
            if name in known:
                known.discard(name)
                free &= await self._let_go(gang_id, "detach", {"version": name})
        if free:
            for node in version.published.nodes:
                await self._free(node, f"version:{name}")

    async def tidy(self, node: str, slabs: tuple[str, ...]) -> None:
        """After a change of the head: free what only the last one knew how to free."""
        book = self._core.book
        for slab in slabs:
            kind, _, rest = slab.partition(":")
            match kind:
                case "state":
                    model = book.models.get(rest.rpartition(":")[0])
                    needed = model is not None and not model.ended
                case "version":
                    needed = rest in book.versions and book.versions[rest].in_memory
                case "park":
                    needed = rest in self.hosts
                case _:
                    continue
            if not needed:
                await self._free(node, slab)

    # -- host memory ---------------------------------------------------------------------------------------------------

    async def _allocate(self, node: str, name: str, size: int, owner: int) -> Slab:
        value = await self._core.links.order(f"agent:{node}", m.Allocate(id=0, name=name, size=size, owner=owner))
        return m.slab_of(value["slab"])

    async def _free(self, node: str, name: str) -> None:
        try:
            await self._core.links.order(f"agent:{node}", m.Free(id=0, name=name))
        except (OrderFailed, Unavailable) as error:
            log.warning("slab %s on %s was not freed: %s", name, node, error)
