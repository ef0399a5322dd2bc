"""Host memory of the nodes, in named slabs, as their agents give it."""

import asyncio
import logging
import time
from collections.abc import Iterable
from typing import Protocol

from plexrl.pool import messages as m
from plexrl.pool.core import Core
from plexrl.pool.links import OrderFailed
from plexrl.types import Slab, Unavailable

log = logging.getLogger("plexrl.head")
_LOOK_S = 0.1


class Room(Protocol):
    """Who can have something leave a node's memory. patience_s: for how long it is worth while to wait for that."""

    patience_s: float

    async def make_room(self, node: str, left: Iterable[str]) -> bool:
        """False when nothing may leave now."""
        ...


class Slabs:
    """Orders to the agents' arenas. room: set by who can."""

    room: Room

    def __init__(self, core: Core):
        self._core = core

    async def order(
        self,
        node: str,
        message: m.Message,
        timeout: float = 300.0,
        left: Iterable[str] = (),
        patient: bool = True,
    ) -> dict[str, object]:
        """An order that needs memory: what does not fit is tried again for as long as something leaves for it.

        left: gangs that have left their devices although the scheduler does not know it yet. patient: wait a while for
        switches that are under way. Raises OrderFailed (its category is `user` when it does not fit), Unavailable.
        """
        deadline = time.monotonic() + (self.room.patience_s if patient else 0)
        while True:
            try:
                return await self._core.links.order(f"agent:{node}", message, timeout)
            except OrderFailed as error:
                if error.category != "user":
                    raise
                if not await self.room.make_room(node, left):
                    if time.monotonic() >= deadline:
                        raise
                    await asyncio.sleep(_LOOK_S)

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
