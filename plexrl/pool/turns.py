"""Carries out what the scheduler says: builds, switches, runs, pauses; and tells it what came of them.

Each gang has a mailbox whose items are done one after the other, so that a Pause never overtakes the Run before it.
"""

import asyncio
import errno
import logging
import os
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

import msgspec

from plexrl.pool import messages as m
from plexrl.pool.core import Core, category_of
from plexrl.pool.decisions import Decisions
from plexrl.pool.groups import Groups
from plexrl.pool.layout import meta_of
from plexrl.pool.rules import tenant_of
from plexrl.scheduler import Action, Build, Closed, Dropped, Gather, Pause, Placed, Prefetch, Run, Switch, Turn
from plexrl.scheduler.turn import Phase
from plexrl.types import Call, CallKind, Moved, PlexrlError, Unavailable, records

log = logging.getLogger("plexrl.head")
_SWITCH_S = 300.0
_SAMPLE_TRIES = 3


class Turns:
    """The executor of the scheduler's actions."""

    def __init__(self, core: Core, groups: Groups):
        self._core = core
        self._groups = groups
        groups.perform = self.perform
        self.decisions = Decisions()
        self._mail: dict[str, asyncio.Queue] = {}
        self._taking: dict[str, asyncio.Future] = {}  # samples on their way from one replica to another
        self._drawn: dict[str, object] = {}  # what was drawn of samples that have changed their replica
        self._tries: dict[str, int] = {}
        self._timer: asyncio.TimerHandle | None = None

    # -- events in -----------------------------------------------------------------------------------------------------

    def submit(self, call: Call) -> None:
        """A call whose turn in its deployment's order has come."""
        try:
            actions = self._core.scheduler.submit(self._core.now_us(), call)
        except PlexrlError as error:
            self._core.fail(call.id, str(error), "server")
            return
        self.perform(actions)

    def tick(self) -> None:
        """Let time pass in the scheduler."""
        self.perform(self._core.scheduler.tick(self._core.now_us()))

    def outcome(self, gang_id: str, outcome: m.Outcome) -> None:
        """A call ended on its gang. It is acknowledged when its record is on disk."""
        core = self._core

        def acknowledge() -> None:
            core.links.send(f"gang:{gang_id}", m.Ack(ids=(outcome.id,)))

        # Also of a call that was ended early: the gang is free for the next one only now.
        self.perform(core.scheduler.finished(core.now_us(), outcome.id, outcome.units))
        self._tries.pop(outcome.id, None)
        self._drawn.pop(outcome.id, None)
        entry = core.book.entries.get(outcome.id)
        if entry is None or entry.accepted is None:
            acknowledge()
            return
        if entry.ended is not None:
            self._unpublished(entry.accepted)
            core.when_settled(outcome.id, acknowledge)
            return
        call = entry.accepted.call
        core.faults.hit(f"applied-{call.kind}")
        record = records.CallEnded(
            now_us=core.now_us(),
            id=outcome.id,
            ok=outcome.ok,
            content_type=outcome.content_type,
            body=outcome.body,
            error=outcome.error,
            category=outcome.category,
            units=outcome.units,
            cpu_us=outcome.cpu_us,
            wall_us=outcome.wall_us,
            gang=gang_id,
            moved_bytes=outcome.moved_bytes,
        )
        if outcome.ok:
            record = self._finish(entry.accepted, record)
        else:
            self._unpublished(entry.accepted)
        core.end(record, acknowledge)

    def paused(self, gang_id: str, unfinished: tuple[str, ...]) -> None:
        """A gang has stopped at a safe point."""
        self.perform(self._core.scheduler.paused(self._core.now_us(), gang_id, unfinished))

    async def lost(self, gang_id: str) -> None:
        """A built gang lost a rank: it is killed whole; when nothing of it runs any more, its calls end."""
        await self._groups.gangs.kill(gang_id)
        self.perform(self._core.scheduler.lost(self._core.now_us(), gang_id))

    def repair(self, gang_id: str) -> None:
        """The gang's leader is connected again: say again what it may have missed. It knows what it had."""
        self._post(gang_id, lambda: self._say_again(gang_id))

    async def _say_again(self, gang_id: str) -> None:
        turn = self._core.scheduler.turns.get(gang_id)
        if turn is None or turn.phase not in (Phase.OPEN, Phase.PAUSING):
            return
        await self._run(Run(gang_id, tuple(turn.state.active)))
        if turn.phase is Phase.PAUSING:
            await self._pause(Pause(gang_id))

    def rebuild(self, gang_id: str) -> None:
        """Build a lost gang again."""
        self.perform(self._core.scheduler.rebuild(self._core.now_us(), gang_id))

    def cancel(self, call: Call, why: str = "the call was cancelled", category: str = "user") -> None:
        """End a call early, wherever it is."""
        core = self._core
        core.fail(call.id, why, category)
        self._drawn.pop(call.id, None)
        group = core.book.groups.get(call.group)
        for gang in group.placed.placement.gangs if group else ():
            core.links.send(f"gang:{gang.id}", m.Cancel(call=call.id))
        self.perform(core.scheduler.cancel(core.now_us(), call.id))
        if call.kind is CallKind.SAMPLE:
            # The replica drops a sample at once and says no more of it; a training call goes to its end.
            self.perform(core.scheduler.finished(core.now_us(), call.id, 0))

    def enroll(self, attached: records.JobAttached) -> None:
        """A job was admitted."""
        core = self._core
        self.perform(core.scheduler.enroll(core.now_us(), tenant_of(core.config, attached)))

    def dismiss(self, job: str) -> None:
        """A job is over, and so are its groups. Its last intervals are closed first, while it is known whose it was."""
        core = self._core
        self.perform(core.scheduler.spans(core.now_us()))
        self.perform(core.scheduler.dismiss(core.now_us(), job))

    def remove(self, group_id: str) -> None:
        """A group was retired."""
        self.perform(self._core.scheduler.remove(self._core.now_us(), group_id))

    def _unpublished(self, accepted: records.CallAccepted) -> None:
        """A call that came to nothing: had it been to publish a version, the memory for that is given back."""
        call = accepted.call
        if call.kind is CallKind.PUBLISH and accepted.work["version"] not in self._core.book.versions:
            self._core.spawn(self._groups.snapshots.discard(call.group, str(accepted.work["version"])))

    def _finish(self, accepted: records.CallAccepted, record: records.CallEnded) -> records.CallEnded:
        """What the head adds to a result: paths, versions, sampling sessions."""
        core, work = self._core, accepted.work
        call = accepted.call
        body: dict[str, object]
        headers = {}
        match call.kind:
            case CallKind.SAVE_STATE:
                body = {"path": work["path"], "type": "save_weights"}
            case CallKind.LOAD_STATE:
                body = {"path": work["path"]}
            case CallKind.PUBLISH:
                model = core.book.models[call.deployment]
                created = model.created
                core.commit(
                    records.VersionPublished(
                        now_us=core.now_us(),
                        version=str(work["version"]),
                        model=created.model,
                        job=created.job,
                        uid=created.uid,
                        account=created.account,
                        base=created.base,
                        lora_rank=created.lora_rank,
                        attn=created.attn,
                        mlp=created.mlp,
                        unembed=created.unembed,
                        size=self._groups.snapshots.bytes_of(model),
                        nodes=self._groups.snapshots.nodes(created.group),
                        folder=str(work["folder"]),
                    )
                )
                body = {"path": work["version"]}
                if work["sampler"]:
                    core.commit(
                        records.SamplerOpened(
                            now_us=core.now_us(),
                            sampler=str(work["sampler"]),
                            session=created.session,
                            job=created.job,
                            uid=created.uid,
                            base=created.base,
                            version=str(work["version"]),
                        )
                    )
                    body = {"sampling_session_id": work["sampler"]}
                headers = {"x-plexrl-version": str(work["version"])}
            case CallKind.SAMPLE:
                return msgspec.structs.replace(record, headers={"x-plexrl-version": str(work["version"])})
            case _:
                return record
        payload = msgspec.json.encode({key: value for key, value in body.items() if value is not None})
        return msgspec.structs.replace(record, content_type="application/json", body=payload, headers=headers)

    # -- actions out ---------------------------------------------------------------------------------------------------

    def perform(self, actions: Iterable[Action]) -> None:
        """Carry out actions and set the timer for the scheduler's next tick."""
        core = self._core
        dropped: list[str] = []
        for action in actions:
            match action:
                case Closed():
                    core.commit(records.SpanClosed(now_us=core.now_us(), span=action.span), durable=False)
                case Build():
                    self._post(action.gang, lambda a=action: self._build(a))
                case Switch() | Prefetch():
                    self._post(action.gang, lambda a=action: self._switch(a))
                case Gather():
                    self._gather(action)
                case Run():
                    self._post(action.gang, lambda a=action: self._run(a))
                case Pause():
                    self._post(action.gang, lambda a=action: self._pause(a))
                case Dropped():
                    dropped += action.calls
                case Placed():
                    self._groups.placed(action.placements)
                case Turn():
                    self.decisions.add(core.now_us(), action, core.scheduler)
        # Last, because a call that is submitted again brings actions of its own.
        for call in dropped:
            self._dropped(call)
        self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        wake_at = self._core.scheduler.wake_at()
        if wake_at is not None:
            delay = max(0, wake_at - self._core.now_us()) / 1e6
            self._timer = asyncio.get_running_loop().call_later(delay, self.tick)

    def _post(self, gang_id: str, item: Callable[[], Awaitable[None]]) -> None:
        mail = self._mail.get(gang_id)
        if mail is None:
            mail = self._mail[gang_id] = asyncio.Queue()
            self._core.spawn(self._serve(gang_id, mail))
        mail.put_nowait(item)

    async def _serve(self, gang_id: str, mail: asyncio.Queue) -> None:
        while True:
            item = await mail.get()
            try:
                await item()
            except Exception as error:
                # Whatever it was, the scheduler's action was not answered: the gang cannot be trusted any more.
                log.exception("an action on %s failed", gang_id)
                self.on_lost(gang_id, f"an action failed: {error}")

    async def _build(self, action: Build) -> None:
        core = self._core
        evicted: list[str] = []
        try:
            await self._offload(action.evict, evicted)
            await self._groups.gangs.build(action.gang)
            if core.book.groups[action.gang.rpartition("/")[0]].ended:
                raise Unavailable("its group ended meanwhile")
        except PlexrlError as error:
            log.error("%s was not built: %s", action.gang, error)
            await self._groups.gangs.kill(action.gang)
            group, _ = self._groups.gangs.find(action.gang)
            for call_id in [call for calls in core.book.open_calls.values() for call in calls]:
                if core.book.entries[call_id].accepted.call.group == group.placed.spec.group:
                    core.fail(call_id, f"the worker group was not built: {error}", category_of(error))
            self.perform(core.scheduler.build_failed(core.now_us(), action.gang, evicted))
            self.on_build_failed(action.gang, error)
            return
        self.perform(core.scheduler.built(core.now_us(), action.gang, evicted))
        self.on_built(action.gang)

    async def _switch(self, action: Switch | Prefetch) -> None:
        """Also beside another gang's turn: to engine hosts it is the same."""
        core = self._core
        answer = core.scheduler.switched if isinstance(action, Switch) else core.scheduler.prefetched
        evicted: list[str] = []
        moved: dict[str, Moved] = {}
        try:
            await self._offload(action.evict, evicted)
            moved = await self._move(action.gang, "load")
        except PlexrlError as error:
            log.error("%s was not switched in: %s", action.gang, error)
            await self._groups.gangs.kill(action.gang)
            self.perform(answer(core.now_us(), action.gang, False, moved, evicted))
            self.on_lost(action.gang, str(error))
            return
        self.perform(answer(core.now_us(), action.gang, True, moved, evicted))

    async def _offload(self, victims: tuple[str, ...], evicted: list[str]) -> None:
        for result, victim in zip(
            await asyncio.gather(*(self._move(v, "offload") for v in victims), return_exceptions=True),
            victims,
            strict=True,
        ):
            if isinstance(result, PlexrlError):
                self.on_lost(victim, str(result))
                # Nothing may come into its place while one of its ranks could still write there.
                await self._groups.gangs.kill(victim)
            elif isinstance(result, BaseException):
                raise result
            else:
                evicted.append(victim)

    async def _move(self, gang_id: str, verb: str) -> dict[str, Moved]:
        core = self._core
        value = await core.links.order(f"gang:{gang_id}", m.Order(id=0, verb=verb, args={}), _SWITCH_S)
        _, gang = self._groups.gangs.find(gang_id)
        moved = {
            gpu: msgspec.convert(part, Moved) for gpu, part in zip(gang.gpus, value["moved"], strict=False) if part
        }
        for gpu, part in moved.items():
            record = records.Switched(now_us=core.now_us(), gang=gang_id, gpu=gpu, incoming=verb == "load", moved=part)
            core.commit(record, durable=False)
        return moved

    def _gather(self, action: Gather) -> None:
        """Take paused samples from their replica; the other one's Run waits for what was drawn of them."""
        taking = asyncio.get_running_loop().create_future()
        for call_id in action.calls:
            self._taking[call_id] = taking
        self._post(action.gang, lambda: self._take(action, taking))

    async def _take(self, action: Gather, taking: asyncio.Future) -> None:
        order = m.Order(id=0, verb="take", args={"calls": action.calls})
        try:
            value = await self._core.links.order(f"gang:{action.gang}", order)
            self._drawn |= {call: drawn for call, drawn in value["drawn"].items() if not self._over(call)}
        except PlexrlError as error:
            # As when a replica is lost: what it had drawn is lost with it, and is drawn again.
            log.error("samples of %s go on in %s from their beginning: %s", action.gang, action.to, error)
        finally:
            for call_id in action.calls:
                if self._taking.get(call_id) is taking:
                    del self._taking[call_id]
            taking.set_result(None)

    async def _run(self, action: Run) -> None:
        core = self._core
        works = []
        for call_id in action.calls:
            entry = core.book.entries.get(call_id)
            if entry is None or entry.accepted is None or entry.ended is not None:
                self.perform(core.scheduler.finished(core.now_us(), call_id, 0))
                continue
            try:
                works.append(await self._work(action.gang, entry.accepted))
            except PlexrlError as error:
                self.perform(core.scheduler.finished(core.now_us(), call_id, 0))
                core.fail(call_id, str(error), category_of(error))
        # Who was cancelled while we waited must not begin: the gang may have been switched out since.
        for work in [work for work in works if self._over(work.id)]:
            works.remove(work)
            self.perform(core.scheduler.finished(core.now_us(), work.id, 0))
        if works:
            core.links.send(f"gang:{action.gang}", m.Run(works=tuple(works)))

    def _over(self, call_id: str) -> bool:
        entry = self._core.book.entries.get(call_id)
        return entry is None or entry.ended is not None

    async def _work(self, gang_id: str, accepted: records.CallAccepted) -> m.Work:
        core, call = self._core, accepted.call
        args = dict(accepted.work)
        if call.kind is CallKind.SAVE_STATE:
            await asyncio.to_thread(_note, Path(str(args["folder"])), msgspec.json.encode(args["meta"]))
        elif call.kind is CallKind.PUBLISH:
            args["slabs"] = await self._groups.snapshots.make(core.book.models[call.deployment], str(args["version"]))
        elif call.kind is CallKind.SAMPLE:
            if args["version"]:
                await self._groups.snapshots.attach(gang_id, core.book.versions[str(args["version"])])
            while (taking := self._taking.get(call.id)) is not None:
                await taking
            args["drawn"] = self._drawn.get(call.id)
        return m.Work(
            id=call.id, kind=call.kind, deployment=call.deployment, seq=call.seq, args=args, body=accepted.body
        )

    async def _pause(self, action: Pause) -> None:
        self._core.links.send(f"gang:{action.gang}", m.Pause())

    def _dropped(self, call_id: str) -> None:
        entry = self._core.book.entries.get(call_id)
        if entry is None or entry.ended is not None or entry.accepted is None:
            return
        call = entry.accepted.call
        tries = self._tries[call_id] = self._tries.get(call_id, 0) + 1
        if call.kind is CallKind.SAMPLE and tries < _SAMPLE_TRIES and call.group in self._core.scheduler.groups:
            # It is drawn again, by another replica or by this one when it is back.
            self.submit(call)
            return
        model = self._core.book.models.get(call.deployment)
        self._core.fail(
            call_id,
            f"the worker group of {call.deployment} was lost while the call was open{model.resume if model else ''}",
            "server",
        )

    # -- set by the head -----------------------------------------------------------------------------------------------

    on_built: Callable[[str], None] = staticmethod(lambda gang: None)
    on_build_failed: Callable[[str, PlexrlError], None] = staticmethod(lambda gang, why: None)
    on_lost: Callable[[str, str], None] = staticmethod(lambda gang, why: None)


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
