"""Pools as they are now, as far as the asking account may see: by the job's own proxy, or by registry and status."""

import json
import os
import time
from pathlib import Path
from typing import Any

from plexrl.cli.books import trusted
from plexrl.cli.inside import ask, own_pool
from plexrl.types import BadInput, PlexrlError
from plexrl.wire.registry import Registry

_OLD_S = 10


def pools(registry: str, pool_uids: str, name: str) -> list[dict[str, Any]]:
    """One pool, or all: pool, state, and what is inside where that may be seen (else None): gpus, open_calls, jobs.

    Inside a job it is that job's pool by its head, unless another is named. everybody: whether all users' jobs may be
    seen, as root and the pool's account do from outside. Raises BadInput where there is nothing to look at.
    """
    inside = own_pool()
    if inside and name in ("", inside):
        return [{"pool": inside, "state": "ready", "everybody": False, **ask("pool")}]
    if not registry:
        raise BadInput("no registry was named", "Set PLEXRL_REGISTRY, or run it inside a job of a pool")
    books = trusted(registry, pool_uids)
    return [_pool(books, each) for each in ([name] if name else books.names())]


def _pool(books: Registry, name: str) -> dict[str, Any]:
    declared, live = books.declared(name), books.live(name)
    everybody = os.getuid() in (0, declared.owner_uid)
    found = {"pool": name, "state": live.state if live else "down", "everybody": everybody}
    found |= {"gpus": None, "open_calls": None, "jobs": None}
    path = Path(declared.state_dir) / "run" / "status.json"
    if live is None or not everybody or not path.exists():
        return found
    try:
        status = json.loads(path.read_bytes())
    except OSError as error:
        raise PlexrlError(f"{path} cannot be read ({error.strerror})") from error
    age_s = int(time.time() - status["now_us"] / 1e6)
    late = f" (The head said so {age_s} s ago, and nothing since.)" if age_s > _OLD_S else ""
    return found | {
        "gpus": [
            {"gpu": gpu, "turn": what["turn"], "phase": what["phase"], "yours": False}
            for gpu, what in status["gpus"].items()
        ],
        "open_calls": sum(job["open_calls"] for job in status["jobs"].values()),
        "jobs_attached": len(status["jobs"]),
        "jobs": [
            {
                "job": job,
                "user": what["user"],
                "open_calls": what["open_calls"],
                "models": what["models"],
                "explained": what["explained"] + late,
            }
            for job, what in status["jobs"].items()
        ],
    }
