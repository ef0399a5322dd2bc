"""What agents and engine hosts say to the head: who is there, what ended, what stopped."""

import asyncio
import logging
import time

from plexrl.pool import messages as m
from plexrl.pool.api import Api
from plexrl.pool.core import Core
from plexrl.pool.deployments import Deployments
from plexrl.pool.groups import Groups
from plexrl.pool.turns import Turns
from plexrl.types import Gang, Unavailable

log = logging.getLogger("plexrl.head")
_AGENTS_S = 120.0
_HOSTS_S = 600.0
_PAUSE_S = 120.0


class Reception:
    """agents: by node. stop: set when the head is to end.

    What comes before the head knows what it takes up is kept until `listen`.
    """

    def __init__(
        self, core: Core, groups: Groups, turns: Turns, deployments: Deployments, api: Api, stop: asyncio.Event
    ):
        self._core = core
        self._groups = groups
        self._turns = turns
        self._deployments = deployments
        self._api = api
        self._stop = stop
        self._arrived = asyncio.Event()
        self._paused: dict[str, asyncio.Future] = {}
        self._early: list[tuple[str, m.Message]] | None = []
        self.agents: dict[str, m.AgentHello] = {}

    @property
    def gpus(self) -> tuple[str, ...]:
        """Of all agents, by node and index."""
        return tuple(gpu for agent in sorted(self.agents.values(), key=lambda a: a.node) for gpu in agent.gpus)

    async def agents_come(self, nodes: int) -> None:
        """Wait for so many agents, or for the end. Raises Unavailable when they do not come."""
        deadline = time.monotonic() + _AGENTS_S
        while len(self.agents) < nodes and not self._stop.is_set():
            self._arrived.clear()
            try:
                async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                    await self._arrived.wait()
            except TimeoutError:
                raise Unavailable(
                    f"{len(self.agents)} of {nodes} agents came within {_AGENTS_S:.0f} s",
                    "See the agents' output in the pool's Slurm log",
                ) from None

    def listen(self) -> None:
        """Hear what came early, and from now on everything at once."""
        early, self._early = self._early or [], None
        for name, message in early:
            self.receive(name, message)

    # -- who is there --------------------------------------------------------------------------------------------------

    def hello(self, name: str, message: m.Message) -> bool:
        """A peer is connected, perhaps again. False: it is none of ours, and is told to end."""
        match message:
            case m.AgentHello():
                self._meet(name, message)
            case m.HostHello():
                if not self._groups.gangs.hello(message):
                    log.warning("an engine host of %s is not ours any more: it is told to end", message.gang)
                    return False
                if message.gang in self._paused:
                    self._core.links.send(name, m.Pause())
                if self._early is None:
                    for outcome in message.outcomes:
                        self._turns.outcome(message.gang, outcome)
                    self._turns.repair(message.gang)
        return True

    def _meet(self, name: str, agent: m.AgentHello) -> None:
        """An agent is there, for the first time or again; another one in place of one that ended has lost its node."""
        before = self.agents.get(agent.node)
        self.agents[agent.node] = agent
        self._groups.tiers.met(agent.node, agent.spilled)
        self._groups.snapshots.met(agent.node, agent.spilled)
        self._arrived.set()
        if before is not None and before.birth != agent.birth:
            self._core.links.forget(name)
            if self._early is None:
                for gang in self._groups.gangs.node_lost(agent.node):
                    self._deployments.gang_lost(gang, f"the agent of {agent.node} ended")
        elif self._early is None:
            for gang, build in self._groups.gangs.missing(agent.node, set(agent.children)).items():
                if self._groups.gangs.rank_ended(gang, build, "its process is gone"):
                    self._deployments.gang_lost(gang, "its process is gone")

    async def whole(self, gangs: dict[str, Gang]) -> list[str]:
        """Gangs whose ranks all live, when their leaders have said hello (one may still be building)."""
        deadline = time.monotonic() + _HOSTS_S
        while True:
            ended = {(x.gang, x.rank, x.build) for _, x in self._early or () if isinstance(x, m.ChildEnded)}
            alive = {child[:2] for agent in self.agents.values() for child in agent.children if child not in ended}
            whole = [name for name, gang in gangs.items() if {(name, rank) for rank in range(len(gang.gpus))} <= alive]
            there = [name for name in whole if name in self._groups.gangs.hosts]
            if len(there) == len(whole) or time.monotonic() > deadline or self._stop.is_set():
                return there
            await asyncio.sleep(0.05)

    async def end_orphans(self, gangs: set[str]) -> None:
        """Engine hosts of groups that ended while the last head could not tell them."""
        for agent in self.agents.values():
            for gang in {child[0] for child in agent.children} - gangs:
                await self._groups.gangs.kill_on(agent.node, gang)

    # -- what they say -------------------------------------------------------------------------------------------------

    async def pause(self, gang: str) -> tuple[str, ...] | None:
        """The calls that the gang holds, now that it has stopped; None when it does not answer."""
        future = self._paused[gang] = asyncio.get_running_loop().create_future()
        self._core.links.send(f"gang:{gang}", m.Pause())
        try:
            return await asyncio.wait_for(future, _PAUSE_S)
        except TimeoutError:
            return None
        finally:
            del self._paused[gang]

    def receive(self, name: str, message: m.Message) -> None:
        """Anything but a hello or a reply."""
        gang = name.removeprefix("gang:")
        if isinstance(message, m.Paused) and gang in self._paused:
            if not self._paused[gang].done():
                self._paused[gang].set_result(message.unfinished)
            return
        if self._early is not None:
            self._early.append((name, message))
            return
        match message:
            case m.Progress():
                self._api.progress.note(message.call, message.tokens, message.body)
            case m.Ended():
                self._turns.outcome(gang, message.outcome)
            case m.Paused():
                if self._groups.gangs.ours(gang, message.build):
                    self._turns.paused(gang, message.unfinished)
            case m.ChildEnded() if not self._stop.is_set():
                self._child_ended(message)

    def _child_ended(self, message: m.ChildEnded) -> None:
        why = f"rank {message.rank} ended with code {message.code}"
        if message.tail.strip():
            why += f": {message.tail.strip().splitlines()[-1][:300]}"
        if self._groups.gangs.rank_ended(message.gang, message.build, why):
            self._deployments.gang_lost(message.gang, why)
