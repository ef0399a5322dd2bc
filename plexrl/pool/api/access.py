"""What a peer may use: whatever is not its own is refused like what is not there."""

from pathlib import Path

from plexrl.config.schema import Model as ModelConfig
from plexrl.pool.book import Model, Session, Version
from plexrl.pool.core import Core
from plexrl.pool.layout import meta_of
from plexrl.types import ApiError, Peer, PlexrlError, StaleVersion, records

PATH = "tinker://"


class Access:
    """Look-ups by name for a peer; all raise ApiError."""

    def __init__(self, core: Core):
        self._core = core

    def session(self, peer: Peer, name: str) -> Session:
        """A session of this job: 404 when there is none, 410 when it is over."""
        session = self._core.book.sessions.get(name)
        if session is None or session.opened.job != peer.job:
            raise ApiError(404, f"there is no session {name!r} of this job", "Open one with create_session")
        if session.ended:
            raise ApiError(410, f"session {name!r} is over ({session.ended})", "Open a new one")
        return session

    def base(self, peer: Peer, name: str) -> ModelConfig:
        """A base model that the peer's account may use (400)."""
        config = self._core.config.models.get(name)
        if config is None or not config.allows(peer.account):
            names = [n for n, c in self._core.config.models.items() if c.allows(peer.account)]
            raise ApiError(
                400,
                f"base model {name!r} is not one of this pool's for account {peer.account!r}",
                f"Use one of: {', '.join(names) or 'none'} (names of plexrl.yaml, no paths or hub ids)",
            )
        return config

    def model(self, peer: Peer, name: str) -> Model:
        """A live model of this job: 404 when there is none, 400 when it is gone."""
        model = self._core.book.models.get(name)
        if model is None or model.created.job != peer.job:
            raise ApiError(404, f"there is no model {name!r} of this job", "Create it first")
        if model.ended:
            raise ApiError(400, f"model {name!r} is gone: {model.ended}", _resume(model))
        return model

    def saved(self, peer: Peer, path: str) -> Path:
        """The folder of a `tinker://<run>/<kind>/<name>` path of this user (400)."""
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

    def readable(self, version: str) -> None:
        """Refuses (400) a version that is neither in the nodes' memory (or NVMe) nor on disk."""
        known = self._core.book.versions[version]
        if known.nodes or on_disk(known):
            return
        raise ApiError(
            400,
            f"version {version!r} is gone",
            f"The newest {self._core.config.limits.versions_per_model} of a model that is not unloaded are kept, and "
            "those with a name until they are deleted; publish it again",
        )

    def fresh(self, peer: Peer, version: str, mend: str) -> None:
        """Refuses (400, StaleVersion) a version that is further behind its model's newest than the job allows."""
        allowed = self._core.book.jobs[peer.job].attached.max_staleness
        if allowed is not None:
            behind, newest = self._core.book.behind(version)
            if behind > allowed:
                raise StaleVersion(version, newest, behind, allowed, mend)

    def sampler(self, peer: Peer, name: str) -> records.SamplerOpened:
        """A sampling session of this job (404)."""
        opened = self._core.book.samplers.get(name)
        if opened is None or opened.job != peer.job:
            raise ApiError(404, f"there is no sampling session {name!r} of this job", "Create one")
        return opened


def on_disk(version: Version) -> bool:
    """Whether a version can be read back from its folder."""
    return bool(version.published.folder) and Path(version.published.folder).is_dir()


def _resume(model: Model) -> str:
    if model.checkpoint:
        return f"Create a new one from its last checkpoint, {model.checkpoint!r}"
    return "Create a new one; no checkpoint was saved"
