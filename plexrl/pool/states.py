"""Deployments' state in the nodes' memory: a slab on each rank, made, let go of and given back."""

from plexrl.pool.book import Model
from plexrl.pool.core import Core
from plexrl.pool.gangs import Gangs, node_of
from plexrl.pool.needs import state_bytes
from plexrl.pool.slabs import Slabs
from plexrl.types import Gang


class States:
    """The slabs of training deployments, `state:<deployment>:<rank>`."""

    def __init__(self, core: Core, gangs: Gangs, slabs: Slabs):
        self._core = core
        self._gangs = gangs
        self._slabs = slabs

    async def create(self, model: Model) -> None:
        """Make the deployment on every rank of its trainer. Raises PlexrlError; `drop` and `free` take it back."""
        core, created = self._core, model.created
        gang = self._gang(model)
        kind = core.book.groups[created.group].placed.kind
        size = state_bytes(core.config.models[created.base], kind, created)
        slabs = [
            await self._slabs.allocate(node_of(gpu), name_of(model.id, rank), size, created.uid)
            for rank, gpu in enumerate(gang.gpus)
        ]
        await self._gangs.order(
            gang.id,
            "create",
            {
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
        )

    async def drop(self, model: Model) -> bool:
        """Have its engine host forget a deployment. False when it may still use the slabs."""
        return await self._gangs.let_go(self._gang(model).id, "drop", {"deployment": model.id})

    async def free(self, model: Model) -> None:
        """Give its slabs back."""
        for rank, gpu in enumerate(self._gang(model).gpus):
            await self._slabs.free(node_of(gpu), name_of(model.id, rank))

    def _gang(self, model: Model) -> Gang:
        (gang,) = self._core.book.groups[model.created.group].placed.placement.gangs
        return gang


def name_of(model: str, rank: int) -> str:
    """The name of a deployment's slab on one rank."""
    return f"state:{model}:{rank}"
