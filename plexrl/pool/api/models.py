"""Models: created, loaded from a saved state, asked about, unloaded. Repeats are known by (session, model_seq)."""

import json
import secrets
from pathlib import Path

from plexrl.pool.api.access import Access
from plexrl.pool.core import Core
from plexrl.pool.deployments import Deployments
from plexrl.pool.layout import meta_of
from plexrl.types import ApiError, Peer, answers, commands

_UNLOAD = ":unload"


class Models:
    """Answers the commands about models."""

    def __init__(self, core: Core, access: Access, deployments: Deployments):
        self._core = core
        self._access = access
        self._deployments = deployments

    async def create_model(self, peer: Peer, command: commands.CreateModel) -> answers.Promise:
        """A new model, from its base; its future ends when it can be used."""
        session = self._access.session(peer, command.session)
        model = f"{command.session}:train:{command.model_seq}"
        rank = command.lora_rank
        known = self._core.book.models.get(model)
        if known is not None:
            if (known.created.base, known.created.lora_rank) != (command.base_model, rank) or known.created.init_path:
                raise ApiError(400, f"{model} was created otherwise", "A model_seq_id stands for one model")
            return answers.Promise(request_id=f"{model}:0", model=model)
        config = self._access.base(peer, command.base_model)
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

    async def load_model(self, peer: Peer, command: commands.LoadModel) -> answers.Promise:
        """A new model, from a saved state of the peer's."""
        session = self._access.session(peer, command.session)
        model = f"{command.session}:train:{command.model_seq}"
        known = self._core.book.models.get(model)
        folder = self._access.saved(peer, command.path)
        if known is not None:
            if known.created.init_path != str(folder):
                raise ApiError(400, f"{model} was created otherwise", "A model_seq_id stands for one model")
            return answers.Promise(request_id=f"{model}:0", model=model)
        meta = json.loads(meta_of(folder).read_text())
        if command.base_model is not None and command.base_model != meta["base"]:
            raise ApiError(
                400, f"{command.path} was trained from {meta['base']!r}, not {command.base_model!r}", "Leave it out"
            )
        self._access.base(peer, meta["base"])
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

    async def get_info(self, peer: Peer, command: commands.GetInfo) -> answers.ModelInfo:
        """What a model is."""
        created = self._access.model(peer, command.model).created
        config = self._core.config.models[created.base]
        return answers.ModelInfo(
            model=created.model,
            base_model=created.base,
            model_dir=config.path,
            lora_rank=created.lora_rank,
            arch=_arch(config.path),
        )

    async def unload_model(self, peer: Peer, command: commands.UnloadModel) -> answers.Promise:
        """End a model; also one that has ended."""
        model = self._core.book.models.get(command.model)
        if model is None or model.created.job != peer.job:
            raise ApiError(404, f"there is no model {command.model!r} of this job", "It may have been unloaded")
        await self._deployments.end_model(model, "unloaded")
        return answers.Promise(request_id=f"{model.id}{_UNLOAD}", model=model.id)

    def unloaded(self, peer: Peer, request_id: str) -> answers.Done | None:
        """The future of an unload: no record of its own, that the model has ended says it all to any head."""
        model = self._core.book.models.get(request_id.removesuffix(_UNLOAD))
        if not request_id.endswith(_UNLOAD) or model is None or model.created.job != peer.job or not model.ended:
            return None
        body = json.dumps({"type": "unload_model", "model_id": model.id}).encode()
        return answers.Done(content_type="application/json", body=body, headers={})


def _arch(model_dir: str) -> str:
    try:
        config = json.loads((Path(model_dir) / "config.json").read_text())
    except OSError:
        return "noop"
    return str(config.get("model_type", "unknown"))
