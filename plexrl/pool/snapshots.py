"""Versions on the nodes: published into memory, made known to samplers, moved to NVMe, read back, dropped.

The newest `limits.versions_per_model` of a model that lives are in its trainer's nodes' memory. Of the older ones, what
a session that lives still samples from goes to NVMe where the pool has any (`limits.versions_on_nvme` of a model); all
others are dropped. A version with a folder is read back from there when it is sampled from, on whichever node.
"""

import asyncio
import logging
import shutil
from weakref import WeakValueDictionary

from plexrl.pool import messages as m
from plexrl.pool.book import Model, Version
from plexrl.pool.core import Core
from plexrl.pool.gangs import Gangs, node_of, nodes_of, version_left
from plexrl.pool.links import OrderFailed
from plexrl.pool.needs import snapshot_bytes
from plexrl.pool.slabs import Slabs
from plexrl.types import BadInput, PlexrlError, Role, Slab, Unavailable, records

log = logging.getLogger("plexrl.head")
_MOVE_S = 600.0


class Snapshots:
    """The slabs of versions, and who reads them. One thing at a time is done with one version."""

    def __init__(self, core: Core, gangs: Gangs, slabs: Slabs):
        self._core = core
        self._gangs = gangs
        self._slabs = slabs
        self._spilled: set[tuple[str, str]] = set()  # (node, version)
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    # -- what there is -------------------------------------------------------------------------------------------------

    def nodes(self, group: str) -> tuple[str, ...]:
        """The nodes of a trainer, where its versions are published."""
        (gang,) = self._core.book.groups[group].placed.placement.gangs
        return nodes_of(gang)

    def bytes_of(self, model: Model) -> int:
        """Of one version of a model."""
        core, created = self._core, model.created
        return snapshot_bytes(core.config.models[created.base], core.book.groups[created.group].placed.kind, created)

    def kept(self, version: Version) -> str:
        """Where it would be read from now: `memory`, `nvme`, `disk`; "" when nowhere."""
        name = version.published.version
        if any((node, name) not in self._spilled for node in version.nodes):
            return "memory"
        return "nvme" if version.nodes else "disk" if version.published.folder else ""

    def met(self, node: str, spilled: tuple[str, ...]) -> None:
        """An agent said what lies on its NVMe."""
        self._spilled |= {(node, name.removeprefix("version:")) for name in spilled if name.startswith("version:")}

    def folder(self, model: Model, version: str) -> str:
        """A folder for a version without a name, "" unless a sampler of it is on a node without its trainer."""
        core, created = self._core, model.created
        there = self.nodes(created.group)
        kind = core.book.groups[created.group].placed.kind
        for group in core.book.groups.values():
            placed = group.placed
            ours = placed.spec.role is Role.SAMPLE and (placed.base, placed.kind) == (created.base, kind)
            if ours and not group.ended and placed.model in ("", model.id):
                if any(node_of(gang.gpus[0]) not in there for gang in placed.placement.gangs):
                    return str(core.layout.checkpoint(created.uid, model.id, "passing", version.rpartition("/")[2]))
        return ""

    # -- in ------------------------------------------------------------------------------------------------------------

    async def make(self, model: Model, version: str) -> dict[str, Slab]:
        """Slabs for a new version on every node of the trainer."""
        size = self.bytes_of(model)
        try:
            return {
                node: await self._make(node, f"version:{version}", size, model)
                for node in self.nodes(model.created.group)
            }
        except PlexrlError:
            await self.discard(model.created.group, version)
            raise

    async def _make(self, node: str, name: str, size: int, model: Model) -> Slab:
        """What is older leaves after the publication, and before it only where there is no room for one more."""
        uid = model.created.uid
        try:
            order = m.Allocate(id=0, name=name, size=size, owner=uid)
            return m.slab_of((await self._core.links.order(f"agent:{node}", order))["slab"])
        except OrderFailed as error:
            if error.category != "user":
                raise
        for version in self._beyond(model, 1):
            await self.settle(version, 1)
        return await self._slabs.allocate(node, name, size, uid)

    async def discard(self, group: str, version: str) -> None:
        """Give back the memory of a version that was not published after all."""
        for node in self.nodes(group):
            await self._slabs.free(node, f"version:{version}")

    async def attach(self, gang_id: str, version: Version) -> None:
        """Make a version known to a sampler's replica, which compares its checksum first. Raises PlexrlError.

        One that is damaged is dropped, and read back from its folder if it has one.
        """
        name = version.published.version
        async with self._lock(name):
            known = self._gangs.attached.setdefault(gang_id, set())
            if name in known:
                return
            try:
                await self._attach(gang_id, version)
            except OrderFailed as error:
                if error.category != "damaged":
                    raise
                log.error("%s", error)
                await self._drop(version)
                if not version.published.folder or version.nodes:
                    raise
                await self._attach(gang_id, version)
            known.add(name)

    async def _attach(self, gang_id: str, version: Version) -> None:
        published = version.published
        _, gang = self._gangs.find(gang_id)
        node = node_of(gang.gpus[0])
        args = {
            "version": published.version,
            "slabs": {node: await self._bring(node, version)},
            "lora_rank": published.lora_rank,
            "attn": published.attn,
            "mlp": published.mlp,
            "unembed": published.unembed,
            "checksum": published.checksum,
        }
        await self._gangs.order(gang_id, "attach", args)

    async def _bring(self, node: str, version: Version) -> Slab:
        """The version's slab in a node's memory."""
        core, published = self._core, version.published
        name = f"version:{published.version}"
        if node in version.nodes:
            if core.config.nvme is None:
                return await self._slabs.allocate(node, name, published.size, published.uid)
            value = await self._slabs.order(node, m.Refill(id=0, name=name), _MOVE_S)
            self._spilled.discard((node, published.version))
            return m.slab_of(value["slab"])
        if not published.folder:
            raise BadInput(f"version {published.version} is not on {node} and has no name", "Publish it under a name")
        base = core.config.models[published.base]
        fill = m.Fill(
            id=0,
            name=name,
            owner=published.uid,
            folder=published.folder,
            model_dir=base.path,
            dtype=base.dtype,
            lora_rank=published.lora_rank,
            attn=published.attn,
            mlp=published.mlp,
            unembed=published.unembed,
        )
        slab = m.slab_of((await self._slabs.order(node, fill, _MOVE_S))["slab"])
        nodes = (*version.nodes, node)
        core.commit(records.VersionKept(now_us=core.now_us(), version=published.version, nodes=nodes))
        return slab

    # -- out -----------------------------------------------------------------------------------------------------------

    async def settle_all(self) -> None:
        """Every version to where it belongs now."""
        for version in [version for version in self._core.book.versions.values() if version.nodes]:
            await self.settle(version)

    async def settle_model(self, model: Model) -> None:
        """The same of one model's, after a publication."""
        for version in self._beyond(model, 0):
            await self.settle(version)

    async def settle(self, version: Version, coming: int = 0) -> None:
        """To where it belongs: memory, NVMe, or nowhere. One that a call uses stays where it is.

        coming: how many newer ones of its model are about to be published.
        """
        async with self._lock(version.published.version):
            if not version.nodes or self._in_use(version):
                return
            limits = self._core.config.limits
            model = self._core.book.models[version.published.model]
            older = self._beyond(model, coming)
            if model.ended and version.readers or version not in older and not model.ended:
                return
            worth = [each for each in older if each.readers][-limits.versions_on_nvme :]
            if self._core.config.nvme is not None and version in worth and await self._spill(version):
                return
            await self._drop(version)

    def _beyond(self, model: Model, coming: int) -> list[Version]:
        """Versions on the nodes beyond the newest of the model, oldest first."""
        keep = self._core.config.limits.versions_per_model - coming
        newest = set(model.versions[-keep:] if keep > 0 else ())
        return [v for v in self._core.book.model_versions(model.id) if v.published.version not in newest]

    def _in_use(self, version: Version) -> bool:
        book, name = self._core.book, version.published.version
        return any(book.entries[id].accepted.call.deployment == name for ids in book.open_calls.values() for id in ids)

    async def drop(self, version: Version) -> None:
        """Let go of a version on all nodes. One with a folder stays on disk."""
        async with self._lock(version.published.version):
            await self._drop(version)

    async def _drop(self, version: Version) -> None:
        core, published = self._core, version.published
        if not version.nodes or not await self._released(published.version):
            return
        nodes = version.nodes
        version_left(core, version, nodes)
        for node in nodes:
            self._spilled.discard((node, published.version))
            await self._slabs.free(node, f"version:{published.version}")
        if published.ephemeral and published.folder:
            await asyncio.to_thread(shutil.rmtree, published.folder, ignore_errors=True)

    async def _spill(self, version: Version) -> bool:
        """To NVMe, on every node. False when it is not all there: then it may as well be dropped."""
        name = version.published.version
        if not await self._released(name):
            return True
        for node in version.nodes:
            if (node, name) in self._spilled:
                continue
            try:
                await self._core.links.order(f"agent:{node}", m.Spill(id=0, name=f"version:{name}"), _MOVE_S)
            except PlexrlError as error:
                log.warning("version %s is not spilled on %s: %s", name, node, error)
                return False
            self._spilled.add((node, name))
        return True

    async def _released(self, name: str) -> bool:
        """Have every replica forget the version. False when one still uses its slab: nobody may have that then."""
        for gang_id, known in list(self._gangs.attached.items()):
            if name not in known:
                continue
            try:
                await self._gangs.order(gang_id, "detach", {"version": name})
            except OrderFailed as error:
                log.info("version %s stays with %s: %s", name, gang_id, error)
                return False
            except Unavailable as error:
                if gang_id in self._gangs.hosts:
                    log.warning("version %s stays with %s: %s", name, gang_id, error)
                    return False
            known.discard(name)
        return True

    def _lock(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())
