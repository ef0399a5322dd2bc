"""The registry as a command line reads it: whose files are believed."""

import os

from plexrl.types import BadInput
from plexrl.wire.registry import Registry


def trusted(directory: str, uids: str = "") -> Registry:
    """Believes root, this account and the accounts named (`UID,UID`); root also believes whom it gave the directory to.

    Raises BadInput for something that is no list of uids.
    """
    try:
        believed = {int(uid) for uid in uids.split(",") if uid} | {os.getuid()}
    except ValueError as error:
        raise BadInput(f"--pool-uids {uids!r} is no list of uids", "Write --pool-uids UID,UID") from error
    if os.getuid() == 0 and os.path.isdir(directory):
        believed.add(os.stat(directory).st_uid)
    return Registry(directory, frozenset(believed))
