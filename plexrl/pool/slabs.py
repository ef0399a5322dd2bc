"""Host memory of the nodes, in named slabs, as their agents give it."""

import logging

from plexrl.pool import messages as m
from plexrl.pool.core import Core
from plexrl.pool.links import OrderFailed
from plexrl.types import Slab, Unavailable

log = logging.getLogger("plexrl.head")


class Slabs:
    """Orders to the agents' arenas."""

    def __init__(self, core: Core):
        self._core = core

    async def allocate(self, node: str, name: str, size: int, owner: int) -> Slab:
        """The slab of that name, made when there is none. owner: uid. Raises OrderFailed, Unavailable."""
        value = await self._core.links.order(f"agent:{node}", m.Allocate(id=0, name=name, size=size, owner=owner))
        return m.slab_of(value["slab"])

    async def free(self, node: str, name: str) -> None:
        """Give a slab back; one that is gone is fine. A failure is logged: its agent knows better."""
        try:
            await self._core.links.order(f"agent:{node}", m.Free(id=0, name=name))
        except (OrderFailed, Unavailable) as error:
            log.warning("slab %s on %s was not freed: %s", name, node, error)
