"""The life of deployments: opened, fed with calls in order, ended with session or job, lost with their gang."""

import asyncio
import json
import logging

from plexrl.pool import messages as m
from plexrl.pool.book import Model
from plexrl.pool.core import Core, category_of
from plexrl.pool.groups import Groups
from plexrl.pool.turns import Turns
from plexrl.types import ApiError, Call, DoesNotFit, Peer, PlexrlError, Role, answers, records

log = logging.getLogger("plexrl.head")


class Deployments:
    """Models and what hangs on them."""

    def __init__(self, core: Core, groups: Groups, turns: Turns):
        self._core = core
        self._groups = groups
        self._turns = turns
        turns.switches.on_built = self._built
        turns.switches.on_build_failed = self._build_failed
        turns.switches.on_lost = self.gang_lost
        groups.tiers.on_damaged = self._damaged
        turns.switches.sleepers.close = self._close_gang
        turns.switches.sleepers.closed = self.asleep
        self._gang_up: dict[str, bool] = {}
        self._creating: dict[str, set[asyncio.Task]] = {}
        self._losing: set[str] = set()

    # -- opening -------------------------------------------------------------------------------------------------------

    async def open(
        self,
        peer: Peer,
        session: records.SessionOpened,
        model: str,
        *,
        base: str,
        lora_rank: int | None,
        seed: int,
        attn: bool,
        mlp: bool,
        unembed: bool,
        init_path: str = "",
        init_optimizer: bool = False,
        promise: str = "create_model",
    ) -> answers.Promise:
        """Promise the deployment, and place it now or when there is room.

        Raises ApiError when it would not fit the empty pool or the job has too many.
        """
        core = self._core
        mine = [x for x in core.book.models.values() if x.created.job == peer.job and not x.ended]
        if len(mine) >= core.config.limits.models_per_job:
            raise ApiError(
                400, f"this job has {len(mine)} models, the most that limits.models_per_job allows", "Unload one"
            )
        kind = "full" if lora_rank is None else "lora"
        owner = model if kind == "full" else ""
        try:
            try:
                group = self._groups.ensure(base, Role.TRAIN, kind, owner, peer.job)
            except DoesNotFit:
                group = self._groups.ask(base, kind, owner, peer.job)
        except DoesNotFit as error:
            raise ApiError(400, error.what, error.mend) from error
        await core.commit(
            records.ModelCreated(
                now_us=core.now_us(),
                model=model,
                session=session.session,
                job=peer.job,
                uid=peer.uid,
                account=peer.account,
                base=base,
                lora_rank=lora_rank,
                seed=seed,
                attn=attn,
                mlp=mlp,
                unembed=unembed,
                group=group,
                init_path=init_path,
                init_optimizer=init_optimizer,
                promise=promise,
            )
        )
        self._turns.tick()
        self.start(core.book.models[model])
        return answers.Promise(request_id=f"{model}:0", model=model)

    def start(self, model: Model) -> None:
        """Make the deployment on its gang as soon as that is built; one whose engine was ended is built for it."""
        if model.created.group in self._groups.asked:
            return
        (gang,) = self._groups.gangs_of(model.created.group)
        if self._gang_up.get(gang.id):
            task = self._core.spawn(self._create(model))
            tasks = self._creating.setdefault(gang.id, set())
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        elif (state := self._core.scheduler.gangs.get(gang.id)) is not None and state.unbuilt:
            self._turns.rebuild(gang.id)

    async def _close_gang(self, gang_id: str) -> None:
        """No deployment is made there from now on, nor is one under way."""
        self._gang_up[gang_id] = False
        await asyncio.gather(*self._creating.get(gang_id, ()), return_exceptions=True)

    def asleep(self, gang_id: str) -> None:
        """The gang has no engine now. Who waits to be made there has it built again."""
        self._gang_up[gang_id] = False
        group, _ = self._groups.gangs.find(gang_id)
        if group.placed.spec.role is Role.TRAIN:
            for model in self._core.book.live_models(group.placed.spec.group):
                if self._unborn(model):
                    self.start(model)

    async def _create(self, model: Model) -> None:
        core = self._core
        try:
            await self._groups.states.create(model)
        except PlexrlError as error:
            core.fail(f"{model.id}:0", str(error), category_of(error))
            await self.end_model(model, f"it was not created: {error}")
            return
        self._created(model)

    def _created(self, model: Model) -> None:
        core, created = self._core, model.created
        body = {"type": created.promise, "model_id": model.id}
        if created.promise == "load_weights":
            body["path"] = f"tinker://{model.id}/weights/initial"
        core.end(
            records.CallEnded(
                now_us=core.now_us(),
                id=f"{model.id}:0",
                ok=True,
                content_type="application/json",
                body=json.dumps(body).encode(),
            )
        )
        self.release(model)

    def _built(self, gang_id: str) -> None:
        self._gang_up[gang_id] = True
        group, _ = self._groups.gangs.find(gang_id)
        if group.placed.spec.role is Role.TRAIN:
            for model in self._core.book.live_models(group.placed.spec.group):
                if self._unborn(model):
                    self.start(model)

    def _build_failed(self, gang_id: str, why: PlexrlError) -> None:
        """Everybody who waited for the gang is told; the group is given up."""
        group, _ = self._groups.gangs.find(gang_id)
        name = group.placed.spec.group
        for model in self._core.book.live_models(name):
            born = not self._unborn(model)
            self._core.fail(f"{model.id}:0", f"the worker group was not built: {why}", category_of(why))
            reason = f"its worker group was not built{' again' if born else ''}: {why}{model.resume if born else ''}"
            self._core.spawn(self.end_model(model, reason, lost=born))
        self._core.spawn(self._retire(name, f"not built: {why}"))

    async def _retire(self, name: str, reason: str) -> None:
        if await self._groups.retire(name, reason):
            self._turns.remove(name)

    # -- after a change of the head ------------------------------------------------------------------------------------

    def adopt(self, gang_id: str, hello: m.HostHello) -> None:
        """A gang that outlived the last head: what it has is ours again, what it lacks is made or lost."""
        self._gang_up[gang_id] = True
        group, _ = self._groups.gangs.find(gang_id)
        if group.placed.spec.role is not Role.TRAIN:
            return
        live = self._core.book.live_models(group.placed.spec.group)
        for model in live:
            if model.id in hello.deployments:
                if self._unborn(model):
                    self._created(model)
            elif self._unborn(model):
                self.start(model)
            elif gang_id in group.rebuilt:
                self._groups.tiers.unknown(model)  # the last head had it built again, and this one not brought
            else:
                self._core.spawn(self.end_model(model, f"its engine host does not know it{model.resume}", lost=True))
        for name in set(hello.deployments) - {model.id for model in live}:
            self._core.spawn(self._close(self._core.book.models[name]))

    def ask_again(self) -> None:
        """Ask a new scheduler for the places that models wait for."""
        for model in self._core.book.models.values():
            created = model.created
            if not model.ended and created.group not in self._core.book.groups:
                kind = "full" if created.lora_rank is None else "lora"
                owner = model.id if kind == "full" else ""
                self._groups.ask(created.base, kind, owner, created.job, created.group)

    def finish_ends(self) -> None:
        """End what the last head had begun to end: models of sessions and jobs that are over, groups without models."""
        book = self._core.book
        for name, session in list(book.sessions.items()):
            job = book.jobs[session.opened.job]
            if job.ended and not session.ended:
                self._core.spawn(self.end_session(name, job.ended))
        for model in list(book.models.values()):
            session = book.sessions[model.created.session]
            group = book.groups.get(model.created.group)
            if session.ended and not model.ended:
                self._core.spawn(self.end_model(model, f"its session ended ({session.ended})"))
            elif model.ended and group and not group.ended and group.placed.kind == "full":
                self._core.spawn(self._close(model))

    def _unborn(self, model: Model) -> bool:
        """Whether the deployment is still being made."""
        entry = self._core.book.entries.get(f"{model.id}:0")
        return entry is not None and entry.ended is None

    # -- calls in order ------------------------------------------------------------------------------------------------

    def release(self, model: Model) -> None:
        """Hand the scheduler the calls whose turn in the model's order has come."""
        if model.ended or self._unborn(model):
            return
        ready = self._core.book.release(model)
        for call_id in ready:
            entry = self._core.book.entries[call_id]
            if entry.ended is None:
                self._turns.submit(entry.accepted.call)
        if model.held and ready:
            # Only progress starts the wait for the next gap anew; calls that pile up behind it do not.
            model.held_since_us = self._core.now_us()

    def check_gaps(self) -> None:
        """Fail calls that have waited too long for a seq_id before them that never came."""
        core = self._core
        for model in core.book.models.values():
            late = core.now_us() - model.held_since_us > core.config.limits.sequence_gap_us
            if model.held and late and not model.ended and not self._unborn(model):
                missing, last = model.next_seq, max(model.held)
                core.commit(records.SeqConsumed(now_us=core.now_us(), model=model.id, seq=last, since=missing))
                for call_id in list(model.held.values()):
                    core.fail(
                        call_id,
                        f"seq_id {missing} of {model.id} never came. Go on with {last + 1}, or with a new model",
                        "user",
                    )
                self.release(model)

    # -- samplers ------------------------------------------------------------------------------------------------------

    def ensure_sampler(self, created: records.ModelCreated) -> str:
        """The sampler group for a model's versions, placed if there is none. Raises DoesNotFit."""
        kind = "full" if created.lora_rank is None else "lora"
        model = created.model if kind == "full" else ""
        group = self._groups.ensure(created.base, Role.SAMPLE, kind, model, created.job)
        self._turns.tick()
        return group

    def ensure_base_sampler(self, base: str, job: str) -> str:
        """The sampler group for a base model as it is."""
        try:
            group = self._groups.ensure(base, Role.SAMPLE, "lora", "", job)
        except DoesNotFit as error:
            raise ApiError(400, error.what, error.mend) from error
        self._turns.tick()
        return group

    def sampler_group(self, opened: records.SamplerOpened) -> str:
        """The group that serves a sampling session."""
        if not opened.version:
            return self.ensure_base_sampler(opened.base, opened.job)
        try:
            return self.ensure_sampler(
                self._core.book.models[self._core.book.versions[opened.version].published.model].created
            )
        except DoesNotFit as error:
            raise ApiError(400, error.what, error.mend) from error

    # -- ends ----------------------------------------------------------------------------------------------------------

    async def end_model(self, model: Model, reason: str, lost: bool = False) -> None:
        """The deployment is gone; calls that were open for it fail."""
        core = self._core
        if model.ended:
            return
        await core.commit(records.ModelEnded(now_us=core.now_us(), model=model.id, reason=reason, lost=lost))
        for call_id in [f"{model.id}:0", *model.held.values()]:
            core.fail(call_id, f"model {model.id} ended: {reason}", "server")
        for call in self._open_calls(model):
            self._turns.cancel(call, f"model {model.id} ended: {reason}", "server")
        await self._close(model)

    async def _damaged(self, model: Model, why: str) -> None:
        """What is left of a deployment's state, on NVMe or by an engine that ended, is not whole: it alone is lost."""
        await self.end_model(model, f"its state was damaged ({why}){model.resume}", lost=True)

    async def _close(self, model: Model) -> None:
        """Take back what an ended deployment had, and let the scheduler forget the groups that ended with it."""
        for name in await self._groups.close(model):
            self._turns.remove(name)

    def _open_calls(self, model: Model) -> list[Call]:
        """Calls of the model, and samples from its versions that no session reads any more."""
        versions = self._core.book.model_versions(model.id)
        mine = {v.published.version for v in versions if not v.readers} | {model.id}
        entries = self._core.book.entries
        calls = (entries[id].accepted.call for ids in self._core.book.open_calls.values() for id in ids)
        return [call for call in calls if call.deployment in mine]

    async def end_session(self, name: str, reason: str) -> None:
        """A session is over, with its models."""
        core = self._core
        session = core.book.sessions[name]
        if session.ended:
            return
        await core.commit(records.SessionEnded(now_us=core.now_us(), session=name, reason=reason))
        for model in list(core.book.models.values()):
            if model.created.session == name:
                await self.end_model(model, f"its session ended ({reason})")

    async def end_job(self, job: str, reason: str) -> None:
        """A logical job is over, with its sessions."""
        core = self._core
        if job not in core.book.jobs or core.book.jobs[job].ended:
            return
        await core.commit(records.JobEnded(now_us=core.now_us(), job=job, reason=reason))
        for name, session in list(core.book.sessions.items()):
            if session.opened.job == job:
                await self.end_session(name, reason)
        for call in list(core.book.open_calls.get(job, ())):
            self._turns.cancel(core.book.entries[call].accepted.call)
        core.book.forget_job(job)

    def gang_lost(self, gang_id: str, why: str) -> None:
        """A gang's state is gone: a trainer's deployments are lost, their checkpoints named; samplers come back."""
        self._gang_up[gang_id] = False
        group, _ = self._groups.gangs.find(gang_id)
        if group.ended or gang_id in self._losing:
            return
        log.error("gang %s is lost: %s", gang_id, why)
        self._losing.add(gang_id)
        self._core.spawn(self._lose(gang_id, why))

    async def _lose(self, gang_id: str, why: str) -> None:
        group, _ = self._groups.gangs.find(gang_id)
        spec = group.placed.spec
        try:
            await self._turns.lost(gang_id)
        finally:
            self._losing.discard(gang_id)
        if spec.role is Role.TRAIN:
            for model in self._core.book.live_models(spec.group):
                # One that is still being made has nothing to lose: it is made when the gang is built again.
                if not self._unborn(model):
                    await self.end_model(model, f"its worker group was lost ({why}){model.resume}", lost=True)
        if not group.ended:
            self._turns.rebuild(gang_id)
