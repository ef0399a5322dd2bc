"""What a new head makes of what the journal knows: taken up with the engine hosts that are there, or given up."""

import asyncio

from plexrl.pool import messages as m
from plexrl.pool.core import Core
from plexrl.pool.deployments import Deployments
from plexrl.pool.gangs import version_left
from plexrl.pool.groups import Groups
from plexrl.pool.reception import Reception
from plexrl.pool.rules import set_shares
from plexrl.pool.turns import Turns
from plexrl.pool.usage import Usage
from plexrl.types import records


class Takeover:
    """Once in a head's life, when its scheduler is there and before anybody is heard."""

    def __init__(self, core: Core, groups: Groups, turns: Turns, deployments: Deployments, reception: Reception):
        self._core = core
        self._groups = groups
        self._turns = turns
        self._deployments = deployments
        self._reception = reception

    def acquaint(self, usage: Usage) -> None:
        """Tell the scheduler who its users are: their shares, what they have used, their jobs."""
        core = self._core
        set_shares(core.config, core.scheduler, core.now_us())
        usage.charge(core.scheduler)
        for job in core.book.jobs.values():
            if not job.ended:
                self._turns.enroll(job.attached)

    def give_up(self) -> None:
        """The allocation is another one: what was on its GPUs is gone."""
        core, book = self._core, self._core.book
        for model in book.models.values():
            if not model.ended:
                reason = f"the pool's allocation ended{model.resume}"
                core.commit(records.ModelEnded(now_us=core.now_us(), model=model.id, reason=reason, lost=True))
        for name, group in book.groups.items():
            if not group.ended:
                core.commit(records.GroupEnded(now_us=core.now_us(), group=name, reason="the pool's allocation ended"))
        for name, version in book.versions.items():
            if version.nodes:
                core.commit(records.VersionDropped(now_us=core.now_us(), version=name))
        for entry in [e for e in book.entries.values() if e.ended is None]:
            core.fail(entry.id, "the pool's allocation ended while the call was open", "server")

    async def adopt(self) -> None:
        """The engine hosts kept their state: pause them, take their groups up, and submit what was open again."""
        core, book = self._core, self._core.book
        groups = {name: group.placed for name, group in book.groups.items() if not group.ended}
        gangs = {gang.id: gang for placed in groups.values() for gang in placed.placement.gangs}
        await self._reception.end_orphans(set(gangs))
        there = await self._reception.whole(gangs)
        held = dict(zip(there, await asyncio.gather(*(self._reception.pause(gang) for gang in there)), strict=True))
        there = {gang: unfinished for gang, unfinished in held.items() if unfinished is not None}
        resident = {gang for gang in there if self._groups.gangs.hosts[gang].resident}
        outcomes = [(gang, outcome) for gang in there for outcome in self._groups.gangs.hosts[gang].outcomes]
        await asyncio.gather(*(self._groups.gangs.kill(gang) for gang in gangs if gang not in there))
        unbuilt = self._asleep(set(gangs), set(there))
        dead = gangs.keys() - there.keys() - unbuilt
        for placed in groups.values():
            self._turns.perform(
                core.scheduler.restore(core.now_us(), placed.placement, placed.spec, resident, dead, unbuilt)
            )
        for gang, unfinished in there.items():
            self._turns.held(gang, unfinished)
        self._deployments.ask_again()
        self._drop_lost_versions()
        for gang, outcome in outcomes:
            self._turns.outcome(gang, outcome)
        for gang in gangs:
            if gang in there:
                self._groups.tiers.unsure(gang)
                self._deployments.adopt(gang, self._groups.gangs.hosts[gang])
            elif gang in unbuilt:
                self._deployments.asleep(gang)
            else:
                self._deployments.gang_lost(gang, "its engine host did not come back to the new head")
        for model in list(book.models.values()):
            self._deployments.release(model)
        self._resume_samples({call: gang for gang, unfinished in there.items() for call in unfinished})
        self._deployments.finish_ends()
        for agent in self._reception.agents.values():
            core.spawn(self._groups.tidy(agent.node, (*agent.slabs, *agent.spilled)))

    def _asleep(self, gangs: set[str], there: set[str]) -> set[str]:
        """Gangs whose engines were ended while they slept, and what they left is in the nodes' memory or on NVMe."""
        core, agents = self._core, self._reception.agents
        slabs = {(agent.node, name) for agent in agents.values() for name in (*agent.slabs, *agent.spilled)}
        found = set()
        for gang in gangs:
            group, _ = self._groups.gangs.find(gang)
            if gang not in group.unbuilt:
                continue
            if gang in there:
                # The last head ended while it ended the engine, or had it built again.
                core.commit(records.Unbuilt(now_us=core.now_us(), gang=gang, built=True))
            elif self._groups.tiers.left_behind(gang) <= slabs:
                found.add(gang)
        return found

    def _drop_lost_versions(self) -> None:
        """An agent that is another one has not the memory that snapshots were in."""
        slabs = {agent.node: {*agent.slabs, *agent.spilled} for agent in self._reception.agents.values()}
        for name, version in self._core.book.versions.items():
            version_left(self._core, version, [n for n in version.nodes if f"version:{name}" not in slabs.get(n, ())])

    def _resume_samples(self, holders: dict[str, str]) -> None:
        """Submit open samples again; a replica that holds one which another one draws now is told to drop it."""
        core = self._core
        for entry in list(core.book.entries.values()):
            if entry.accepted is not None and entry.ended is None and entry.accepted.call.seq is None:
                self._turns.submit(entry.accepted.call)
        for call, gang in holders.items():
            at = core.scheduler.calls.get(call)
            if at is None or at[1].id != gang:
                core.links.send(f"gang:{gang}", m.Cancel(call=call))
