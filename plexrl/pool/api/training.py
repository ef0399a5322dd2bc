"""Training calls: in order and once by (model, seq)."""

import json

from plexrl.pool.api.access import PATH, Access
from plexrl.pool.api.intake import Intake
from plexrl.pool.book import Model
from plexrl.pool.core import Core, prior_cost_us
from plexrl.pool.deployments import Deployments
from plexrl.pool.layout import meta_of
from plexrl.types import ApiError, Call, CallKind, Peer, PlexrlError, answers, commands, records


class Training:
    """Answers train, and takes note of seq_ids that are used up without it."""

    def __init__(self, core: Core, access: Access, intake: Intake, deployments: Deployments):
        self._core = core
        self._access = access
        self._intake = intake
        self._deployments = deployments

    async def train(self, peer: Peer, command: commands.Train) -> answers.Promise:
        """Acknowledged when it is on disk; it runs when its turn in the model's order comes."""
        model = self._access.model(peer, command.model)
        request_id = f"{model.id}:{command.seq}"
        promise = answers.Promise(request_id=request_id, model=model.id)
        known = self._core.book.entries.get(request_id)
        if known is not None:
            self._intake.same(known, command.kind, command.digest)
            await self._core.settled(request_id)
            return promise
        if command.seq < model.next_seq or command.seq in model.consumed:
            raise ApiError(
                400, f"seq_id {command.seq} of {model.id} is used up: refused, or too late", "Use one that is above all"
            )
        self._intake.room(peer)
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
        await self._intake.accept(peer, call, command.digest, work, command.body)
        self._core.faults.hit(f"accepted-{call.kind}")
        self._deployments.release(model)
        return promise

    def consume(self, peer: Peer, model_id: str, seq: int) -> None:
        """A training call was refused before it became a command: its seq_id will not come again."""
        model = self._core.book.models.get(model_id)
        if (
            model is not None
            and model.created.job == peer.job
            and not model.ended
            and seq >= model.next_seq
            and f"{model_id}:{seq}" not in self._core.book.entries
        ):
            self._core.commit(records.SeqConsumed(now_us=self._core.now_us(), model=model_id, seq=seq))
            self._deployments.release(model)

    def _work(self, peer: Peer, model: Model, command: commands.Train) -> dict[str, object]:
        """What an engine host needs beside the body. A bad name or path is refused here and uses the seq_id up."""
        if command.kind is CallKind.FORWARD_BACKWARD:
            for sampler in command.drawn_by:
                opened = self._core.book.samplers.get(sampler)
                # What another model drew, or a base model, is no older policy of this one.
                known = self._core.book.versions.get(opened.version) if opened else None
                if known is not None and known.published.model == model.id:
                    self._access.fresh(peer, opened.version, "Leave these data out, and sample from a newer version")
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
                        "account": created.account,
                        "lora_rank": created.lora_rank,
                        "attn": created.attn,
                        "mlp": created.mlp,
                        "unembed": created.unembed,
                    }
                    return {"folder": str(folder), "path": path, "optimizer": True, "meta": meta}
                case CallKind.LOAD_STATE:
                    folder = self._access.saved(peer, command.path or "")
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
                    if version in self._core.book.versions or self._promised(peer, model, "version", version):
                        # A version is immutable: sampling sessions are pinned to it by this name.
                        raise ApiError(400, f"{version} is published already", "Publish under another name")
                    sampler = f"{created.session}:sample:{command.sampler_seq}" if command.name is None else ""
                    if sampler in self._core.book.samplers:
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
        opened = (self._core.book.entries[call].accepted for call in self._core.book.open_calls.get(peer.job, ()))
        return any(a.call.deployment == model.id and a.work.get(key) == value for a in opened if a.call.seq is not None)
