"""Ends the engines of gangs that sleep, so that what their processes keep of their GPUs is free.

Who is ended the scheduler says. Their deployments stay whole where they are, in host memory or on NVMe; the engine that
is built when one of them is wanted adopts them there.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

from plexrl.pool.core import Core
from plexrl.pool.gangs import Gangs
from plexrl.pool.tiers import Tiers
from plexrl.scheduler import Action
from plexrl.types import Residency, records

log = logging.getLogger("plexrl.head")


class Sleepers:
    """ended, built: engines that were ended, and built again, in this head's life.

    close(gang): nobody gives the gang anything from now on; returns when nothing is on its way. take_out(gang): keeps
    what its paused samples have drawn. closed(gang): its engine has ended. Set by who gives them something.
    """

    close: Callable[[str], Awaitable[None]]
    closed: Callable[[str], None]
    take_out: Callable[[str], Awaitable[None]]

    def __init__(self, core: Core, gangs: Gangs, tiers: Tiers, perform: Callable[[Iterable[Action]], None]):
        self._core = core
        self._gangs = gangs
        self._tiers = tiers
        self._perform = perform
        self.ended = self.built = 0

    async def end_all(self, gangs: Iterable[str], why: str) -> None:
        """End the engines of those that are still there and off their devices."""
        await asyncio.gather(*(self.end(gang, why) for gang in gangs))

    async def end(self, gang_id: str, why: str) -> None:
        """End the engine of a gang that is on no device and has begun no call, and tell the scheduler."""
        core = self._core
        if gang_id not in self._gangs.hosts:
            await self._gangs.kill(gang_id)  # it died by itself, which is told elsewhere
            return
        log.info("the engine of %s is ended while it sleeps: %s", gang_id, why)
        await self.close(gang_id)
        await self.take_out(gang_id)
        # What the gang has done stands in the journal before this record: nothing that it keeps for us is lost with it.
        await core.commit(records.Unbuilt(now_us=core.now_us(), gang=gang_id))
        await self._tiers.engine_ends(gang_id)
        await self._gangs.end(gang_id)
        self.ended += 1
        self._perform(core.scheduler.unbuilt(core.now_us(), gang_id))
        self.closed(gang_id)

    async def is_back(self, gang_id: str) -> None:
        """The engine was built again, before it changes anything."""
        await self._core.commit(records.Unbuilt(now_us=self._core.now_us(), gang=gang_id, built=True))
        self.built += 1

    def may_end(self, gang_id: str) -> bool:
        """Whether the gang has left no call half done."""
        state = self._core.scheduler.gangs.get(gang_id)
        leaves = state is not None and (state.residency is Residency.HOST or state.evictor is not None)
        return leaves and not state.active and not state.begun
