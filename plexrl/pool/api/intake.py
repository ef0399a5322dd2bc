"""How a peer's call is taken: once, within the job's limit, and acknowledged when it is on disk."""

import asyncio

from plexrl.pool.book import Entry
from plexrl.pool.core import Core
from plexrl.types import ApiError, Call, CallKind, Peer, records


class Intake:
    """Accepts calls into the book."""

    def __init__(self, core: Core):
        self._core = core

    def same(self, known: Entry, kind: CallKind, digest: str) -> None:
        """Refuses (400) another call under the id of a known one."""
        accepted = known.accepted
        if accepted is None or accepted.call.kind is not kind or accepted.digest != digest:
            raise ApiError(
                400,
                f"{known.id} was already used for {accepted.call.kind if accepted else 'a creation'} with other data",
                "A seq_id stands for one call; use a new one",
            )

    def room(self, peer: Peer) -> None:
        """Refuses (429) a job that has too many calls open."""
        limit = self._core.config.limits.pending_calls
        if len(self._core.book.open_calls.get(peer.job, ())) >= limit:
            raise ApiError(429, f"this job has {limit} calls open", "It goes on when some have ended")

    def accept(self, peer: Peer, call: Call, digest: str, work: dict, body: bytes) -> asyncio.Future:
        """The future that ends when the call is on disk: only then is it acknowledged."""
        return self._core.keep(
            call.id,
            records.CallAccepted(
                now_us=self._core.now_us(),
                call=call,
                uid=peer.uid,
                digest=digest,
                work=work,
                body=body,
                after=self._core.book.jobs[peer.job].last_delivered,
            ),
        )
