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
from plexrl.pool.control import Control, keys_of, write_control
from plexrl.pool.core import Core
from plexrl.pool.deployments import Deployments
from plexrl.pool.door import Door, Gateway
from plexrl.pool.governor import Governor
from plexrl.pool.groups import Groups
from plexrl.pool.harden import harden
from plexrl.pool.journal import Journal, epochs, replay
from plexrl.pool.layout import Layout
from plexrl.pool.links import Links
from plexrl.pool.profiles import Profiles
from plexrl.pool.reception import Reception
from plexrl.pool.rules import scheduler_of
from plexrl.pool.takeover import Takeover
from plexrl.pool.turns import Turns
from plexrl.pool.upkeep import Upkeep
from plexrl.pool.usage import Usage
from plexrl.types import BadInput, Epoch, Peer, PlexrlError, Unavailable, records
from plexrl.wire.registry import Live, Registry

log = logging.getLogger("plexrl.head")
_FULL_S = 5.0
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
        self._usage = Usage()

        def take(record: records.Record) -> None:
            ledger(record)
            if isinstance(record, records.SpanClosed):
                self._usage.add(record.span, self._core.book)

        self._core = Core(config, Book(), self._layout, take)
        self._profiles = Profiles(self._core)
        self._groups = Groups(self._core, self._profiles)
        self._turns = Turns(self._core, self._groups)
        self._deployments = Deployments(self._core, self._groups, self._turns)
        self._api = Api(self._core, self._groups, self._turns, self._deployments)
        self._make_admission = admission
        self._gateway = gateway
        self._stop = asyncio.Event()
        self._reception = Reception(self._core, self._groups, self._turns, self._deployments, self._api, self._stop)
        self._failure = ""
        self._failed = asyncio.Event()
        self._governor: Governor | None = None

    async def run(self) -> int:
        """Serve until told to stop. Exit code 0 in order, 75 when another head should be tried."""
        if os.getuid() == 0:
            raise BadInput("a pool's head does not run as root", "Start it under the pool's service account")
        harden()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        loop.add_signal_handler(signal.SIGHUP, lambda: self._governor and self._governor.reload())
        self._layout.make()
        self._layout.sweep()
        adopt = self._remember()
        context = zmq.Context()
        await self._open(context, adopt)
        tasks: list[asyncio.Task] = []
        try:
            await self._reception.agents_come(self._allocation.nodes)
            await self._take_up(adopt)
            self._door.start()
            self._announce("ready")
            await self._let_jobs(True)
            self._turns.perform(self._core.scheduler.startup_done(self._core.now_us()))
            log.info("pool %s is ready: %s", self._name, ", ".join(self._reception.gpus))
            stop = asyncio.create_task(self._stop.wait())
            parts = self._groups, self._turns, self._deployments, self._profiles, self._admission
            upkeep = Upkeep(self._core, *parts, self._end_job, self._publish)
            always = upkeep.watch(), upkeep.account(lambda: self._live.state), self._governor.watch()
            tasks = [*map(asyncio.create_task, always), stop]
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
        server, inner, client = (
            keys_of(self._layout.run / name, adopt) for name in ("door.json", "inner.json", "keys.json")
        )
        core.links = Links(
            context,
            f"tcp://{self._config.interface}:0",
            inner,
            client.public,
            epoch,
            self._reception.hello,
            self._reception.receive,
        )
        self._admission = self._make_admission(instance)
        self._door = Door(core, self._api, self._gateway, self._admission, self._name)
        self._door.on_attached = self._turns.enroll
        self._door.on_bye = self._bye
        declared = self._registry.declared(self._name)
        parts = core, self._api, self._turns, self._admission, self._usage
        self._governor = self._door.governor = Governor(*parts, declared.config, self._end_job)
        private = declared.kind == "private"
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

    def _announce(self, state: str) -> None:
        self._live = msgspec.structs.replace(self._live, state=state)
        self._registry.publish(self._live)

    async def _take_up(self, adopt: bool) -> None:
        """Make the scheduler, take up or give up what the book knows, and let what came early be heard."""
        core, book, gpus = self._core, self._core.book, self._reception.gpus
        core.scheduler = scheduler_of(self._config, gpus)
        self._profiles.teach(core.scheduler)
        begun = book.last_span_us if adopt else self._allocation.allocated_us
        core.scheduler.start(min(begun or core.now_us(), core.now_us()))
        takeover = Takeover(core, self._groups, self._turns, self._deployments, self._reception)
        takeover.acquaint(self._usage)
        await self._written(
            records.EpochStarted(
                now_us=core.now_us(),
                epoch=self._epoch,
                pool=self._name,
                instance=self._live.instance,
                gpus=gpus,
                slurm_job=self._allocation.slurm_job,
                allocated_us=self._allocation.allocated_us,
            )
        )
        if adopt:
            await takeover.adopt()
        else:
            takeover.give_up()
        self._reception.listen()

    async def _written(self, record: records.Record) -> None:
        """Commit and wait until it is on disk. Raises Unavailable when the journal cannot be written."""
        written = self._core.commit(record)
        failed = asyncio.create_task(self._failed.wait())
        await asyncio.wait([written, failed], return_when=asyncio.FIRST_COMPLETED)
        failed.cancel()
        if not written.done():
            raise Unavailable(f"the journal cannot be written: {self._failure}")

    # -- serving -------------------------------------------------------------------------------------------------------

    def _bye(self, peer: Peer) -> None:
        if self._live.address.startswith("ipc://"):
            self._core.spawn(self._end_job(peer.job, "its program ended"))

    async def _end_job(self, job: str, reason: str) -> None:
        self._door.dismiss(job)
        await self._deployments.end_job(job, reason)
        self._turns.dismiss(job)

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
            for node in self._reception.agents:
                core.links.send(f"agent:{node}", m.Shutdown())
            self._profiles.save()
            self._publish(core.now_us())
            self._layout.clear()
        await asyncio.sleep(0.3)
        await core.close()
        core.links.close()
        core.journal.close()
        context.destroy(linger=200)
