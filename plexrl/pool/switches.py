"""Carries out builds and switches: who leaves and who comes in are told together, and the gates order the bytes.

A gang that could not be moved and is where it was (undone) costs a try: the scheduler tells it again when it is next.
After three tries in a row it is lost. A gang of which a rank dies is lost by itself: the other side goes on. The engine
of a gang that keeps more of its GPUs than was promised is ended now that it sleeps; the third time, it is lost.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable

import msgspec

from plexrl.pool.core import Core, category_of
from plexrl.pool.gangs import Gangs, node_of, nodes_of
from plexrl.pool.links import OrderFailed
from plexrl.pool.sleepers import Sleepers
from plexrl.pool.tiers import Tiers
from plexrl.scheduler import Action, Build, Prefetch, Switch
from plexrl.types import Moved, PlexrlError, Residency, Unavailable, records

log = logging.getLogger("plexrl.head")
_SWITCH_S = 300.0
_TRIES = 3


class _TakenBack(Exception):
    """A switch was undone, and is to be tried again. crowded: because host memory was short."""

    def __init__(self, crowded: bool = False):
        super().__init__()
        self.crowded = crowded


class Switches:
    """One order of the scheduler's at a time for each gang; several gangs side by side. sleepers: ends of engines."""

    def __init__(self, core: Core, gangs: Gangs, tiers: Tiers, perform: Callable[[Iterable[Action]], None]):
        self._core = core
        self._gangs = gangs
        self._tiers = tiers
        self._perform = perform
        self.sleepers = Sleepers(core, gangs, tiers, perform)
        self._undone: dict[str, list[str]] = {}  # gang -> why its last moves were undone, in a row
        self._broken: dict[str, int] = {}  # gang -> how often in a row it kept more than was promised

    async def build(self, action: Build) -> None:
        """Offload the victims, then start the gang's engine; the scheduler is told how that went.

        One that was ended while it slept adopts its deployments, and is not given up before three tries have failed.
        """
        core = self._core
        evicted: list[str] = []
        group, _ = self._gangs.find(action.gang)
        again = action.gang in group.unbuilt
        try:
            await self._make_way(action, action.evict, evicted)
            if again:
                await self._supply(action, evicted)
        except _TakenBack as back:
            self._perform(core.scheduler.undone(core.now_us(), action.gang, evicted, back.crowded))
            return
        except PlexrlError as error:
            await self._not_built(action, evicted, error)
            return
        try:
            await self._gangs.build(action.gang)
            if again:
                await self._tiers.bring_gang(action.gang, patient=True)
            if group.ended:
                raise Unavailable("its group ended meanwhile")
        except PlexrlError as error:
            if not again or group.ended or self._tired(action.gang, error):
                await self._not_built(action, evicted, error)
                return
            if self._gangs.disown(action.gang):
                await self._tiers.engine_ends(action.gang)
            await self._gangs.kill(action.gang)
            self._perform(core.scheduler.undone(core.now_us(), action.gang, evicted))
            return
        if again:
            self._undone.pop(action.gang, None)
            await self.sleepers.is_back(action.gang)
        self._perform(core.scheduler.built(core.now_us(), action.gang, evicted))
        self.on_built(action.gang)

    async def _not_built(self, action: Build, evicted: list[str], error: PlexrlError) -> None:
        """Its calls and whoever waits for it are told."""
        core, group = self._core, self._gangs.find(action.gang)[0]
        log.error("%s was not built: %s", action.gang, error)
        self._undone.pop(action.gang, None)
        await self._gangs.kill(action.gang)
        for call_id in [call for calls in core.book.open_calls.values() for call in calls]:
            if core.book.entries[call_id].accepted.call.group == group.placed.spec.group:
                core.fail(call_id, f"the worker group was not built: {error}", category_of(error))
        self._perform(core.scheduler.build_failed(core.now_us(), action.gang, evicted))
        self.on_build_failed(action.gang, error)

    async def switch(self, action: Switch | Prefetch) -> None:
        """Also beside another gang's turn: to engine hosts it is the same."""
        core, gang = self._core, action.gang
        answer = core.scheduler.switched if isinstance(action, Switch) else core.scheduler.prefetched
        evicted: list[str] = []
        try:
            moved = await self._cross(action, evicted)
        except _TakenBack as back:
            self._perform(core.scheduler.undone(core.now_us(), gang, evicted, back.crowded))
            return
        except PlexrlError as error:
            # Whose rank died is being given up already.
            ours, why = self._gangs.disown(gang), self._reason(gang, error)
            await self._gangs.kill(gang)
            self._perform(answer(core.now_us(), gang, False, {}, evicted))
            if ours:
                self.on_lost(gang, why)
            return
        self._undone.pop(gang, None)
        self._perform(answer(core.now_us(), gang, True, moved, evicted))

    # -- who comes -----------------------------------------------------------------------------------------------------

    async def _cross(self, action: Switch | Prefetch, evicted: list[str]) -> dict[str, Moved]:
        """One comes, the others leave. Raises _TakenBack, or what the gang is lost by."""
        gang = action.gang
        await self._supply(action, evicted)
        if isinstance(action, Switch):
            # Who leaves and is ended leaves first: what its processes keep is room for this one.
            await self._make_way(action, [v for v in action.evict if v in action.end], evicted)
        begun = time.monotonic()
        going = [victim for victim in action.evict if victim not in evicted]
        came, stay = await asyncio.gather(self._move(gang, "load"), self._clear(going, evicted), return_exceptions=True)
        if isinstance(stay, BaseException):
            raise stay
        if isinstance(came, PlexrlError) and _undone(came):
            # Who could not have the bytes because another one stayed on them is not to blame.
            if stay or not self._tired(gang, came):
                raise _TakenBack from came
        if isinstance(came, BaseException):
            raise came
        while stay:
            stay = await self._clear(stay, evicted)
        took = time.monotonic() - begun
        copies = max((part.seconds for part in came.values()), default=0.0)
        for node in nodes_of(self._gangs.find(gang)[1]):
            self._core.scheduler.bandwidth.took(node, round(took * 1e6), round(copies * 1e6))
        return came

    async def _make_way(self, action: Build | Switch, first: Iterable[str], evicted: list[str]) -> None:
        """Have `first` leave, and the engines that sleep end. Raises _TakenBack when somebody stays."""
        if await self._clear([victim for victim in first if victim not in evicted], evicted):
            raise _TakenBack
        if action.end:
            await self.sleepers.end_all(action.end, f"{action.gang} needs what it keeps")

    async def _supply(self, action: Build | Switch | Prefetch, evicted: list[str]) -> None:
        """Have the gang's state in host memory. Where that is short, its victims leave first, and may be spilled."""
        gang, patient = action.gang, action.gang in self._undone
        try:
            try:
                await self._tiers.bring_gang(gang, patient=False)
            except OrderFailed as error:
                if error.category != "user" or isinstance(action, Prefetch):
                    raise
                if await self._clear([victim for victim in action.evict if victim not in evicted], evicted):
                    raise _TakenBack from error
                await self._tiers.bring_gang(gang, patient, evicted)
        except OrderFailed as error:
            if error.category == "user" and (isinstance(action, Prefetch) or not self._tired(gang, error)):
                raise _TakenBack(crowded=True) from error
            raise
        group, _ = self._gangs.find(gang)
        if group.ended:
            raise Unavailable(f"its group ended meanwhile: {group.ended}")

    # -- who leaves ----------------------------------------------------------------------------------------------------

    async def _clear(self, victims: Iterable[str], evicted: list[str]) -> list[str]:
        """Have all of them leave their devices. Those that stay, to be tried again; those that are lost are none."""
        victims = list(victims)
        left = await asyncio.gather(*(self._leave(victim, evicted) for victim in victims))
        return [victim for victim, gone in zip(victims, left, strict=True) if not gone]

    async def _leave(self, victim: str, evicted: list[str]) -> bool:
        """Whether the victim's bytes are free: it has left (and is in `evicted`), or is lost and its ranks are gone."""
        try:
            broken = self._check_promise(victim, await self._move(victim, "offload"))
            if broken and not self.sleepers.may_end(victim):
                raise PlexrlError(broken)
        except PlexrlError as error:
            if _undone(error) and not self._tired(victim, error):
                return False
            ours, why = self._gangs.disown(victim), self._reason(victim, error)
            if ours:
                self.on_lost(victim, why)
            # Nothing may come into its place while one of its ranks could still write there.
            await self._gangs.kill(victim)
            state = self._core.scheduler.gangs.get(victim)
            if state is not None and state.residency is Residency.OFFLOADING:
                # Before the answer to the switch, which tells of victims that live.
                self._perform(self._core.scheduler.lost(self._core.now_us(), victim))
            return True
        self._undone.pop(victim, None)
        evicted.append(victim)
        if broken:
            await self.sleepers.end(victim, broken)
        return True

    def _check_promise(self, gang_id: str, moved: dict[str, Moved]) -> str:
        """What a gang's processes keep on a GPU when they sleep was promised when it was placed: "", or how it is not.

        Raises PlexrlError when engine after engine of it breaks the promise.
        """
        promised = self._gangs.find(gang_id)[0].placed.spec.residual_bytes
        most = max(moved.items(), key=lambda item: item[1].residual_bytes, default=None)
        if most is None:
            return ""
        gpu, kept = most[0], most[1].residual_bytes
        if self.sleepers.may_end(gang_id) and self._core.faults.take("keeps-more"):
            kept = promised + 1
        self._gangs.keeps(gang_id, kept)
        if kept <= promised:
            self._broken.pop(gang_id, None)
            return ""
        why = (
            f"its processes keep {kept} bytes of {gpu} now that it sleeps, and {promised} were promised when it was "
            "placed"
        )
        log.error("%s: %s", gang_id, why)
        self._broken[gang_id] = self._broken.get(gang_id, 0) + 1
        if self._broken[gang_id] >= _TRIES:
            del self._broken[gang_id]
            raise PlexrlError(f"{why}; so did {_TRIES - 1} engines of it before")
        return why

    # -- both ----------------------------------------------------------------------------------------------------------

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
            core.scheduler.bandwidth.moved(node_of(gpu), part)
        return moved

    def _tired(self, gang_id: str, error: PlexrlError) -> bool:
        """Count a move that was undone. True when there were too many in a row."""
        why = self._undone.setdefault(gang_id, [])
        why.append(str(error))
        log.warning("a move of %s was undone, the %d. in a row: %s", gang_id, len(why), error)
        return len(why) >= _TRIES

    def _reason(self, gang_id: str, error: PlexrlError) -> str:
        """Why a gang is given up."""
        tries = self._undone.pop(gang_id, [])
        why = f"{_TRIES} moves in a row were undone: {'; '.join(tries)}" if len(tries) == _TRIES else str(error)
        log.error("%s was not moved: %s", gang_id, why)
        return why

    # -- set by the head -----------------------------------------------------------------------------------------------

    on_built: Callable[[str], None] = staticmethod(lambda gang: None)
    on_build_failed: Callable[[str, PlexrlError], None] = staticmethod(lambda gang, why: None)
    on_lost: Callable[[str, str], None] = staticmethod(lambda gang, why: None)


def _undone(error: PlexrlError) -> bool:
    """Whether everybody is where they were."""
    return isinstance(error, OrderFailed) and error.category == "undone"
