"""A user's checkpoints on the pool's disk: listed, and deleted when nothing uses them."""

import asyncio
import contextlib
import json
import secrets
import shutil
from pathlib import Path

from plexrl.pool.api.access import PATH, Access
from plexrl.pool.core import Core
from plexrl.pool.layout import meta_of
from plexrl.types import ApiError, Peer, PlexrlError, answers, commands

_KINDS = ("weights", "sampler_weights")
_GONE = ".deleted-"


class Checkpoints:
    """Answers the commands about checkpoints; each user has a folder of their own."""

    def __init__(self, core: Core, access: Access):
        self._core = core
        self._access = access

    async def list_checkpoints(self, peer: Peer, command: commands.ListCheckpoints) -> answers.CheckpointsList:
        """Read from the disk, so that what an earlier head or pool wrote is there too."""
        found = await asyncio.to_thread(_listed, self._core.layout.checkpoints / str(peer.uid))
        return answers.CheckpointsList(checkpoints=tuple(found))

    async def delete_checkpoint(self, peer: Peer, command: commands.DeleteCheckpoint) -> answers.Ok:
        """Its name is free at once, its files in a moment."""
        folder = self._folder(peer, command.path)
        book = self._core.book
        opened = (book.entries[call].accepted for calls in book.open_calls.values() for call in calls)
        loading = any(
            model.created.init_path == str(folder) and (entry := book.entries.get(f"{model.id}:0")) and not entry.ended
            for model in book.models.values()
        )
        if loading or any(accepted.work.get("folder") == str(folder) for accepted in opened):
            raise ApiError(400, f"{command.path} is being written or read", "Delete it when that call has ended")
        await asyncio.to_thread(_delete, folder)
        return answers.Ok()

    def _folder(self, peer: Peer, path: str) -> Path:
        parts = path.removeprefix(PATH).split("/")
        if path.startswith(PATH) and len(parts) == 3 and parts[1] in _KINDS:
            with contextlib.suppress(PlexrlError):
                folder = self._core.layout.checkpoint(peer.uid, *parts)
                if folder.is_dir():
                    return folder
        raise ApiError(404, f"there is no checkpoint {path[:300]!r} of yours", "plexrl checkpoint list tells those")


def _listed(root: Path) -> list[answers.Checkpoint]:
    """Newest first."""
    found: list[tuple[float, answers.Checkpoint]] = []
    for kind in _KINDS:
        for folder in root.glob(f"*/{kind}/*"):
            if folder.name.startswith(".") or not folder.is_dir():
                continue
            with contextlib.suppress(FileNotFoundError):
                # Deleted meanwhile, if one is not found.
                files = [path.stat() for path in folder.rglob("*") if path.is_file()]
                meta = json.loads(meta_of(folder).read_text()) if meta_of(folder).is_file() else {}
                # A model's id is in its folder's name, its colons written as plus signs.
                model = folder.parent.parent.name.replace("+", ":")
                saved = folder.stat().st_mtime
                checkpoint = answers.Checkpoint(
                    path=f"{PATH}{model}/{kind}/{folder.name}",
                    kind=kind,
                    base=meta.get("base", ""),
                    lora_rank=meta.get("lora_rank"),
                    bytes=sum(file.st_size for file in files),
                    saved=int(saved),
                )
                found.append((saved, checkpoint))
    return [checkpoint for _, checkpoint in sorted(found, key=lambda pair: pair[0], reverse=True)]


def _delete(folder: Path) -> None:
    """Out of sight in one step; what a crash leaves of the rest has a name that no checkpoint has."""
    gone = folder.with_name(f"{_GONE}{secrets.token_hex(8)}")
    try:
        folder.rename(gone)
        meta_of(folder).unlink(missing_ok=True)
        shutil.rmtree(gone)
    except OSError as error:
        raise ApiError(500, f"{folder.name} was not deleted whole ({error.strerror})", "Tell the admin") from error
