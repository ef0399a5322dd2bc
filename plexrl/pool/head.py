"""The head: one asyncio process that admits jobs, journals, schedules and speaks to agents and engine hosts.

It may die at any moment. The next head of the same allocation replays the journal, meets the agents and engine hosts
again, and goes on; a head of another allocation finds the old one's deployments lost and says so.
"""

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable

import msgspec
import zmq

from plexrl.config import PoolConfig
from plexrl.pool import messages as m
from plexrl.pool.admission import Admission
from plexrl.pool.api import Api
from plexrl.pool.book import Book
from plexrl.pool.control import Control, write_control
from plexrl.pool.core import Core
from plexrl.pool.deployments import Deployments
from plexrl.pool.door import Door, Gateway
from plexrl.pool.groups import Groups
from plexrl.pool.harden import harden
from plexrl.pool.journal import Journal, epochs, replay
from plexrl.pool.layout import Layout
from plexrl.pool.links import Links
from plexrl.pool.profiles import Profiles
from plexrl.pool.rules import scheduler_of, set_shares
from plexrl.pool.status import Status
from plexrl.pool.turns import Turns
from plexrl.pool.usage import Usage
from plexrl.types import BadInput, Epoch, Gang, Peer, PlexrlError, Unavailable, records
from plexrl.wire.keys import Keys
from plexrl.wire.registry import Live, Registry

log = logging.getLogger("plexrl.head")
_AGENTS_S = 120.0
_HOSTS_S = 600.0
_FULL_S = 5.0
_PAUSE_S = 120.0
_CHECK_S = 5.0
_SPANS_S = 10
_PUBLISH_S = 60
_DRAIN_S = 15.0


class Allocation(msgspec.Struct, frozen=True, kw_only=True):
    """What the head runs in. slurm_job 0: none. nodes: how many agents to wait for. allocated_us: StartTime."""

    slurm_job: int
    nodes: int
    allocated_us: int


