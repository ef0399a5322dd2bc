"""Worker groups: sizing, placing, building; deployments and versions on them; their host memory."""

import asyncio
import logging

from plexrl.config.schema import Model as ModelConfig
from plexrl.engines import noop, sizing
from plexrl.pool import messages as m
from plexrl.pool.book import Group, Model, Version
from plexrl.pool.core import Core
from plexrl.pool.links import OrderFailed
from plexrl.types import BadInput, Gang, GroupSpec, PlexrlError, Role, Slab, Unavailable, records

log = logging.getLogger("plexrl.head")
_BUILD_S = 600.0


def node_of(gpu: str) -> str:
    """The node of a GPU name."""
    return gpu.rpartition(":")[0]


class Groups:
    """The worker groups of a pool and what is on them."""

    def __init__(self, core: Core):
        self._core = core
        self._built: dict[str, asyncio.Future] = {}
        self._open: dict[str, asyncio.Event] = {}
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

        model: the owning deployment of a full-parameter group, else "". Raises DoesNotFit, BadInput.
        """
        found = self.find(base, role, kind, model, owner)
        if found is not None:
            return found.placed.spec.group
        core = self._core
        config = core.config.models[base]
        sizes = self._sizes(config, role, kind)
        spec = GroupSpec(
            group=f"{base.replace('/', '_')}.{kind}.{role}.{len(core.book.groups) + 1}",
            role=role,
            owner=owner,
            gang_size=config.train.gpus if role is Role.TRAIN else 1,
            replicas=1 if role is Role.TRAIN else config.sample.replicas,
            device_bytes=sizes.device_bytes,
        )
        placement = core.scheduler.place(core.now_us(), spec)
        core.commit(
            records.GroupPlaced(now_us=core.now_us(), spec=spec, placement=placement, base=base, kind=kind, model=model)
        )
        return spec.group

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

    # -- building ------------------------------------------------------------------------------------------------------

    async def build(self, gang_id: str) -> None:
        """Start a gang's ranks and wait until its leader says hello. Raises PlexrlError with what they said."""
        core = self._core
        group, gang = self.gang(gang_id)
        placed = group.placed
        config = core.config.models[placed.base]
        sizes = self._sizes(config, placed.spec.role, placed.kind)
        nodes = tuple(node_of(gpu) for gpu in gang.gpus)
        rendezvous = core.layout.run / f"{gang_id.replace('/', '.')}.{core.now_us()}.rendezvous"
        owner = self._owner(group)
        future = self._built[gang_id] = asyncio.get_running_loop().create_future()
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
        finally:
            self._built.pop(gang_id, None)
            for path in (rendezvous, rendezvous.with_name(f"{rendezvous.name}.steps")):
                path.unlink(missing_ok=True)

    def hello(self, hello: m.HostHello) -> None:
        """A gang's leader is there."""
        self.hosts[hello.gang] = hello
        self.attached.setdefault(hello.gang, set()).update(hello.versions)
        future = self._built.get(hello.gang)
        if future is not None and not future.done():
            future.set_result(None)

    def rank_ended(self, gang_id: str, why: str) -> bool:
        """A rank of the gang is gone. True when the gang had been built before (it is lost now)."""
        self.hosts.pop(gang_id, None)
        self.attached.pop(gang_id, None)
        self._core.links.forget(f"gang:{gang_id}")
        future = self._built.get(gang_id)
        if future is not None and not future.done():
            future.set_exception(PlexrlError(f"a rank of {gang_id} ended while it was built: {why}"))
            return False
        return future is None

    def kill(self, gang_id: str) -> None:
        """End every rank of a gang."""
        _, gang = self.gang(gang_id)
        for node in dict.fromkeys(node_of(gpu) for gpu in gang.gpus):
            self._core.links.send(f"agent:{node}", m.Kill(gang=gang_id))

    def retire(self, group_id: str, reason: str) -> None:
        """End a group: its processes, its place, its host memory."""
        core = self._core
        group = core.book.groups[group_id]
        if group.ended:
            return
        core.commit(records.GroupEnded(now_us=core.now_us(), group=group_id, reason=reason))
        for gang in group.placed.placement.gangs:
            self.hosts.pop(gang.id, None)
            self.attached.pop(gang.id, None)
            core.links.send(f"gang:{gang.id}", m.Exit())
            self.kill(gang.id)
            for node in dict.fromkeys(node_of(gpu) for gpu in gang.gpus):
                core.spawn(self._free(node, f"park:{gang.id}"))

    # -- deployments ---------------------------------------------------------------------------------------------------

    def opened(self, model: str) -> asyncio.Event:
        """Set when the deployment exists on its gang."""
        return self._open.setdefault(model, asyncio.Event())

    async def create(self, model: Model) -> None:
        """Make the deployment on every rank of its trainer. Raises PlexrlError; nothing is left then."""
        core, created = self._core, model.created
        (gang,) = self.gangs(created.group)
        kind = core.book.groups[created.group].placed.kind
        config = core.config.models[created.base]
        size = noop.BYTES
        if config.engine != "noop":
            size = sizing.state_bytes(
                config.path, config.dtype, kind, created.lora_rank, created.attn, created.mlp, created.unembed
            )
        try:
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
        except PlexrlError:
            await self._free_state(model)
            raise
        self.opened(model.id).set()

    async def close(self, model: Model) -> None:
        """Take an ended deployment off its gang and free its memory; retire groups that served it alone."""
        core, created = self._core, model.created
        group = core.book.groups[created.group]
        for version in core.book.model_versions(model.id):
            await self.drop_version(version)
        full = group.placed.kind == "full"
        isolated = core.config.scheduler.placement == "isolated"
        done = full or (isolated and not core.book.live_models(created.group))
        if done:
            self.retire(created.group, f"{model.id} ended")
            sampler = self.find(created.base, Role.SAMPLE, group.placed.kind, model.id if full else "", created.job)
            if sampler is not None:
                self.retire(sampler.placed.spec.group, f"{model.id} ended")
        elif not group.ended:
            (gang,) = group.placed.placement.gangs
            if gang.id in self.hosts:
                try:
                    await core.links.order(f"gang:{gang.id}", m.Order(id=0, verb="drop", args={"deployment": model.id}))
                except OrderFailed as error:
                    log.warning("%s was not dropped in order: %s", model.id, error)
                except Unavailable as error:
                    if gang.id in self.hosts:
                        # It may still write the state there one day: memory that it has not let go of is lost to us.
                        log.error("%s was not dropped, its host memory stays taken: %s", model.id, error)
                        return
        await self._free_state(model)

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
        for gang_id, known in self.attached.items():
            if name in known:
                known.discard(name)
                try:
                    await core.links.order(f"gang:{gang_id}", m.Order(id=0, verb="detach", args={"version": name}))
                except (OrderFailed, Unavailable) as error:
                    log.warning("%s was not detached from %s in order: %s", name, gang_id, error)
        for node in version.published.nodes:
            await self._free(node, f"version:{name}")

    # -- host memory ---------------------------------------------------------------------------------------------------

    async def _allocate(self, node: str, name: str, size: int, owner: int) -> Slab:
        value = await self._core.links.order(f"agent:{node}", m.Allocate(id=0, name=name, size=size, owner=owner))
        return m.slab_of(value["slab"])

    async def _free(self, node: str, name: str) -> None:
        try:
            await self._core.links.order(f"agent:{node}", m.Free(id=0, name=name))
        except (OrderFailed, Unavailable) as error:
            log.warning("slab %s on %s was not freed: %s", name, node, error)
