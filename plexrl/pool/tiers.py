"""Deployments' state between a node's memory and its NVMe: spilled where memory is short, refilled before it is used.

A spill or a refill holds the deployment's lock, and a switch brings what its gang needs first: none meets another half
way. Who looks for room on a node holds that node's lock, and waits for no deployment's.

What an engine that was ended left in memory or on NVMe the next one adopts when it is brought. What cannot be read, or
is not whole, is made anew from the last checkpoint where that is the same state, and is lost otherwise.
"""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from enum import Enum

from plexrl.pool import messages as m
from plexrl.pool.book import Model
from plexrl.pool.core import Core
from plexrl.pool.gangs import Gangs, node_of
from plexrl.pool.links import OrderFailed
from plexrl.pool.slabs import Slabs
from plexrl.pool.spilling import Candidate, coldest
from plexrl.pool.states import States, name_of
from plexrl.types import PlexrlError, Residency, Role, Slab

log = logging.getLogger("plexrl.head")
_MOVE_S = 600.0
_ROOM_S = 20.0


class Away(Enum):
    """What the engine host knows of a deployment that is not simply in its slab.

    SPILLED: no slab. UNSURE: perhaps none, a new head cannot tell. UNKNOWN: not even the deployment.
    """

    SPILLED = 1
    UNSURE = 2
    UNKNOWN = 3