class Head:
    """One life of a pool's head."""

    def __init__(
        self,
        name: str,
        registry: Registry,
        config: PoolConfig,
        gateway: Gateway,
        admission: Callable[[str], Admission],
        ledger: Callable[[records.Record], None],
        publish: Callable[[int], None],
        allocation: Allocation,
        admit_jobs: Callable[[bool], None] | None = None,
    ):
        """admission: made for an instance. ledger takes every record; publish(now_us) brings reports up to date.

        admit_jobs(up): lets logical jobs start, or keeps them pending (a site pool's licences).
        """
        self._name = name
        self._registry = registry
        self._config = config
        self._allocation = allocation
        self._publish = publish
        self._admit_jobs = admit_jobs or (lambda up: None)
        self._layout = Layout(config.state_dir)
        self._core = Core(config, Book(), self._layout, ledger)
        self._profiles = Profiles(self._core)
        self._groups = Groups(self._core, self._profiles)
        self._turns = Turns(self._core, self._groups)
        self._deployments = Deployments(self._core, self._groups, self._turns)
        self._api = Api(self._core, self._groups, self._turns, self._deployments)
        self._make_admission = admission
        self._gateway = gateway
        self._usage = Usage()
        self._agents: dict[str, m.AgentHello] = {}
        self._arrived = asyncio.Event()
        self._paused: dict[str, asyncio.Future] = {}
        self._early: list[tuple[str, m.Message]] | None = []
        self._stop = asyncio.Event()
        self._failure = ""
        self._failed = asyncio.Event()

    async def run(self) -> int:
        """Serve until told to stop. Exit code 0 in order, 75 when another head should be tried."""
        if os.getuid() == 0:
            raise BadInput("a pool's head does not run as root", "Start it under the pool's service account")
        harden()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        self._layout.make()
        self._layout.sweep()
        adopt = self._remember()
        context = zmq.Context()
        await self._open(context, adopt)
        tasks: list[asyncio.Task] = []
        try:
            await self._meet_agents()
            await self._take_up(adopt)
            self._door.start()
            self._announce("ready")
            await self._let_jobs(True)
            self._turns.perform(self._core.scheduler.startup_done(self._core.now_us()))
            log.info("pool %s is ready: %s", self._name, ", ".join(self._gpus()))
            stop = asyncio.create_task(self._stop.wait())
            tasks = [asyncio.create_task(self._watch()), asyncio.create_task(self._account()), stop]
            for task in (await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED))[0] - {stop}:
                log.error("the head cannot go on", exc_info=task.exception())
                self._fail(f"{task.exception()}")
            await self._drain()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._close(context)
        return 75 if self._failure else 0

    # -- beginning -----------------------------------------------------------------------------------------------------

    def _remember(self) -> bool:
        """Replay the journal. True when the engine hosts of the last head may still be there."""
        book = self._core.book
        for record in replay(self._layout.journal):
            book.apply(record)
            if isinstance(record, records.SpanClosed):
                self._usage.add(record.span, book)
        for session in book.sessions.values():
            session.beat_us = self._core.now_us()
        started = book.started
        return started is not None and not book.orderly_end and started.slurm_job == self._allocation.slurm_job

    async def _open(self, context: zmq.Context, adopt: bool) -> None:
        core = self._core
        previous = epochs(self._layout.journal)
        restart = previous[-1].restart + 1 if adopt and previous else 0
        start = max(int(time.time()), previous[-1].start + 1 if previous else 0)
        epoch = Epoch(start, self._allocation.slurm_job, restart)
        instance = core.book.started.instance if adopt else f"{epoch.start:x}{os.urandom(4).hex()}"
        core.on_failure = self._disk_failed
        core.journal = await self._new_journal(epoch)
        server, inner, client = (self._keys(name, adopt) for name in ("door.json", "inner.json", "keys.json"))
        core.links = Links(
            context, f"tcp://{self._config.interface}:0", inner, client.public, epoch, self._hello, self._receive
        )
        self._admission = self._make_admission(instance)
        self._door = Door(core, self._api, self._gateway, self._admission, self._name)
        self._door.on_attached = self._turns.enroll
        self._door.on_bye = self._bye
        private = self._registry.declared(self._name).kind == "private"
        address = f"ipc://{self._layout.run}/door.sock" if private else f"tcp://{self._config.interface}:0"
        outer = self._door.open(context, address, server)
        self._live = Live(
            name=self._name,
            instance=instance,
            state="starting",
            address=outer,
            server_key=server.public,
            nonce=self._admission.nonce,
            service_uid=os.getuid(),
            slurm_job=self._allocation.slurm_job,
            epoch=str(epoch),
        )
        self._epoch = epoch
        self._announce("starting")
        write_control(self._layout.control, Control(address=core.links.address, server_key=inner.public, epoch=epoch))

    async def _new_journal(self, epoch: Epoch) -> Journal:
        """A full disk is waited for: engine hosts keep what they have meanwhile."""
        while True:
            try:
                return Journal(self._layout.journal, epoch, asyncio.get_running_loop(), self._disk_failed)
            except OSError as error:
                if self._stop.is_set():
                    raise
                log.critical("no journal can be written in %s (%s); trying again", self._layout.journal, error)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), _FULL_S)

    def _keys(self, name: str, keep: bool) -> Keys:
        """A key pair per start of the pool; a head that follows another in one allocation keeps it."""
        path = self._layout.run / name
        if not keep or not path.exists():
            path.unlink(missing_ok=True)
            Keys.generate().save(path)
        return Keys.load(path)

    def _announce(self, state: str) -> None:
        self._live = msgspec.structs.replace(self._live, state=state)
        self._registry.publish(self._live)

    async def _meet_agents(self) -> None:
        deadline = time.monotonic() + _AGENTS_S
        while len(self._agents) < self._allocation.nodes:
            self._arrived.clear()
            try:
                async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                    await self._arrived.wait()
            except TimeoutError:
                raise Unavailable(
                    f"{len(self._agents)} of {self._allocation.nodes} agents came within {_AGENTS_S:.0f} s",
                    "See the agents' output in the pool's Slurm log",
                ) from None
            if self._stop.is_set():
                return

    def _gpus(self) -> tuple[str, ...]:
        return tuple(gpu for agent in sorted(self._agents.values(), key=lambda a: a.node) for gpu in agent.gpus)

    async def _take_up(self, adopt: bool) -> None:
        """Make the scheduler, take up or give up what the book knows, and let what came early be heard."""
        core, book = self._core, self._core.book
        core.scheduler = scheduler_of(self._config, self._gpus())
        begun = book.last_span_us if adopt else self._allocation.allocated_us
        core.scheduler.start(min(begun or core.now_us(), core.now_us()))
        self._acquaint()
        await self._written(
            records.EpochStarted(
                now_us=core.now_us(),
                epoch=self._epoch,
                pool=self._name,
                instance=self._live.instance,
                gpus=self._gpus(),
                slurm_job=self._allocation.slurm_job,
                allocated_us=self._allocation.allocated_us,
            )
        )
        if adopt:
            await self._adopt()
        else:
            self._give_up()
        early, self._early = self._early or [], None
        for name, message in early:
            self._receive(name, message)

    def _acquaint(self) -> None:
        """Tell the scheduler who its users are: their shares, what they have used by the journal, their jobs."""
        core = self._core
        set_shares(self._config, core.scheduler, core.now_us())
        self._usage.charge(core.scheduler)
        for job in core.book.jobs.values():
            if not job.ended:
                self._turns.enroll(job.attached)

    def _give_up(self) -> None:
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
            if version.in_memory:
                core.commit(records.VersionDropped(now_us=core.now_us(), version=name))
        for entry in [e for e in book.entries.values() if e.ended is None]:
            core.fail(entry.id, "the pool's allocation ended while the call was open", "server")

    async def _adopt(self) -> None:
        """The engine hosts kept their state: pause them, take their groups up, and submit what was open again."""
        core, book = self._core, self._core.book
        groups = {name: group.placed for name, group in book.groups.items() if not group.ended}
        gangs = {gang.id: gang for placed in groups.values() for gang in placed.placement.gangs}
        await self._end_orphans(set(gangs))
        there = await self._whole(gangs)
        held = dict(zip(there, await asyncio.gather(*(self._pause(gang) for gang in there)), strict=True))
        there = {gang: unfinished for gang, unfinished in held.items() if unfinished is not None}
        resident = {gang for gang in there if self._groups.gangs.hosts[gang].resident}
        outcomes = [(gang, outcome) for gang in there for outcome in self._groups.gangs.hosts[gang].outcomes]
        await asyncio.gather(*(self._groups.gangs.kill(gang) for gang in gangs if gang not in there))
        dead = gangs.keys() - there.keys()
        for placed in groups.values():
            self._turns.perform(core.scheduler.restore(core.now_us(), placed.placement, placed.spec, resident, dead))
        self._deployments.ask_again()
        self._drop_lost_versions()
        for gang, outcome in outcomes:
            self._turns.outcome(gang, outcome)
        for gang in gangs:
            if gang in there:
                self._deployments.adopt(gang, self._groups.gangs.hosts[gang])
            else:
                self._deployments.gang_lost(gang, "its engine host did not come back to the new head")
        for model in list(book.models.values()):
            self._deployments.release(model)
        self._resume_samples({call: gang for gang, unfinished in there.items() for call in unfinished})
        self._deployments.finish_ends()
        for agent in self._agents.values():
            core.spawn(self._groups.tidy(agent.node, agent.slabs))

    async def _end_orphans(self, gangs: set[str]) -> None:
        """Engine hosts of groups that ended while the last head could not tell them."""
        for agent in self._agents.values():
            for gang in {child[0] for child in agent.children} - gangs:
                await self._groups.gangs.kill_on(agent.node, gang)

    async def _whole(self, gangs: dict[str, Gang]) -> list[str]:
        """Gangs whose ranks all live, when their leaders have said hello (one may still be building)."""
        deadline = time.monotonic() + _HOSTS_S
        while True:
            ended = {(x.gang, x.rank, x.build) for _, x in self._early or () if isinstance(x, m.ChildEnded)}
            alive = {child[:2] for agent in self._agents.values() for child in agent.children if child not in ended}
            whole = [name for name, gang in gangs.items() if {(name, rank) for rank in range(len(gang.gpus))} <= alive]
            there = [name for name in whole if name in self._groups.gangs.hosts]
            if len(there) == len(whole) or time.monotonic() > deadline or self._stop.is_set():
                return there
            await asyncio.sleep(0.05)

    async def _pause(self, gang: str) -> tuple[str, ...] | None:
        """The calls that the gang holds, now that it has stopped; None when it does not answer."""
        future = self._paused[gang] = asyncio.get_running_loop().create_future()
        self._core.links.send(f"gang:{gang}", m.Pause())
        try:
            return await asyncio.wait_for(future, _PAUSE_S)
        except TimeoutError:
            return None
        finally:
            del self._paused[gang]

    def _drop_lost_versions(self) -> None:
        """An agent that is another one has not the memory that snapshots were in."""
        slabs = {agent.node: set(agent.slabs) for agent in self._agents.values()}
        for name, version in self._core.book.versions.items():
            if version.in_memory and any(f"version:{name}" not in slabs[node] for node in version.published.nodes):
                self._core.commit(records.VersionDropped(now_us=self._core.now_us(), version=name))

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

    async def _written(self, record: records.Record) -> None:
        """Commit and wait until it is on disk. Raises Unavailable when the journal cannot be written."""
        written = self._core.commit(record)
        failed = asyncio.create_task(self._failed.wait())
        await asyncio.wait([written, failed], return_when=asyncio.FIRST_COMPLETED)
        failed.cancel()
        if not written.done():
            raise Unavailable(f"the journal cannot be written: {self._failure}")

    # -- serving -------------------------------------------------------------------------------------------------------

    def _hello(self, name: str, message: m.Message) -> bool:
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
        before = self._agents.get(agent.node)
        self._agents[agent.node] = agent
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

    def _receive(self, name: str, message: m.Message) -> None:
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

    def _bye(self, peer: Peer) -> None:
        if self._live.address.startswith("ipc://"):
            self._core.spawn(self._end_job(peer.job, "its program ended"))

    async def _end_job(self, job: str, reason: str) -> None:
        self._door.dismiss(job)
        await self._deployments.end_job(job, reason)
        self._turns.dismiss(job)

    async def _watch(self) -> None:
        """Jobs that ended, sessions that fell silent, gaps that never closed."""
        while True:
            await asyncio.sleep(_CHECK_S)
            try:
                await self._look_around()
            except Exception:
                # One job's trouble must not leave all others unwatched.
                log.exception("looking after jobs and sessions failed")

    async def _look_around(self) -> None:
        core = self._core
        self._deployments.check_gaps()
        for job, reason in (await self._admission.over(self._attached())).items():
            log.info("job %s is over: %s", job, reason)
            await self._end_job(job, reason)
        silent_us = core.now_us() - self._config.limits.session_timeout_us
        for name, session in list(core.book.sessions.items()):
            if not session.ended and session.beat_us < silent_us:
                await self._deployments.end_session(name, "no heartbeat came")

    def _attached(self) -> list[Peer]:
        """Every job that has not ended, also those whose proxy has not come back to this head."""
        return [
            Peer(uid=j.attached.uid, user=j.attached.user, account=j.attached.account, job=j.attached.job)
            for j in self._core.book.jobs.values()
            if not j.ended
        ]

    async def _account(self) -> None:
        """Status and decisions each second, spans every ten, profiles and reports each minute."""
        turn = 0
        status = Status(self._layout, self._core, self._profiles)
        while True:
            status.write(self._live.state)
            self._turns.decisions.write(self._layout.run / "decisions.jsonl")
            await asyncio.sleep(1.0)
            turn += 1
            if turn % _SPANS_S == 0:
                self._turns.perform(self._core.scheduler.spans(self._core.now_us()))
            if turn % _PUBLISH_S == 0:
                self._profiles.save()
                await asyncio.to_thread(self._publish, self._core.now_us())

    def _disk_failed(self, error: OSError) -> None:
        log.critical("the journal cannot be written (%s): the head ends; what was acknowledged is on disk", error)
        self._fail(str(error))

    def _fail(self, why: str) -> None:
        self._failure = why
        self._failed.set()
        self._stop.set()

    async def _let_jobs(self, up: bool) -> None:
        try:
            await asyncio.to_thread(self._admit_jobs, up)
        except PlexrlError as error:
            log.error("the pool's licences could not be %s: %s", "released" if up else "held", error)

    # -- ending --------------------------------------------------------------------------------------------------------

    async def _drain(self) -> None:
        """Grant nothing new and let open turns end, for a while."""
        core = self._core
        if self._failure:
            return
        self._announce("draining")
        await self._let_jobs(False)
        self._turns.perform(core.scheduler.drain(core.now_us()))
        deadline = time.monotonic() + _DRAIN_S
        while core.scheduler.turns and time.monotonic() < deadline:
            await asyncio.sleep(0.1)

    async def _close(self, context: zmq.Context) -> None:
        core = self._core
        self._door.close()
        self._registry.withdraw(self._name, self._live.instance)
        if hasattr(core, "scheduler") and not self._failure:
            self._turns.perform(core.scheduler.spans(core.now_us()))
            await self._written(records.EpochEnded(now_us=core.now_us(), reason="stopped"))
            for node in self._agents:
                core.links.send(f"agent:{node}", m.Shutdown())
            self._profiles.save()
            self._publish(core.now_us())
            self._layout.clear()
        await asyncio.sleep(0.3)
        await core.close()
        core.links.close()
        core.journal.close()
        context.destroy(linger=200)
