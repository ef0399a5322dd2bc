"""Worker groups: found, placed, and ended with what is on them."""

import asyncio
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from msgspec import structs

from plexrl.pool.book import Group, Model
from plexrl.pool.core import Core
from plexrl.pool.gangs import Gangs, nodes_of
from plexrl.pool.needs import beside_extent, group_sizes, host_bytes
from plexrl.pool.profiles import Profiles
from plexrl.pool.slabs import Slabs
from plexrl.pool.snapshots import Snapshots
from plexrl.pool.states import States
from plexrl.pool.tiers import Tiers
from plexrl.scheduler import Action
from plexrl.types import DoesNotFit, Gang, GroupSpec, JobClass, Placement, Role, records


class Asked(NamedTuple):
    """A group that is to be placed. model: the owning deployment of a full-parameter one, else ""."""

    spec: GroupSpec
    base: str
    kind: str
    model: str


class Groups:
    """The worker groups of a pool and what is on them. asked: those that wait for a place, by id."""

    perform: Callable[[Iterable[Action]], None]
    """Carries out the scheduler's actions; set by who can."""

    def __init__(self, core: Core, profiles: Profiles):
        self._core = core
        self._profiles = profiles
        self.asked: dict[str, Asked] = {}
        self.slabs = Slabs(core)
        self.gangs = Gangs(core, self.slabs)
        self.gangs.on_kept = profiles.kept
        self.states = States(core, self.gangs, self.slabs)
        self.tiers = Tiers(core, self.gangs, self.slabs, self.states)
        self.snapshots = Snapshots(core, self.gangs, self.slabs)

    # -- finding and placing -------------------------------------------------------------------------------------------

    def find(self, base: str, role: Role, kind: str, model: str, owner: str) -> Group | None:
        """The live group for this use. LoRA groups of a base are shared by all jobs, unless jobs are isolated."""
        isolated = self._core.config.scheduler.placement == "isolated"
        for group in self._core.book.groups.values():
            placed = group.placed
            if (
                not group.ended
                and (placed.base, placed.spec.role, placed.kind, placed.model) == (base, role, kind, model)
                and (kind == "full" or not isolated or placed.spec.owner == owner)
            ):
                return group
        return None

    def ensure(self, base: str, role: Role, kind: str, model: str, owner: str) -> str:
        """The id of the group for this use, placed now if there is none yet; the scheduler then wants a tick.

        model: the owning deployment of a full-parameter group, else "". Where a trainer was let in, its samplers are
        placed if their bytes fit, however loaded the GPUs are. Raises DoesNotFit, BadInput.
        """
        found = self.find(base, role, kind, model, owner)
        if found is not None:
            return found.placed.spec.group
        core = self._core
        spec = self._spec(base, role, kind, owner, self._name(base, role, kind))
        try:
            placement, actions = core.scheduler.place(core.now_us(), spec), []
        except DoesNotFit:
            if role is Role.TRAIN or self.find(base, Role.TRAIN, kind, model, owner) is None:
                raise
            placement, actions = self._squeeze(spec)
        self._keep(Asked(spec, base, kind, model), placement)
        self.perform(actions)
        return spec.group

    def ask(self, base: str, kind: str, model: str, owner: str, group: str = "") -> str:
        """A trainer that finds no place now waits for one; its id. `placed` ends the wait, `withdraw` gives it up.

        group: its id, when a new head asks again. Raises DoesNotFit when the empty pool would be too small.
        """
        core = self._core
        group = group or self._name(base, Role.TRAIN, kind)
        spec = self._spec(base, Role.TRAIN, kind, owner, group)
        actions = core.scheduler.request(core.now_us(), owner, [spec])
        self.asked[group] = Asked(spec, base, kind, model)
        self.perform(actions)
        return group

    def placed(self, placements: Iterable[Placement]) -> None:
        """Groups that were asked for have their places."""
        for placement in placements:
            self._keep(self.asked.pop(placement.group), placement)

    def withdraw(self, group: str) -> None:
        """Nobody wants the group any more for which a place was asked."""
        core = self._core
        gone = self.asked.pop(group, None)
        if gone is None:
            return
        owner = gone.spec.owner
        self.perform(core.scheduler.withdraw(core.now_us(), owner))
        for asked in [asked for asked in self.asked.values() if asked.spec.owner == owner]:
            self.perform(core.scheduler.request(core.now_us(), owner, [asked.spec]))

    def _keep(self, asked: Asked, placement: Placement) -> None:
        self._core.commit(
            records.GroupPlaced(
                now_us=self._core.now_us(),
                spec=asked.spec,
                placement=placement,
                base=asked.base,
                kind=asked.kind,
                model=asked.model,
            )
        )

    def _squeeze(self, spec: GroupSpec) -> tuple[Placement, list[Action]]:
        """Place a group whatever stretch that predicts. Raises DoesNotFit for its bytes."""
        core = self._core
        scheduler, now_us = core.scheduler, core.now_us()
        anyhow = structs.replace(scheduler.policy, max_stretch=dict.fromkeys(JobClass, math.inf))
        placement = scheduler.floor.choose(spec, anyhow, scheduler.tenant(spec.owner))
        # The scheduler takes up a group that has its place as one whose engines are gone, and builds them.
        scheduler.floor.vacate(spec.group)
        gangs = [gang.id for gang in placement.gangs]
        actions = scheduler.restore(now_us, placement, spec, resident=False, dead=gangs)
        for gang in gangs:
            actions += scheduler.rebuild(now_us, gang)
        return placement, actions

    def _name(self, base: str, role: Role, kind: str) -> str:
        book = self._core.book
        known = {*book.groups, *self.asked, *(model.created.group for model in book.models.values())}
        return f"{base.replace('/', '_')}.{kind}.{role}.{len(known) + 1}"

    def _spec(self, base: str, role: Role, kind: str, owner: str, group: str) -> GroupSpec:
        config = self._core.config.models[base]
        key = self._profiles.key(base, role, kind, owner)
        sizes, residual = group_sizes(config, role, kind), self._profiles.residual(key)
        return GroupSpec(
            group=group,
            role=role,
            owner=owner,
            gang_size=config.train.gpus if role is Role.TRAIN else 1,
            replicas=1 if role is Role.TRAIN else config.sample.replicas,
            device_bytes=sizes.device_bytes + beside_extent(self._core.config.device.kind, sizes, residual),
            host_bytes=host_bytes(config, role, kind),
            residual_bytes=residual,
            duty=self._profiles.duty(key),
        )

    def gangs_of(self, group: str) -> tuple[Gang, ...]:
        """The gangs of a group."""
        return self._core.book.groups[group].placed.placement.gangs

    async def retire(self, group_id: str, reason: str) -> bool:
        """End a group: its processes, its place, its host memory. False when another has begun to.

        When it returns nothing of the group runs any more, and the scheduler may give its place away.
        """
        core = self._core
        group = core.book.groups[group_id]
        if group.ended:
            return False
        self._profiles.end(group_id)
        await core.commit(records.GroupEnded(now_us=core.now_us(), group=group_id, reason=reason))
        gangs = group.placed.placement.gangs
        await asyncio.gather(*(self.gangs.kill(gang.id) for gang in gangs))
        for gang in gangs:
            for node in nodes_of(gang):
                await self.slabs.free(node, f"park:{gang.id}")
        return True

    async def close(self, model: Model) -> list[str]:
        """Take an ended deployment off its gang and free its memory; retire groups that served it alone: their ids.

        Versions that sessions still sample from stay, with their samplers.
        """
        core, created = self._core, model.created
        self.withdraw(created.group)
        group = core.book.groups.get(created.group)
        if group is None:
            return []
        for version in core.book.model_versions(model.id):
            await self.snapshots.settle(version)
        full = group.placed.kind == "full"
        isolated = core.config.scheduler.placement == "isolated"
        retired = []
        if full or (isolated and not core.book.live_models(created.group)):
            sampler = self.find(created.base, Role.SAMPLE, group.placed.kind, model.id if full else "", created.job)
            for one in (group, None if sampler is None or self._read(sampler) else sampler):
                if one is not None and await self.retire(one.placed.spec.group, f"{model.id} ended"):
                    retired.append(one.placed.spec.group)
        elif not group.ended and not await self.states.drop(model):
            return retired
        await self.states.free(model)
        self.tiers.forget(model)
        return retired

    async def retire_unread(self) -> list[str]:
        """Retire samplers that outlived whom they were made for, when nobody samples from them any more: their ids."""
        core, retired = self._core, []
        isolated = core.config.scheduler.placement == "isolated"
        for name, group in list(core.book.groups.items()):
            placed = group.placed
            if group.ended or placed.spec.role is not Role.SAMPLE:
                continue
            alone = core.book.models[placed.model].ended if placed.model else ""
            if isolated and not placed.model:
                alone = core.book.jobs[placed.spec.owner].ended
            if alone and not self._read(group) and await self.retire(name, "nobody samples from it"):
                retired.append(name)
        return retired

    def _read(self, sampler: Group) -> bool:
        """Whether a session that lives samples from a version that these samplers serve."""
        book = self._core.book
        for created in [book.models[v.published.model].created for v in book.versions.values() if v.readers]:
            kind, model = ("lora", "") if created.lora_rank is not None else ("full", created.model)
            if self.find(created.base, Role.SAMPLE, kind, model, created.job) is sampler:
                return True
        return False

    async def tidy(self, node: str, slabs: tuple[str, ...]) -> None:
        """After a change of the head: free what only the last one knew how to free."""
        book = self._core.book
        for slab in slabs:
            kind, _, rest = slab.partition(":")
            match kind:
                case "state":
                    model = book.models.get(rest.rpartition(":")[0])
                    needed = model is not None and not model.ended
                case "version":
                    needed = rest in book.versions and node in book.versions[rest].nodes
                case "park":
                    needed = rest in self.gangs.hosts
                case _:
                    continue
            if not needed:
                await self.slabs.free(node, slab)
