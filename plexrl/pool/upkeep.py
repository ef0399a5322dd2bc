"""What a head does again and again: jobs that ended, sessions that fell silent; status, spans, reports."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from plexrl.pool.admission import Admission
from plexrl.pool.core import Core
from plexrl.pool.deployments import Deployments
from plexrl.pool.groups import Groups
from plexrl.pool.profiles import Profiles
from plexrl.pool.status import Status
from plexrl.pool.turns import Turns
from plexrl.types import Peer

log = logging.getLogger("plexrl.head")
_CHECK_S = 5.0
_SPANS_S = 10
_PUBLISH_S = 60


class Upkeep:
    """end_job: ends a job with all that it has. publish(now_us): brings reports up to date."""

    def __init__(
        self,
        core: Core,
        groups: Groups,
        turns: Turns,
        deployments: Deployments,
        profiles: Profiles,
        admission: Admission,
        end_job: Callable[[str, str], Awaitable[None]],
        publish: Callable[[int], None],
    ):
        self._core = core
        self._groups = groups
        self._turns = turns
        self._deployments = deployments
        self._profiles = profiles
        self._admission = admission
        self._end_job = end_job
        self._publish = publish
        self._settling: asyncio.Task | None = None

    async def watch(self) -> None:
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
        if self._settling is None or self._settling.done():
            self._settling = core.spawn(self._settle())
        silent_us = core.now_us() - core.config.limits.session_timeout_us
        for name, session in list(core.book.sessions.items()):
            if not session.ended and session.beat_us < silent_us:
                await self._deployments.end_session(name, "no heartbeat came")

    async def _settle(self) -> None:
        """Versions to where they belong, and samplers away that nobody samples from."""
        await self._groups.snapshots.settle_all()
        for name in await self._groups.retire_unread():
            self._turns.remove(name)

    def _attached(self) -> list[Peer]:
        """Every job that has not ended, also those whose proxy has not come back to this head."""
        return [
            Peer(uid=j.attached.uid, user=j.attached.user, account=j.attached.account, job=j.attached.job)
            for j in self._core.book.jobs.values()
            if not j.ended
        ]

    async def account(self, state: Callable[[], str]) -> None:
        """Status and decisions each second, spans every ten, profiles and reports each minute."""
        turn = 0
        status = Status(
            self._core.layout, self._core, self._profiles, self._groups.tiers, self._turns.switches.sleepers
        )
        while True:
            status.write(state())
            self._turns.decisions.write(self._core.layout.run / "decisions.jsonl")
            await asyncio.sleep(1.0)
            turn += 1
            if turn % _SPANS_S == 0:
                self._turns.perform(self._core.scheduler.spans(self._core.now_us()))
            if turn % _PUBLISH_S == 0:
                self._profiles.save()
                await asyncio.to_thread(self._publish, self._core.now_us())
