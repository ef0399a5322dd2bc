"""Sampling sessions, pinned to a version, and samples. Repeats are known by (sampling session, seq)."""

from plexrl.pool.api.access import Access
from plexrl.pool.api.intake import Intake
from plexrl.pool.core import Core, prior_cost_us
from plexrl.pool.deployments import Deployments
from plexrl.pool.turns import Turns
from plexrl.types import ApiError, Call, CallKind, DoesNotFit, Peer, answers, commands, records


class Sampling:
    """Answers the commands about sampling."""

    def __init__(self, core: Core, access: Access, intake: Intake, deployments: Deployments, turns: Turns):
        self._core = core
        self._access = access
        self._intake = intake
        self._deployments = deployments
        self._turns = turns

    async def open_sampler(self, peer: Peer, command: commands.OpenSampler) -> answers.SamplerOpened:
        """A sampling session of a version of this user's, of whatever job, or of a base model."""
        session = self._access.session(peer, command.session)
        sampler = f"{command.session}:sample:{command.sampler_seq}"
        opened = self._core.book.samplers.get(sampler)
        if opened is None:
            base, version = command.base_model or "", ""
            if command.model_path:
                known = self._core.book.versions.get(command.model_path)
                if known is None or known.published.uid != peer.uid:
                    raise ApiError(
                        400,
                        f"there is no published version {command.model_path!r} of yours",
                        "Publish it with save_weights_for_sampler",
                    )
                base, version = known.published.base, command.model_path
                self._access.readable(command.model_path)
                try:
                    self._deployments.ensure_sampler(self._core.book.models[known.published.model].created)
                except DoesNotFit as error:
                    raise ApiError(400, error.what, error.mend) from error
            else:
                self._access.base(peer, base)
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
        return answers.SamplerOpened(
            sampler=sampler,
            base_model_dir=self._core.config.models[opened.base].path,
            model_path=opened.version or None,
        )

    async def get_sampler(self, peer: Peer, command: commands.GetSampler) -> answers.SamplerInfo:
        """What it is pinned to."""
        opened = self._access.sampler(peer, command.sampler)
        return answers.SamplerInfo(
            sampler=opened.sampler,
            base_model_dir=self._core.config.models[opened.base].path,
            model_path=opened.version or None,
        )

    async def sample(self, peer: Peer, command: commands.Sample) -> answers.SamplePromise:
        """Accept a sample."""
        opened = self._access.sampler(peer, command.sampler)
        request_id = f"{opened.sampler}:{command.seq}"
        promise = answers.SamplePromise(request_id=request_id, num_samples=command.num_samples)
        known = self._core.book.entries.get(request_id)
        if known is not None:
            self._intake.same(known, CallKind.SAMPLE, command.digest)
            await self._core.settled(request_id)
            return promise
        self._intake.room(peer)
        if opened.version:
            self._access.readable(opened.version)
            self._access.fresh(peer, opened.version, "Sample from a client of a newer version")
        call = Call(
            id=request_id,
            kind=CallKind.SAMPLE,
            group=self._deployments.sampler_group(opened),
            deployment=opened.version or f"base:{opened.base}",
            job=peer.job,
            seq=None,
            cost_us=prior_cost_us(CallKind.SAMPLE, command.units),
            units=max(command.units, 1),
            prompt_tokens=command.prompt_tokens,
            sequences=command.num_samples,
        )
        work: dict[str, object] = {"version": opened.version, "progress": command.progress}
        accepted = self._intake.accept(peer, call, command.digest, work, command.body)
        # It may be drawn meanwhile: a sample has no state, and one that a dying head forgets is asked for again. A
        # training call changes the model, and is not begun before it is on disk.
        self._turns.submit(call)
        await accepted
        return promise
