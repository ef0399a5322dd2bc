"""Host memory of the nodes, in named slabs, as their agents give it."""

import logging
from collections.abc import Awaitable, Callable, Iterable

from plexrl.pool import messages as m
from plexrl.pool.core import Core
from plexrl.pool.links import OrderFailed
from plexrl.types import Slab, Unavailable

log = logging.getLogger("plexrl.head")


async def _no_room(node: str, left: Iterable[str]) -> bool:
    return False


class Slabs:
    """Orders to the agents' arenas."""

    make_room: Callable[[str, Iterable[str]], Awaitable[bool]] = staticmethod(_no_room)
    """Has something leave a node's memory; set by who can. False when nothing may."""

    def __init__(self, core: Core):
        self._core = core

    async def order(
        self, node: str, message: m.Message, timeout: float = 300.0, left: Iterable[str] = ()
    ) -> dict[str, object]:
        """An order that needs memory: what does not fit is tried again for as long as something leaves for it.

        left: gangs that have left their devices although the scheduler does not know it yet. Raises OrderFailed (its
        category is `user` when it does not fit), Unavailable.
        """
        while True:
            try:
                return await self._core.links.order(f"agent:{node}", message, timeout)
            except OrderFailed as error:
                if error.category != "user" or not await self.make_room(node, left):
                    raise

    async def allocate(self, node: str, name: str, size: int, owner: int, gpu: int = -1) -> Slab:
        """The slab of that name, made when there is none. owner: uid. gpu: see `Allocate`. Raises as `order`."""
        value = await self.order(node, m.Allocate(id=0, name=name, size=size, owner=owner, gpu=gpu))
        return m.slab_of(value["slab"])

    async def free(self, node: str, name: str) -> None:
        """Give a slab back; one that is gone is fine. A failure is logged: its agent knows better."""
        try:
            await self._core.links.order(f"agent:{node}", m.Free(id=0, name=name))
        except (OrderFailed, Unavailable) as error:
            log.warning("slab %s on %s was not freed: %s", name, node, error)
