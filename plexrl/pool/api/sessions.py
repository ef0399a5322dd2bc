"""Sessions: opened once per idempotency key, kept by heartbeats, finished."""

import secrets

from plexrl.pool.api.access import Access
from plexrl.pool.core import Core
from plexrl.pool.deployments import Deployments
from plexrl.types import ApiError, Peer, answers, commands, records


class Sessions:
    """Answers the commands about sessions."""

    def __init__(self, core: Core, access: Access, deployments: Deployments):
        self._core = core
        self._access = access
        self._deployments = deployments

    async def open_session(self, peer: Peer, command: commands.OpenSession) -> answers.SessionOpened:
        known = (
            self._core.book.session_keys.get((peer.job, command.idempotency_key)) if command.idempotency_key else None
        )
        if known is not None:
            return answers.SessionOpened(session=known)
        session = f"s{secrets.token_hex(6)}"
        await self._core.commit(
            records.SessionOpened(
                now_us=self._core.now_us(),
                session=session,
                job=peer.job,
                uid=peer.uid,
                account=peer.account,
                key=command.idempotency_key or session,
            )
        )
        return answers.SessionOpened(session=session)

    async def heartbeat(self, peer: Peer, command: commands.Heartbeat) -> answers.Ok:
        """ApiError 410 when the session is over."""
        session = self._core.book.sessions.get(command.session)
        if session is None or session.opened.job != peer.job or session.ended:
            raise ApiError(410, f"session {command.session!r} is over", "Open a new one")
        session.beat_us = self._core.now_us()
        return answers.Ok()

    async def finish_session(self, peer: Peer, command: commands.FinishSession) -> answers.Ok:
        """The session ends, with its models."""
        session = self._access.session(peer, command.session)
        await self._deployments.end_session(session.opened.session, f"finished: {command.reason}")
        return answers.Ok()
