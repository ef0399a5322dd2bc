"""Deployments' state in the nodes' memory: a slab on each rank, made, let go of and given back."""

from plexrl.pool.book import Model
from plexrl.pool.core import Core
from plexrl.pool.gangs import Gangs, node_of
from plexrl.pool.needs import state_bytes
from plexrl.pool.slabs import Slabs
from plexrl.types import Gang, Slab


class States:
    """The slabs of training deployments, `state:<deployment>:<rank>`."""

    def __init__(self, core: Core, gangs: Gangs, slabs: Slabs):
        self._core = core
        self._gangs = gangs
        self._slabs = slabs

    async def create(self, model: Model) -> None:
        """Make the deployment on every rank of its trainer. Raises PlexrlError; `drop` and `free` take it back."""
        created, gang = model.created, self.gang(model)
        slabs = [await self.slab(model, rank) for rank in range(len(gang.gpus))]
        await self._make(model, slabs, folder=created.init_path, optimizer=created.init_optimizer)

    async def adopt(self, model: Model, slabs: list[Slab]) -> None:
        """Have another engine go on from what the one before left whole in the slabs. Raises PlexrlError."""
        await self._make(model, slabs, adopt=True)

    async def restore(self, model: Model, slabs: list[Slab], folder: str) -> None:
        """Make the deployment anew, as it is in a checkpoint with its optimizer. Raises PlexrlError."""
        await self._make(model, slabs, folder=folder, optimizer=True)

    async def _make(
        self, model: Model, slabs: list[Slab], folder: str = "", optimizer: bool = False, adopt: bool = False
    ) -> None:
        created = model.created
        args = {
            "deployment": model.id,
            "slabs": slabs,
            "lora_rank": created.lora_rank,
            "seed": created.seed,
            "attn": created.attn,
            "mlp": created.mlp,
            "unembed": created.unembed,
            "folder": folder,
            "optimizer": optimizer,
            "adopt": adopt,
        }
        await self._gangs.order(self.gang(model).id, "create", args)

    async def drop(self, model: Model) -> bool:
        """Have its engine host forget a deployment. False when it may still use the slabs."""
        return await self._gangs.let_go(self.gang(model).id, "drop", {"deployment": model.id})

    async def free(self, model: Model) -> None:
        """Give its slabs back."""
        for rank, gpu in enumerate(self.gang(model).gpus):
            await self._slabs.free(node_of(gpu), name_of(model.id, rank))

    async def slab(self, model: Model, rank: int) -> Slab:
        """The slab of one rank in its node's memory, made when there is none."""
        gpu = self.gang(model).gpus[rank]
        node, _, index = gpu.rpartition(":")
        name, size = name_of(model.id, rank), self.bytes_of(model)
        return await self._slabs.allocate(node, name, size, model.created.uid, int(index))

    def bytes_of(self, model: Model) -> int:
        """Of one slab."""
        core, created = self._core, model.created
        return state_bytes(core.config.models[created.base], core.book.groups[created.group].placed.kind, created)

    def gang(self, model: Model) -> Gang:
        """Where it trains."""
        (gang,) = self._core.book.groups[model.created.group].placed.placement.gangs
        return gang


def name_of(model: str, rank: int) -> str:
    """The name of a deployment's slab on one rank."""
    return f"state:{model}:{rank}"
