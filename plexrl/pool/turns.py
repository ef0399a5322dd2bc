"""Carries out what the scheduler says: builds, switches, runs, pauses; and tells it what came of them.

Each gang has a mailbox whose items are done one after the other, so that a Pause never overtakes the Run before it.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

from plexrl.pool import messages as m
from plexrl.pool.core import Core
from plexrl.pool.decisions import Decisions
from plexrl.pool.groups import Groups
from plexrl.pool.results import Results
from plexrl.pool.rules import tenant_of
from plexrl.pool.switches import Switches
from plexrl.pool.works import Works
from plexrl.scheduler import Action, Build, Closed, Dropped, Gather, Pause, Placed, Prefetch, Run, Switch, Turn
from plexrl.scheduler.turn import Phase
from plexrl.types import Call, CallKind, PlexrlError, records

log = logging.getLogger("plexrl.head")
_SAMPLE_TRIES = 3
_LOOK_S = 0.01


class Turns:
    """The executor of the scheduler's actions."""

    def __init__(self, core: Core, groups: Groups):
        self._core = core
        self._groups = groups
        groups.perform = self.perform
        self.decisions = Decisions()
        self.switches = Switches(core, groups.gangs, groups.tiers, self.perform)
        self._works = Works(core, groups, self._over)
        groups.tiers.checkpoint_of = self._works.checkpoint_of
        self.switches.sleepers.take_out = self._works.take_out
        self._results = Results(core, groups.snapshots)
        self._mail: dict[str, asyncio.Queue] = {}
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
        self._works.forget(outcome.id)
        entry = core.book.entries.get(outcome.id)
        if entry is None or entry.accepted is None:
            acknowledge()
            return
        if entry.ended is not None:
            self._results.failed(entry.accepted)
            core.when_settled(outcome.id, acknowledge)
            return
        call = entry.accepted.call
        if call.seq is not None:
            self._groups.tiers.used(call.deployment)
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
            moved_us=outcome.moved_us,
        )
        if outcome.ok:
            record = self._results.complete(entry.accepted, record)
        else:
            self._results.failed(entry.accepted)
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
        await self._works.run(Run(gang_id, tuple(turn.state.active)))
        if turn.phase is Phase.PAUSING:
            await self._pause(Pause(gang_id, self._core.scheduler.whole(turn.state)))

    def held(self, gang_id: str, calls: Iterable[str]) -> None:
        """A gang that outlived the last head holds these training calls, begun or not."""
        self._works.sent(calls)

    def rebuild(self, gang_id: str) -> None:
        """Build a lost gang again, or one whose engine was ended."""
        self.perform(self._core.scheduler.rebuild(self._core.now_us(), gang_id))

    def cancel(self, call: Call, why: str = "the call was cancelled", category: str = "user") -> None:
        """End a call early, wherever it is."""
        core = self._core
        core.fail(call.id, why, category)
        self._works.forget(call.id)
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
                    self._post(action.gang, lambda a=action: self.switches.build(a))
                case Switch() | Prefetch():
                    self._post(action.gang, lambda a=action: self.switches.switch(a))
                case Gather():
                    taking = self._works.gather(action)
                    self._post(action.gang, lambda a=action, t=taking: self._works.take(a, t))
                case Run():
                    self._post(action.gang, lambda a=action: self._works.run(a))
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
                self.switches.on_lost(gang_id, f"an action failed: {error}")

    def _over(self, call_id: str) -> None:
        """A call that was to run will not."""
        self.perform(self._core.scheduler.finished(self._core.now_us(), call_id, 0))

    async def _pause(self, action: Pause) -> None:
        if action.whole:
            # Not in its mailbox: what it missed may have to be said again before its call can end.
            self._core.spawn(self._pause_whole(action.gang))
        else:
            self._core.links.send(f"gang:{action.gang}", m.Pause())

    async def _pause_whole(self, gang_id: str) -> None:
        """Stop it when the call that runs has ended."""
        scheduler = self._core.scheduler
        while (turn := scheduler.turns.get(gang_id)) is not None and turn.phase is Phase.PAUSING:
            if not turn.state.active:
                self._core.links.send(f"gang:{gang_id}", m.Pause())
                return
            await asyncio.sleep(_LOOK_S)

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
