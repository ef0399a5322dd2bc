"""Carries out builds and switches: victims leave, the newcomer comes in, and what was moved is written down."""

import asyncio
import logging
from collections.abc import Callable

import msgspec

from plexrl.pool.core import Core, category_of
from plexrl.pool.gangs import Gangs
from plexrl.scheduler import Build, Prefetch, Switch
from plexrl.types import Moved, PlexrlError, Unavailable, records

log = logging.getLogger("plexrl.head")
_SWITCH_S = 300.0


class Switches:
    """One order of the scheduler's at a time for each gang; several gangs side by side."""

    def __init__(self, core: Core, gangs: Gangs, perform: Callable[[list], None]):
        self._core = core
        self._gangs = gangs
        self._perform = perform

    async def build(self, action: Build) -> None:
        """Offload the victims, then start the gang's engine; the scheduler is told how that went."""
        core = self._core
        evicted: list[str] = []
        try:
            await self._offload(action.evict, evicted)
            await self._gangs.build(action.gang)
            if core.book.groups[action.gang.rpartition("/")[0]].ended:
                raise Unavailable("its group ended meanwhile")
        except PlexrlError as error:
            log.error("%s was not built: %s", action.gang, error)
            await self._gangs.kill(action.gang)
            group, _ = self._gangs.find(action.gang)
            for call_id in [call for calls in core.book.open_calls.values() for call in calls]:
                if core.book.entries[call_id].accepted.call.group == group.placed.spec.group:
                    core.fail(call_id, f"the worker group was not built: {error}", category_of(error))
            self._perform(core.scheduler.build_failed(core.now_us(), action.gang, evicted))
            self.on_build_failed(action.gang, error)
            return
        self._perform(core.scheduler.built(core.now_us(), action.gang, evicted))
        self.on_built(action.gang)

    async def switch(self, action: Switch | Prefetch) -> None:
        """Also beside another gang's turn: to engine hosts it is the same."""
        core = self._core
        answer = core.scheduler.switched if isinstance(action, Switch) else core.scheduler.prefetched
        evicted: list[str] = []
        moved: dict[str, Moved] = {}
        try:
            await self._offload(action.evict, evicted)
            moved = await self._move(action.gang, "load")
        except PlexrlError as error:
            log.error("%s was not switched in: %s", action.gang, error)
            await self._gangs.kill(action.gang)
            self._perform(answer(core.now_us(), action.gang, False, moved, evicted))
            self.on_lost(action.gang, str(error))
            return
        self._perform(answer(core.now_us(), action.gang, True, moved, evicted))

    async def _offload(self, victims: tuple[str, ...], evicted: list[str]) -> None:
        for result, victim in zip(
            await asyncio.gather(*(self._move(v, "offload") for v in victims), return_exceptions=True),
            victims,
            strict=True,
        ):
            if isinstance(result, PlexrlError):
                self.on_lost(victim, str(result))
                # Nothing may come into its place while one of its ranks could still write there.
                await self._gangs.kill(victim)
            elif isinstance(result, BaseException):
                raise result
            else:
                evicted.append(victim)

    async def _move(self, gang_id: str, verb: str) -> dict[str, Moved]:
        core = self._core
        value = await self._gangs.order(gang_id, verb, {}, _SWITCH_S)
        _, gang = self._gangs.find(gang_id)
        moved = {
            gpu: msgspec.convert(part, Moved) for gpu, part in zip(gang.gpus, value["moved"], strict=False) if part
        }
        for gpu, part in moved.items():
            record = records.Switched(now_us=core.now_us(), gang=gang_id, gpu=gpu, incoming=verb == "load", moved=part)
            core.commit(record, durable=False)
        return moved

    # -- set by the head -----------------------------------------------------------------------------------------------

    on_built: Callable[[str], None] = staticmethod(lambda gang: None)
    on_build_failed: Callable[[str, PlexrlError], None] = staticmethod(lambda gang, why: None)
    on_lost: Callable[[str, str], None] = staticmethod(lambda gang, why: None)
