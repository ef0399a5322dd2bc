"""Futures and what else a job may ask: polls, cancellation, why it waits, which base models there are."""

import asyncio
import logging
import re

from plexrl.pool.api.access import on_disk
from plexrl.pool.api.models import Models
from plexrl.pool.book import Entry
from plexrl.pool.core import Core
from plexrl.pool.groups import Groups
from plexrl.pool.progress import Progress
from plexrl.pool.turns import Turns
from plexrl.types import ApiError, CallKind, Peer, answers, commands, records

log = logging.getLogger("plexrl.head")
HOLD_S = 25.0
_JOB = re.compile(r"\bjob ([0-9]+\.[0-9]+)")


class Futures:
    """Answers the commands about calls that were accepted, and the rare rest."""

    def __init__(self, core: Core, groups: Groups, turns: Turns, models: Models, progress: Progress):
        self._core = core
        self._groups = groups
        self._turns = turns
        self._models = models
        self._progress = progress

    async def retrieve(self, peer: Peer, command: commands.Retrieve) -> answers.Done | answers.Failed | answers.Pending:
        """The poll is held for HOLD_S seconds at most."""
        if (unloaded := self._models.unloaded(peer, command.request_id)) is not None:
            return unloaded
        entry = self._entry(peer, command.request_id)
        if not await self._core.wait(entry, HOLD_S):
            return answers.Pending(reason=self._why(peer, entry))
        return self._given(entry)

    async def get_drawn(
        self, peer: Peer, command: commands.GetDrawn
    ) -> answers.SoFar | answers.Failed | answers.Pending:
        """What a sample has drawn so far, held like a poll; its end is that of any future."""
        entry = self._entry(peer, command.request_id)
        if entry.accepted is None or entry.accepted.call.kind is not CallKind.SAMPLE:
            raise ApiError(400, f"{entry.id} is no sample", "Poll it with retrieve_future")
        version = str(entry.accepted.work["version"])
        if not await self._progress.wait(entry, command.have, HOLD_S):
            return answers.Pending(reason=self._why(peer, entry))
        if entry.ended is None:
            return answers.SoFar(version=version, ended=False, body=self._progress.body(entry.id))
        await self._core.settled(entry.id)
        found = self._given(entry)
        if isinstance(found, answers.Failed):
            return found
        return answers.SoFar(version=version, ended=True, body=found.body)

    def _entry(self, peer: Peer, request_id: str) -> Entry:
        entry = self._core.book.entries.get(request_id)
        if entry is None or entry.job != peer.job:
            raise ApiError(410, f"there is no request {request_id!r} of this job", "Submit it again")
        return entry

    def _given(self, entry: Entry) -> answers.Done | answers.Failed:
        """The end of a future; that it was given is noted once."""
        ended = entry.ended
        assert ended is not None
        if not entry.delivered:
            self._core.commit(records.Delivered(now_us=self._core.now_us(), id=entry.id, job=entry.job), durable=False)
        if not ended.ok:
            return answers.Failed(error=ended.error, category="user" if ended.category == "user" else "server")
        return answers.Done(content_type=ended.content_type, body=ended.body, headers=ended.headers)

    def _why(self, peer: Peer, entry: Entry) -> str:
        if entry.accepted is not None:
            return self.told(peer, entry.id)
        model = self._core.book.models.get(entry.id.rpartition(":")[0])
        return self.told(peer, peer.job) if model and model.created.group in self._groups.asked else ""

    async def explain(self, peer: Peer, command: commands.Explain) -> answers.Explained:
        """Why the peer's own job waits."""
        return answers.Explained(job=peer.job, text=self.told(peer, peer.job))

    def told(self, peer: Peer, name: str) -> str:
        """What a job or call waits for, without the names of other users' jobs."""

        def veil(found: re.Match) -> str:
            job = self._core.book.jobs.get(found[1])
            return found[0] if job is not None and job.attached.uid == peer.uid else "another user's job"

        return _JOB.sub(veil, self._core.scheduler.explain(name))

    async def cancel(self, peer: Peer, command: commands.Cancel) -> answers.Ok:
        """End a sample early; a training call goes to its end."""
        entry = self._entry(peer, command.request_id)
        if entry.accepted is not None and entry.ended is None and entry.accepted.call.kind is CallKind.SAMPLE:
            self._turns.cancel(entry.accepted.call)
        return answers.Ok()

    async def telemetry(self, peer: Peer, command: commands.Telemetry) -> answers.Ok:
        """Noted, not kept."""
        log.debug("telemetry of job %s: %d bytes", peer.job, len(command.body))
        return answers.Ok()

    async def capabilities(self, peer: Peer, command: commands.Capabilities) -> answers.CapabilitiesList:
        """The base models that the peer may use."""
        return answers.CapabilitiesList(
            models=tuple(
                answers.Capability(name=name, max_context=config.max_context)
                for name, config in self._core.config.models.items()
                if config.allows(peer.account)
            )
        )

    async def list_models(self, peer: Peer, command: commands.ListModels) -> answers.ModelsList:
        """What the peer may sample from now."""
        book = self._core.book
        mine = [v for v in book.versions.values() if v.published.uid == peer.uid]
        # Whether a folder is still there is asked of the disk.
        seen = await asyncio.to_thread(lambda: [v for v in mine if v.nodes or on_disk(v)])
        return answers.ModelsList(
            bases=(await self.capabilities(peer, commands.Capabilities())).models,
            versions=tuple(
                answers.Version(
                    path=v.published.version,
                    base=v.published.base,
                    created_us=v.published.now_us,
                    model=v.published.model,
                    number=v.number,
                    behind=book.behind(v.published.version)[0],
                    bytes=v.published.size,
                    kept=self._groups.snapshots.kept(v),
                    ephemeral=v.published.ephemeral,
                )
                for v in seen
            ),
            max_staleness=book.jobs[peer.job].attached.max_staleness,
        )
