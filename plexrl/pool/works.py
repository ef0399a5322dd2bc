"""Calls as engine hosts need them: prepared, sent, and samples carried from one replica to another."""

import asyncio
import errno
import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from plexrl.pool import messages as m
from plexrl.pool.book import Model
from plexrl.pool.core import Core, category_of
from plexrl.pool.groups import Groups
from plexrl.pool.layout import meta_of
from plexrl.scheduler import Gather, Run
from plexrl.types import CallKind, PlexrlError, records

log = logging.getLogger("plexrl.head")


class Works:
    """on_over: tells the scheduler of a call that will not begin after all."""

    def __init__(self, core: Core, groups: Groups, on_over: Callable[[str], None]):
        self._core = core
        self._gangs = groups.gangs
        self._snapshots = groups.snapshots
        self._tiers = groups.tiers
        self._on_over = on_over
        self._taking: dict[str, asyncio.Future] = {}  # samples on their way from one replica to another
        self._drawn: dict[str, object] = {}  # what was drawn of samples that have changed their replica
        self._sent: set[str] = set()  # training calls that an engine host may have begun

    def forget(self, call_id: str) -> None:
        """The call is over: nobody asks any more what was drawn of it."""
        self._drawn.pop(call_id, None)
        self._sent.discard(call_id)

    def sent(self, calls: Iterable[str]) -> None:
        """Engine hosts have these calls, and may have begun them."""
        self._sent.update(calls)

    def checkpoint_of(self, model: Model) -> str:
        """The folder of the model's checkpoint if that is the state that it has now, else ""."""
        if not model.exact or any(call.rpartition(":")[0] == model.id for call in self._sent):
            return ""
        return model.saved if Path(model.saved).is_dir() else ""

    async def run(self, action: Run) -> None:
        """Send the calls to their gang. One that cannot be prepared fails; one that was cancelled does not begin."""
        core = self._core
        works = []
        for call_id in action.calls:
            entry = core.book.entries.get(call_id)
            if entry is None or entry.accepted is None or entry.ended is not None:
                self._on_over(call_id)
                continue
            try:
                works.append(await self._prepare(action.gang, entry.accepted))
            except PlexrlError as error:
                if entry.accepted.call.kind is CallKind.SAMPLE and action.gang not in self._gangs.hosts:
                    # Its replica died meanwhile: the scheduler drops the call with the gang, and it is drawn again.
                    continue
                self._on_over(call_id)
                core.fail(call_id, str(error), category_of(error))
        # Who was cancelled while we waited must not begin: the gang may have been switched out since.
        for work in [work for work in works if self._over(work.id)]:
            works.remove(work)
            self._on_over(work.id)
        if works:
            self.sent(work.id for work in works if work.seq is not None)
            core.links.send(f"gang:{action.gang}", m.Run(works=tuple(works)))

    async def _prepare(self, gang_id: str, accepted: records.CallAccepted) -> m.Work:
        core, call = self._core, accepted.call
        args = dict(accepted.work)
        if call.seq is not None:
            await self._tiers.bring(core.book.models[call.deployment])
        if call.kind is CallKind.SAVE_STATE:
            await asyncio.to_thread(_note, Path(str(args["folder"])), msgspec.json.encode(args["meta"]))
        elif call.kind is CallKind.PUBLISH:
            model, version = core.book.models[call.deployment], str(args["version"])
            args["slabs"] = await self._snapshots.make(model, version)
            args["folder"] = args["folder"] or self._snapshots.folder(model, version)
        elif call.kind is CallKind.SAMPLE:
            if args["version"]:
                await self._snapshots.attach(gang_id, core.book.versions[str(args["version"])])
            while (taking := self._taking.get(call.id)) is not None:
                await taking
            args["drawn"] = self._drawn.get(call.id)
        return m.Work(
            id=call.id, kind=call.kind, deployment=call.deployment, seq=call.seq, args=args, body=accepted.body
        )

    def gather(self, action: Gather) -> asyncio.Future:
        """Samples will change their replica: the other one's Run waits for what was drawn of them. For `take`."""
        taking = asyncio.get_running_loop().create_future()
        for call_id in action.calls:
            self._taking[call_id] = taking
        return taking

    async def take(self, action: Gather, taking: asyncio.Future) -> None:
        """Take paused samples from their replica."""
        try:
            value = await self._gangs.order(action.gang, "take", {"calls": action.calls})
            self._drawn |= {call: drawn for call, drawn in value["drawn"].items() if not self._over(call)}
        except PlexrlError as error:
            # As when a replica is lost: what it had drawn is lost with it, and is drawn again.
            log.error("samples of %s go on in %s from their beginning: %s", action.gang, action.to, error)
        finally:
            for call_id in action.calls:
                if self._taking.get(call_id) is taking:
                    del self._taking[call_id]
            taking.set_result(None)

    async def take_out(self, gang_id: str) -> None:
        """Keep what a sampler's paused samples have drawn: its engine ends, and the next one goes on from there."""
        state = self._core.scheduler.gangs.get(gang_id)
        if state is None or state.trains or not state.begun:
            return
        try:
            value = await self._gangs.order(gang_id, "take", {"calls": sorted(state.begun)})
            self._drawn |= {call: drawn for call, drawn in value["drawn"].items() if not self._over(call)}
        except PlexrlError as error:
            log.error("samples of %s go on from their beginning: %s", gang_id, error)

    def _over(self, call_id: str) -> bool:
        entry = self._core.book.entries.get(call_id)
        return entry is None or entry.ended is not None


def _note(folder: Path, meta: bytes) -> None:
    """Say beside a checkpoint, before it is written, what it is of. Raises PlexrlError; nothing is lost."""
    path = meta_of(folder)
    try:
        if path.is_file() and path.read_bytes() == meta:
            return
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh = path.with_name(f"{path.name}.new")
        with fresh.open("wb") as file:
            file.write(meta)
            file.flush()
            os.fsync(file.fileno())
        fresh.rename(path)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise PlexrlError(
                f"the disk of the pool's checkpoints is full ({error.strerror}): nothing was saved to {folder.name!r}",
                "Ask the admin to free space, then save again",
            ) from error
        raise PlexrlError(f"cannot save to {folder.name!r}: {error}") from error
