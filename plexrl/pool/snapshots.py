"""Versions in memory: published into the nodes' arenas, made known to samplers, dropped."""

from plexrl.pool.book import Model, Version
from plexrl.pool.core import Core
from plexrl.pool.gangs import Gangs, node_of, nodes_of
from plexrl.pool.needs import snapshot_bytes
from plexrl.pool.slabs import Slabs
from plexrl.types import BadInput, PlexrlError, Slab, records


class Snapshots:
    """The slabs of versions, and who reads them."""

    def __init__(self, core: Core, gangs: Gangs, slabs: Slabs):
        self._core = core
        self._gangs = gangs
        self._slabs = slabs

    def nodes(self, group: str) -> tuple[str, ...]:
        """The nodes of a trainer, where its versions are published."""
        (gang,) = self._core.book.groups[group].placed.placement.gangs
        return nodes_of(gang)

    def bytes_of(self, model: Model) -> int:
        """Of one version of a model."""
        core, created = self._core, model.created
        return snapshot_bytes(core.config.models[created.base], core.book.groups[created.group].placed.kind, created)

    async def make(self, model: Model, version: str) -> dict[str, Slab]:
        """Slabs for a new version on every node of the trainer; older versions beyond the limit go first."""
        core = self._core
        keep = core.config.limits.versions_per_model - 1
        in_use = {core.book.entries[id].accepted.call.deployment for ids in core.book.open_calls.values() for id in ids}
        held = core.book.model_versions(model.id)
        for old in held[: max(0, len(held) - keep)]:
            if old.published.version not in in_use:
                await self.drop(old)
        size = self.bytes_of(model)
        try:
            return {
                node: await self._slabs.allocate(node, f"version:{version}", size, model.created.uid)
                for node in self.nodes(model.created.group)
            }
        except PlexrlError:
            await self.discard(model.created.group, version)
            raise

    async def discard(self, group: str, version: str) -> None:
        """Give back the memory of a version that was not published after all."""
        for node in self.nodes(group):
            await self._slabs.free(node, f"version:{version}")

    async def attach(self, gang_id: str, version: Version) -> None:
        """Make a version known to a sampler's replica. Raises PlexrlError."""
        core, published = self._core, version.published
        known = self._gangs.attached.setdefault(gang_id, set())
        if published.version in known:
            return
        _, gang = self._gangs.find(gang_id)
        node = node_of(gang.gpus[0])
        if node not in published.nodes or not version.in_memory:
            raise BadInput(
                f"version {published.version} is no longer in memory",
                f"Only the newest {core.config.limits.versions_per_model} of a model are kept; publish it again",
            )
        slab = await self._slabs.allocate(node, f"version:{published.version}", published.size, published.uid)
        await self._gangs.order(
            gang_id,
            "attach",
            {
                "version": published.version,
                "slabs": {node: slab},
                "lora_rank": published.lora_rank,
                "attn": published.attn,
                "mlp": published.mlp,
                "unembed": published.unembed,
            },
        )
        known.add(published.version)

    async def drop(self, version: Version) -> None:
        """Let go of a version in memory. One with a folder stays on disk."""
        core, name = self._core, version.published.version
        if not version.in_memory:
            return
        core.commit(records.VersionDropped(now_us=core.now_us(), version=name))
        free = True
        for gang_id, known in list(self._gangs.attached.items()):
            if name in known:
                known.discard(name)
                free &= await self._gangs.let_go(gang_id, "detach", {"version": name})
        if free:
            for node in version.published.nodes:
                await self._slabs.free(node, f"version:{name}")
