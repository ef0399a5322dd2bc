"""Names that users choose, and the `tinker://` paths made of them."""

import re
from typing import NamedTuple

from plexrl.gateway.refusals import bad

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_RUN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:-]{0,191}")
_ID = re.compile(r"[\x21-\x7e]{1,256}")
_KINDS = ("weights", "sampler_weights")


class CheckpointPath(NamedTuple):
    """`tinker://<run>/<kind>/<name>`; kind is `weights` or `sampler_weights`."""

    run: str
    kind: str
    name: str


def checkpoint_name(name: str) -> str:
    """A name for a checkpoint: one path component, no `..`. Raises ApiError 400."""
    if not _NAME.fullmatch(name) or ".." in name:
        raise bad(
            f"{name[:160]!r} is no name for a checkpoint",
            "Use up to 128 letters, digits, `.`, `_` and `-`, without `/` and `..`",
        )
    return name


def checkpoint_path(path: str) -> CheckpointPath:
    """Takes a path apart. Raises ApiError 400 on anything that is not exactly a path this pool hands out."""
    parts = path.removeprefix("tinker://").split("/")
    if not path.startswith("tinker://") or len(parts) != 3 or parts[1] not in _KINDS:
        raise bad(
            f"{path[:256]!r} is no checkpoint path",
            "Give the path that save_state or save_weights_for_sampler returned: tinker://<model>/weights/<name>",
        )
    if not _RUN.fullmatch(parts[0]) or ".." in parts[0]:
        raise bad(f"{parts[0][:200]!r} in {path[:256]!r} is no model id", "Give the path as it was returned")
    return CheckpointPath(parts[0], parts[1], checkpoint_name(parts[2]))


def identifier(what: str, value: str) -> str:
    """An id that the pool handed out; whether it exists is the head's to say. Raises ApiError 400."""
    if not _ID.fullmatch(value):
        raise bad(f"{value[:160]!r} is no {what}", f"Give the {what} as the pool returned it")
    return value


def base_model(name: str) -> str:
    """A base model's name as it may stand in plexrl.yaml; whether it does is the head's to say. Raises ApiError 400."""
    parts = name.split("/")
    if not name.isascii() or len(name) > 256 or len(parts) > 2 or not all(_NAME.fullmatch(part) for part in parts):
        raise bad(
            f"{name[:160]!r} is no base model's name",
            "Ask for a base model by its name in the pool's plexrl.yaml (get_server_capabilities lists them), "
            "not by a path or address",
        )
    return name
