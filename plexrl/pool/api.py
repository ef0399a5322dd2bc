"""Commands of one peer into answers: authorises, gives ids, removes repeats, accepts calls. Never schedules itself.

Repeats are known by the keys that are stable across the SDK's retries: (model, seq) for training calls, (sampling
session, seq) for samples, (session, seq) for creations, the idempotency header for sessions.
"""

import asyncio
import json
import logging
import re
import secrets
from pathlib import Path

from plexrl.pool.book import Book, Entry, Model, Session
from plexrl.pool.core import Core, prior_cost_us
from plexrl.pool.deployments import Deployments
from plexrl.pool.groups import Groups
from plexrl.pool.layout import meta_of
from plexrl.pool.turns import Turns
from plexrl.types import ApiError, Call, CallKind, Peer, PlexrlError, commands, records

log = logging.getLogger("plexrl.head")
HOLD_S = 25.0
PATH = "tinker://"
_UNLOAD = ":unload"
_JOB = re.compile(r"\bjob ([0-9]+\.[0-9]+)")


class Api:
    """Answers commands for authenticated peers."""

    def __init__(self, core: Core, groups: Groups, turns: Turns, deployments: Deployments):
        self._core = core
        self._groups = groups
        self._turns = turns
        self._deployments = deployments

    @property
    def _book(self) -> Book:
        return self._core.book

    async def answer(self, peer: Peer, command: commands.Command) -> commands.AnyAnswer:
        """Raises ApiError for what the peer may not do or has got wrong."""
        return await getattr(self, f"_{command.verb}")(peer, command)

    # -- sessions ------------------------------------------------------------------------------------------------------

    async def _open_session(self, peer: Peer, command: commands.OpenSession) -> commands.SessionOpened:
        known = self._book.session_keys.get((peer.job, command.idempotency_key)) if command.idempotency_key else None
        if known is not None:
            return commands.SessionOpened(session=known)
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
        return commands.SessionOpened(session=session)

    async def _heartbeat(self, peer: Peer, command: commands.Heartbeat) -> commands.Ok:
        session = self._book.sessions.get(command.session)
        if session is None or session.opened.job != peer.job or session.ended:
            raise ApiError(410, f"session {command.session!r} is over", "Open a new one")
        session.beat_us = self._core.now_us()
        return commands.Ok()

    async def _finish_session(self, peer: Peer, command: commands.FinishSession) -> commands.Ok:
        session = self._session(peer, command.session)
        await self._deployments.end_session(session.opened.session, f"finished: {command.reason}")
        return commands.Ok()

    def _session(self, peer: Peer, name: str) -> Session:
        session = self._book.sessions.get(name)
        if session is None or session.opened.job != peer.job:
            raise ApiError(404, f"there is no session {name!r} of this job", "Open one with create_session")
        if session.ended:
            raise ApiError(410, f"session {name!r} is over ({session.ended})", "Open a new one")
        return session

    # -- models --------------------------------------------------------------------------------------------------------

    async def _create_model(self, peer: Peer, command: commands.CreateModel) -> commands.Promise:
        session = self._session(peer, command.session)
        model = f"{command.session}:train:{command.model_seq}"
        rank = command.lora_rank
        known = self._book.models.get(model)
        if known is not None:
            if (known.created.base, known.created.lora_rank) != (command.base_model, rank) or known.created.init_path:
                raise ApiError(400, f"{model} was created otherwise", "A model_seq_id stands for one model")
            return commands.Promise(request_id=f"{model}:0", model=model)
        config = self._base(peer, command.base_model)
        if rank is not None and rank > config.lora.max_rank:
            raise ApiError(
                400,
                f"LoRA rank {rank} is above this pool's {config.lora.max_rank} for {command.base_model!r}",
                "Ask for a smaller rank, or ask the admin to raise models.*.lora.max_rank",
            )
        return await self._deployments.open(
            peer,
            session.opened,
            model,
            base=command.base_model,
            lora_rank=rank,
            seed=command.lora_seed if command.lora_seed is not None else secrets.randbits(31),
            attn=command.train_attn,
            mlp=command.train_mlp,
            unembed=command.train_unembed,
        )

    async def _load_model(self, peer: Peer, command: commands.LoadModel) -> commands.Promise:
        session = self._session(peer, command.session)
        model = f"{command.session}:train:{command.model_seq}"
        known = self._book.models.get(model)
        folder = self._saved(peer, command.path)
        if known is not None:
            if known.created.init_path != str(folder):
                raise ApiError(400, f"{model} was created otherwise", "A model_seq_id stands for one model")
            return commands.Promise(request_id=f"{model}:0", model=model)
        meta = json.loads(meta_of(folder).read_text())
        if command.base_model is not None and command.base_model != meta["base"]:
            raise ApiError(
                400, f"{command.path} was trained from {meta['base']!r}, not {command.base_model!r}", "Leave it out"
            )
        self._base(peer, meta["base"])
        return await self._deployments.open(
            peer,
            session.opened,
            model,
            base=meta["base"],
            lora_rank=meta["lora_rank"],
            seed=0,
            attn=meta["attn"],
            mlp=meta["mlp"],
            unembed=meta["unembed"],
            init_path=str(folder),
            init_optimizer=command.optimizer,
            promise="load_weights",
        )

    async def _get_info(self, peer: Peer, command: commands.GetInfo) -> commands.ModelInfo:
        created = self._model(peer, command.model).created
        config = self._core.config.models[created.base]
        return commands.ModelInfo(
            model=created.model,
            base_model=created.base,
            model_dir=config.path,
            lora_rank=created.lora_rank,
            arch=_arch(config.path),
        )

    async def _unload_model(self, peer: Peer, command: commands.UnloadModel) -> commands.Promise:
        model = self._book.models.get(command.model)
        if model is None or model.created.job != peer.job:
            raise ApiError(404, f"there is no model {command.model!r} of this job", "It may have been unloaded")
        await self._deployments.end_model(model, "unloaded")
        return commands.Promise(request_id=f"{model.id}{_UNLOAD}", model=model.id)

    def _unloaded(self, peer: Peer, request_id: str) -> commands.Done | None:
        """The future of an unload: no record of its own, that the model has ended says it all to any head."""
        model = self._book.models.get(request_id.removesuffix(_UNLOAD))
        if not request_id.endswith(_UNLOAD) or model is None or model.created.job != peer.job or not model.ended:
            return None
        body = json.dumps({"type": "unload_model", "model_id": model.id}).encode()
        return commands.Done(content_type="application/json", body=body, headers={})

    def _base(self, peer: Peer, name: str):
        config = self._core.config.models.get(name)
        if config is None or not config.allows(peer.account):
            names = [n for n, c in self._core.config.models.items() if c.allows(peer.account)]
            raise ApiError(
                400,
                f"base model {name!r} is not one of this pool's for account {peer.account!r}",
                f"Use one of: {', '.join(names) or 'none'} (names of plexrl.yaml, no paths or hub ids)",
            )
        return config

    def _model(self, peer: Peer, name: str) -> Model:
        model = self._book.models.get(name)
        if model is None or model.created.job != peer.job:
            raise ApiError(404, f"there is no model {name!r} of this job", "Create it first")
        if model.ended:
            raise ApiError(400, f"model {name!r} is gone: {model.ended}", _resume(model))
        return model

    def _saved(self, peer: Peer, path: str) -> Path:
        """The folder of a `tinker://<run>/<kind>/<name>` path of this user."""
        parts = path.removeprefix(PATH).split("/")
        if not path.startswith(PATH) or len(parts) != 3:
            raise ApiError(400, f"{path!r} is no tinker://<run>/weights/<name> path", "Use what save_state returned")
        try:
            folder = self._core.layout.checkpoint(peer.uid, *parts)
        except PlexrlError as error:
            raise ApiError(400, error.what, error.mend) from error
        if not folder.is_dir() or not meta_of(folder).is_file():
            raise ApiError(400, f"there is no checkpoint {path!r} of yours", "Checkpoints belong to who saved them")
        return folder

    # -- training calls ------------------------------------------------------------------------------------------------

    async def _train(self, peer: Peer, command: commands.Train) -> commands.Promise:
        model = self._model(peer, command.model)
        request_id = f"{model.id}:{command.seq}"
        promise = commands.Promise(request_id=request_id, model=model.id)
        known = self._book.entries.get(request_id)
        if known is not None:
            self._same(known, command.kind, command.digest)
            await self._core.settled(request_id)
            return promise
        if command.seq < model.next_seq or command.seq in model.consumed:
            raise ApiError(
                400, f"seq_id {command.seq} of {model.id} is used up: refused, or too late", "Use one that is above all"
            )
        self._room(peer)
        work = self._work(peer, model, command)
        call = Call(
            id=request_id,
            kind=command.kind,
            group=model.created.group,
            deployment=model.id,
            job=peer.job,
            seq=command.seq,
            cost_us=prior_cost_us(command.kind, command.units),
            units=max(command.units, 1),
        )
        await self._accept(peer, call, command.digest, work, command.body)
        self._core.faults.hit(f"accepted-{call.kind}")
        self._deployments.release(model)
        return promise

    def consume(self, peer: Peer, model_id: str, seq: int) -> None:
        """A training call was refused before it became a command: its seq_id will not come again."""
        model = self._book.models.get(model_id)
        if (
            model is not None
            and model.created.job == peer.job
            and not model.ended
            and seq >= model.next_seq
            and f"{model_id}:{seq}" not in self._book.entries
        ):
            self._core.commit(records.SeqConsumed(now_us=self._core.now_us(), model=model_id, seq=seq))
            self._deployments.release(model)

    def _work(self, peer: Peer, model: Model, command: commands.Train) -> dict[str, object]:
        """What an engine host needs beside the body. A bad name or path is refused here and uses the seq_id up."""
        if command.ttl_seconds is not None:
            raise ApiError(400, "ttl_seconds is not built yet", "Leave it out; delete checkpoints yourself")
        created = model.created
        try:
            match command.kind:
                case CallKind.SAVE_STATE:
                    folder = self._core.layout.checkpoint(peer.uid, model.id, "weights", command.name or "")
                    path = f"{PATH}{model.id}/weights/{command.name}"
                    if not command.overwrite and (folder.exists() or self._promised(peer, model, "path", path)):
                        raise ApiError(
                            400, f"checkpoint {command.name!r} of {model.id} exists", "Pass overwrite, or another name"
                        )
                    meta = {
                        "base": created.base,
                        "lora_rank": created.lora_rank,
                        "attn": created.attn,
                        "mlp": created.mlp,
                        "unembed": created.unembed,
                    }
                    return {"folder": str(folder), "path": path, "optimizer": True, "meta": meta}
                case CallKind.LOAD_STATE:
                    folder = self._saved(peer, command.path or "")
                    base = json.loads(meta_of(folder).read_text())["base"]
                    if base != created.base:
                        raise ApiError(400, f"{command.path} is of {base!r}, not of {created.base!r}", "Load it there")
                    return {"folder": str(folder), "path": command.path, "optimizer": command.optimizer}
                case CallKind.PUBLISH:
                    name = command.name or f"e{command.seq}"
                    folder = (
                        self._core.layout.checkpoint(peer.uid, model.id, "sampler_weights", name)
                        if command.name
                        else ""
                    )
                    version = f"{PATH}{model.id}/sampler_weights/{name}"
                    if version in self._book.versions or self._promised(peer, model, "version", version):
                        # A version is immutable: sampling sessions are pinned to it by this name.
                        raise ApiError(400, f"{version} is published already", "Publish under another name")
                    sampler = f"{created.session}:sample:{command.sampler_seq}" if command.name is None else ""
                    if sampler in self._book.samplers:
                        raise ApiError(400, f"sampling session {sampler} exists", "Count sampling_session_seq_id up")
                    self._deployments.ensure_sampler(created)
                    return {"folder": str(folder), "version": version, "sampler": sampler}
        except PlexrlError as error:
            if isinstance(error, ApiError):
                raise
            raise ApiError(400, error.what, error.mend) from error
        return {}

    def _promised(self, peer: Peer, model: Model, key: str, value: str) -> bool:
        """Whether an open call of the model will write this path or version."""
        opened = (self._book.entries[call].accepted for call in self._book.open_calls.get(peer.job, ()))
        return any(a.call.deployment == model.id and a.work.get(key) == value for a in opened if a.call.seq is not None)

    def _same(self, known: Entry, kind: CallKind, digest: str) -> None:
        accepted = known.accepted
        if accepted is None or accepted.call.kind is not kind or accepted.digest != digest:
            raise ApiError(
                400,
                f"{known.id} was already used for {accepted.call.kind if accepted else 'a creation'} with other data",
                "A seq_id stands for one call; use a new one",
            )

    def _room(self, peer: Peer) -> None:
        limit = self._core.config.limits.pending_calls
        if len(self._book.open_calls.get(peer.job, ())) >= limit:
            raise ApiError(429, f"this job has {limit} calls open", "It goes on when some have ended")

    def _accept(self, peer: Peer, call: Call, digest: str, work: dict, body: bytes) -> asyncio.Future:
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
                after=self._book.jobs[peer.job].last_delivered,
            ),
        )

    # -- sampling ------------------------------------------------------------------------------------------------------

    async def _open_sampler(self, peer: Peer, command: commands.OpenSampler) -> commands.SamplerOpened:
        session = self._session(peer, command.session)
        sampler = f"{command.session}:sample:{command.sampler_seq}"
        opened = self._book.samplers.get(sampler)
        if opened is None:
            base, version = command.base_model or "", ""
            if command.model_path:
                known = self._book.versions.get(command.model_path)
                if known is None or known.published.uid != peer.uid:
                    raise ApiError(
                        400,
                        f"there is no published version {command.model_path!r} of yours",
                        "Publish it with save_weights_for_sampler",
                    )
                base, version = known.published.base, command.model_path
                self._in_memory(command.model_path)
                self._deployments.ensure_sampler(self._book.models[known.published.model].created)
            else:
                self._base(peer, base)
                self._deployments.ensure_base_sampler(base, peer.job)
            opened = records.SamplerOpened(
                now_us=self._core.now_us(),
                sampler=sampler,
                session=session.opened.session,
                job=peer.job,
                uid=peer.uid,
                base=base,
                version=version,
            )
            await self._core.commit(opened)
        elif opened.version != (command.model_path or ""):
            raise ApiError(400, f"sampling session {sampler} is of another version", "Count sampling_session_seq_id up")
        return commands.SamplerOpened(
            sampler=sampler,
            base_model_dir=self._core.config.models[opened.base].path,
            model_path=opened.version or None,
        )

    def _in_memory(self, version: str) -> None:
        if not self._book.versions[version].in_memory:
            raise ApiError(
                400,
                f"version {version!r} is no longer in memory",
                f"The newest {self._core.config.limits.versions_per_model} of a model that is not unloaded are kept; "
                "publish it again",
            )

    async def _get_sampler(self, peer: Peer, command: commands.GetSampler) -> commands.SamplerInfo:
        opened = self._sampler(peer, command.sampler)
        return commands.SamplerInfo(
            sampler=opened.sampler,
            base_model_dir=self._core.config.models[opened.base].path,
            model_path=opened.version or None,
        )

    def _sampler(self, peer: Peer, name: str) -> records.SamplerOpened:
        opened = self._book.samplers.get(name)
        if opened is None or opened.job != peer.job:
            raise ApiError(404, f"there is no sampling session {name!r} of this job", "Create one")
        return opened

    async def _sample(self, peer: Peer, command: commands.Sample) -> commands.SamplePromise:
        opened = self._sampler(peer, command.sampler)
        request_id = f"{opened.sampler}:{command.seq}"
        promise = commands.SamplePromise(request_id=request_id, num_samples=command.num_samples)
        known = self._book.entries.get(request_id)
        if known is not None:
            self._same(known, CallKind.SAMPLE, command.digest)
            await self._core.settled(request_id)
            return promise
        self._room(peer)
        if opened.version:
            self._in_memory(opened.version)
        call = Call(
            id=request_id,
            kind=CallKind.SAMPLE,
            group=self._deployments.sampler_group(opened),
            deployment=opened.version or f"base:{opened.base}",
            job=peer.job,
            seq=None,
            cost_us=prior_cost_us(CallKind.SAMPLE, command.units),
            units=max(command.units, 1),
        )
        accepted = self._accept(peer, call, command.digest, {"version": opened.version}, command.body)
        # It may be drawn meanwhile: a sample has no state, and one that a dying head forgets is asked for again. A
        # training call changes the model, and is not begun before it is on disk.
        self._turns.submit(call)
        await accepted
        return promise

    # -- futures -------------------------------------------------------------------------------------------------------

    async def _retrieve(
        self, peer: Peer, command: commands.Retrieve
    ) -> commands.Done | commands.Failed | commands.Pending:
        if (unloaded := self._unloaded(peer, command.request_id)) is not None:
            return unloaded
        entry = self._book.entries.get(command.request_id)
        if entry is None or entry.job != peer.job:
            raise ApiError(410, f"there is no request {command.request_id!r} of this job", "Submit it again")
        if not await self._core.wait(entry, HOLD_S):
            return commands.Pending(reason=self._why(peer, entry))
        ended = entry.ended
        assert ended is not None
        if not entry.delivered:
            self._core.commit(records.Delivered(now_us=self._core.now_us(), id=entry.id, job=entry.job), durable=False)
        if not ended.ok:
            return commands.Failed(error=ended.error, category="user" if ended.category == "user" else "server")
        return commands.Done(content_type=ended.content_type, body=ended.body, headers=ended.headers)

    def _why(self, peer: Peer, entry: Entry) -> str:
        if entry.accepted is not None:
            return self._told(peer, entry.id)
        model = self._book.models.get(entry.id.rpartition(":")[0])
        return self._told(peer, peer.job) if model and model.created.group in self._groups.asked else ""

    async def _explain(self, peer: Peer, command: commands.Explain) -> commands.Explained:
        return commands.Explained(job=peer.job, text=self._told(peer, peer.job))

    def _told(self, peer: Peer, name: str) -> str:
        """What a job or call waits for, without the names of other users' jobs."""

        def veil(found: re.Match) -> str:
            job = self._book.jobs.get(found[1])
            return found[0] if job is not None and job.attached.uid == peer.uid else "another user's job"

        return _JOB.sub(veil, self._core.scheduler.explain(name))

    async def _cancel(self, peer: Peer, command: commands.Cancel) -> commands.Ok:
        entry = self._book.entries.get(command.request_id)
        if entry is None or entry.job != peer.job:
            raise ApiError(410, f"there is no request {command.request_id!r} of this job")
        if entry.accepted is not None and entry.ended is None and entry.accepted.call.kind is CallKind.SAMPLE:
            self._turns.cancel(entry.accepted.call)
        return commands.Ok()

    async def _telemetry(self, peer: Peer, command: commands.Telemetry) -> commands.Ok:
        log.debug("telemetry of job %s: %d bytes", peer.job, len(command.body))
        return commands.Ok()

    async def _capabilities(self, peer: Peer, command: commands.Capabilities) -> commands.CapabilitiesList:
        return commands.CapabilitiesList(
            models=tuple(
                commands.Capability(name=name, max_context=config.max_context)
                for name, config in self._core.config.models.items()
                if config.allows(peer.account)
            )
        )


def _resume(model: Model) -> str:
    if model.checkpoint:
        return f"Create a new one from its last checkpoint, {model.checkpoint!r}"
    return "Create a new one; no checkpoint was saved"


def _arch(model_dir: str) -> str:
    try:
        config = json.loads((Path(model_dir) / "config.json").read_text())
    except OSError:
        return "noop"
    return str(config.get("model_type", "unknown"))