class Tiers:
    """Where the slabs of training deployments are. restored: how many were made anew from their checkpoints.

    on_damaged(deployment, why): it is lost. checkpoint_of(deployment): the folder of a checkpoint that is the present
    state, "" when none is.
    """

    on_damaged: Callable[[Model, str], Awaitable[None]]
    checkpoint_of: Callable[[Model], str] = staticmethod(lambda model: "")

    def __init__(self, core: Core, gangs: Gangs, slabs: Slabs, states: States):
        self._core = core
        self._gangs = gangs
        self._slabs = slabs
        self._states = states
        self._away: dict[str, Away] = {}
        self._anew: dict[str, str] = {}  # deployments to be made from a checkpoint, and its folder
        self.restored = 0
        self._spilled: dict[tuple[str, str], int] = {}  # (node, slab) -> bytes on that node's NVMe
        self._used: dict[str, int] = {}
        self._locks: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._looking: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self.patience_s = _ROOM_S if core.config.nvme else 0.0
        slabs.room = self

    def met(self, node: str, spilled: Iterable[str]) -> None:
        """An agent said what lies on its NVMe. What the head did not know before, engine hosts may not know either."""
        for name in spilled:
            model = self._core.book.models.get(_model_of(name))
            if model is not None and not model.ended and (node, name) not in self._spilled:
                self._spilled[node, name] = self._states.bytes_of(model)
                self._away[model.id] = Away.SPILLED

    def unsure(self, gang_id: str) -> None:
        """A new head cannot know how far a spill or a refill of the gang's deployments had come."""
        if self._core.config.nvme is not None:
            for model in self._of(gang_id):
                self._away.setdefault(model.id, Away.UNSURE)

    def unknown(self, model: Model) -> None:
        """The engine host of the deployment, if there is one, has yet to adopt it."""
        self._away[model.id] = Away.UNKNOWN

    def left_behind(self, gang_id: str) -> set[tuple[str, str]]:
        """What a gang without an engine has: node and name of each slab. The next engine has yet to adopt them."""
        found = set()
        for model in self._of(gang_id):
            if not self._unborn(model):
                self.unknown(model)
                gpus = self._states.gang(model).gpus
                found |= {(node_of(gpu), name_of(model.id, rank)) for rank, gpu in enumerate(gpus)}
        return found

    async def engine_ends(self, gang_id: str) -> None:
        """The engine of a gang that sleeps is about to be ended: what it holds stays where it is."""
        for model in self._of(gang_id):
            if not self._unborn(model):
                async with self._locks[model.id]:
                    self.unknown(model)

    def forget(self, model: Model) -> None:
        """The deployment is gone."""
        self._away.pop(model.id, None)
        self._anew.pop(model.id, None)
        self._used.pop(model.id, None)
        self._locks.pop(model.id, None)
        for key in [key for key in self._spilled if _model_of(key[1]) == model.id]:
            del self._spilled[key]

    def used(self, deployment: str) -> None:
        """A call of the deployment ended now."""
        self._used[deployment] = self._core.now_us()

    def report(self) -> dict[str, dict[str, object]]:
        """By node, for the pool's status: bytes of host memory and NVMe, promised of both, spilled by deployment."""
        config, floor = self._core.config, self._core.scheduler.floor
        found: dict[str, dict[str, object]] = {}
        for node in dict.fromkeys(map(node_of, floor.gpus)):
            spilled: dict[str, int] = defaultdict(int)
            for (at, name), size in self._spilled.items():
                if at == node:
                    spilled[_model_of(name)] += size
            found[node] = {
                "host_bytes": config.host.bytes,
                "nvme_bytes": config.nvme.bytes if config.nvme else 0,
                "promised_bytes": floor.host_used(node),
                "spilled": dict(spilled),
            }
        return found

    # -- in ------------------------------------------------------------------------------------------------------------

    async def bring_gang(self, gang_id: str, patient: bool, left: Iterable[str] = ()) -> None:
        """Have what the gang's open calls need in memory. Damaged deployments are given up.

        patient: wait a while for room. left: gangs that have left their devices although the scheduler does not know
        it yet. Raises OrderFailed (no room) and PlexrlError.
        """
        group = self._gangs.find(gang_id)[0].placed
        for model in self._of(gang_id):
            if group.kind == "full" or self._waiting(model):
                await self.bring(model, patient, left)

    async def bring(self, model: Model, patient: bool = True, left: Iterable[str] = ()) -> None:
        """Have a deployment's slabs in memory, and its engine host know where they are. As `bring_gang`.

        Without an engine host they are in memory only; the next one is told when this is called again.
        """
        if model.id not in self._away:
            return
        gang = self._states.gang(model)
        async with self._locks[model.id]:
            if model.id not in self._away:
                return
            begun = time.monotonic()
            try:
                slabs = [await self._fill(model, rank, patient, left) for rank in range(len(gang.gpus))]
                known = await self._settle(model, slabs)
            except OrderFailed as error:
                if error.category != "damaged":
                    raise
                known = await self._replace(model, str(error))
            if known:
                self._away.pop(model.id, None)
            self._tell(gang.id, time.monotonic() - begun)

    async def _settle(self, model: Model, slabs: list[Slab]) -> bool:
        """Tell the engine host where they are. False when there is none. Raises OrderFailed, `damaged`: not whole."""
        gang, away = self._states.gang(model).id, self._away.get(model.id)
        if away is None or (away is Away.UNKNOWN and gang not in self._gangs.hosts):
            return False  # it has ended meanwhile, or waits for its engine
        if away is not Away.UNKNOWN:
            try:
                await self._gangs.order(gang, "rehome", {"deployment": model.id, "slabs": slabs})
            except OrderFailed:
                # It refuses where the state is on a device: then it knows them.
                if away is Away.SPILLED:
                    raise
            return True
        folder = self._anew.get(model.id)
        try:
            if folder is None:
                await self._states.adopt(model, slabs)
            else:
                await self._states.restore(model, slabs, folder)
                self.restored += 1
                log.warning("%s goes on from %s, which is the state that it had", model.id, folder)
        except OrderFailed as error:
            raise OrderFailed(str(error), "damaged") from error
        self._anew.pop(model.id, None)
        return True

    async def _replace(self, model: Model, why: str) -> bool:
        """What was left cannot be used: make it anew from its checkpoint, where that is the same, or give it up.

        As `_settle`, but for what is damaged.
        """
        gang = self._states.gang(model)
        log.error("the state of %s is damaged: %s", model.id, why)
        folder = "" if model.id in self._anew else self.checkpoint_of(model)
        if not folder:
            await self.on_damaged(model, why)
            return False
        await self._gangs.let_go(gang.id, "drop", {"deployment": model.id})
        self.unknown(model)
        self._anew[model.id] = folder
        await self._states.free(model)
        self._spilled = {key: size for key, size in self._spilled.items() if _model_of(key[1]) != model.id}
        try:
            return await self._settle(model, [await self._states.slab(model, rank) for rank in range(len(gang.gpus))])
        except OrderFailed as error:
            if error.category == "damaged":
                await self.on_damaged(model, f"{why}; and its checkpoint was not read: {error}")
                return False
            raise

    async def _fill(self, model: Model, rank: int, patient: bool, left: Iterable[str]) -> Slab:
        """The slab of one rank, which is in its node's memory now."""
        gpu = self._states.gang(model).gpus[rank]
        node, name = node_of(gpu), name_of(model.id, rank)
        index = int(gpu.rpartition(":")[2])
        if (node, name) not in self._spilled:
            return await self._states.slab(model, rank)
        refill = m.Refill(id=0, name=name, gpu=index)
        value = await self._slabs.order(node, refill, _MOVE_S, left, patient)
        self._spilled.pop((node, name), None)
        self._core.scheduler.bandwidth.refilled(node, int(value["bytes"]), float(value["seconds"]))
        return m.slab_of(value["slab"])

    # -- out -----------------------------------------------------------------------------------------------------------

    async def make_room(self, node: str, left: Iterable[str]) -> bool:
        """Spill one deployment of the node's memory. False when nobody may leave it."""
        if self._core.config.nvme is None:
            return False
        async with self._looking[node]:
            refused: set[str] = set()
            while True:
                candidates = [c for c in self._candidates(set(left)) if c.deployment not in refused]
                chosen = coldest(candidates, node)
                if chosen is None:
                    return False
                if await self._spill(self._core.book.models[chosen]):
                    return True
                refused.add(chosen)

    def _candidates(self, left: set[str]) -> list[Candidate]:
        core = self._core
        found = []
        for model in core.book.models.values():
            unknown = self._away.get(model.id) is Away.UNKNOWN
            if model.ended or (model.id in self._away and not unknown) or self._unborn(model):
                continue
            if model.created.group not in core.scheduler.groups:
                continue
            (state,) = core.scheduler.groups[model.created.group]
            lora = model.created.lora_rank is not None
            # Adapters of a gang that is on its device may be in memory all the same: its engine host knows.
            asleep = state.residency is Residency.HOST or state.id in left or (lora and not self._waiting(model))
            if unknown and state.unbuilt:
                asleep = not state.building
            if asleep and not self._locks[model.id].locked() and (unknown or state.id in self._gangs.hosts):
                nodes: dict[str, int] = defaultdict(int)
                for rank, gpu in enumerate(state.gpus):
                    if (node_of(gpu), name_of(model.id, rank)) not in self._spilled:
                        nodes[node_of(gpu)] += self._states.bytes_of(model)
                found.append(
                    Candidate(
                        deployment=model.id,
                        nodes=nodes,
                        waiting=self._waiting(model),
                        next_use_us=state.next_use(core.now_us()),
                        used_us=self._used.get(model.id, 0),
                    )
                )
        return found

    async def _spill(self, model: Model) -> bool:
        """Move a deployment's slabs to NVMe. False when it is where it was."""
        gang = self._states.gang(model)
        async with self._locks[model.id]:
            if model.id not in self._away:
                try:
                    await self._gangs.order(gang.id, "spill", {"deployment": model.id})
                except PlexrlError as error:
                    log.info("%s is not spilled: %s", model.id, error)
                    return False
                self._away[model.id] = Away.SPILLED
            try:
                for rank, gpu in enumerate(gang.gpus):
                    node, name = node_of(gpu), name_of(model.id, rank)
                    if (node, name) in self._spilled:
                        continue
                    value = await self._core.links.order(f"agent:{node}", m.Spill(id=0, name=name), _MOVE_S)
                    self._spilled[node, name] = int(value["bytes"])
                    self._core.scheduler.bandwidth.spilled(node, int(value["bytes"]), float(value["seconds"]))
            except PlexrlError as error:
                # No room on NVMe: what stayed in memory is found there when it is brought.
                log.warning("%s is not spilled: %s", model.id, error)
                return any(_model_of(name) == model.id for _, name in self._spilled)
            finally:
                self._tell(gang.id)
            log.info("%s is on NVMe now", model.id)
            return True

    # -- both ----------------------------------------------------------------------------------------------------------

    def _tell(self, gang_id: str, spent_s: float = 0.0) -> None:
        """What a switch of the gang takes longer now for its refill, and what one that is under way has taken."""
        sizes = [(node, size) for (node, name), size in self._spilled.items() if self._at(name) == gang_id]
        self._core.scheduler.refills(gang_id, sizes, round(spent_s * 1e6))

    def _at(self, name: str) -> str:
        model = self._core.book.models.get(_model_of(name))
        return self._states.gang(model).id if model else ""

    def _of(self, gang_id: str) -> list[Model]:
        group = self._gangs.find(gang_id)[0].placed
        return self._core.book.live_models(group.spec.group) if group.spec.role is Role.TRAIN else []

    def _unborn(self, model: Model) -> bool:
        born = self._core.book.entries.get(f"{model.id}:0")
        return born is not None and born.ended is None

    def _waiting(self, model: Model) -> bool:
        book = self._core.book
        return any(
            book.entries[id].accepted.call.deployment == model.id for id in book.open_calls.get(model.created.job, ())
        )


def _model_of(name: str) -> str:
    """The deployment whose slab has this name."""
    return name.removeprefix("state:").rpartition(":")[0]
