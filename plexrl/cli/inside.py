"""What the command line asks the pool of the job that it runs in: through the job's proxy, with the job's key."""

import json
import os
import urllib.error
import urllib.request
from typing import Any

from plexrl.types import BadInput, Unavailable

_ANSWER_S = 60.0
_PROXY = "http://127.0.0.1:"


def own_pool() -> str:
    """The pool of the job that we are in, "" outside of one."""
    address = os.environ.get("TINKER_BASE_URL", "")
    return os.environ.get("SLURM_PLEXRL_POOL", "its pool") if address.startswith(_PROXY) else ""


def own_job() -> str:
    """The Slurm number of the job that we are in, "" without one."""
    return os.environ.get("SLURM_JOB_ID", "")


def ask(route: str, **body: object) -> Any:
    """GET a route below /plexrl/v1/, or POST a JSON body to it. Raises Unavailable, or BadInput with the refusal."""
    address, key = os.environ["TINKER_BASE_URL"], os.environ.get("TINKER_API_KEY", "")
    data = json.dumps(body).encode() if body else None
    request = urllib.request.Request(
        f"{address.rstrip('/')}/plexrl/v1/{route}", data, {"X-API-Key": key, "Content-Type": "application/json"}
    )
    # The proxy is on this host: no other proxy between.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_ANSWER_S) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        told = json.load(error)
        detail = told.get("detail", "")
        if error.code in (402, 408, 429):
            raise Unavailable(f"the pool does not answer now: {detail}", "Try again") from error
        # The refusal has said its mend already, where it has one.
        mend = "" if told.get("mend") else "Run it inside a job of a pool, with its environment"
        raise BadInput(f"the pool refused: {detail}", mend) from error
    except OSError as error:
        raise Unavailable(f"nobody listens at {address} ({error})", "The job's proxy ends with the job") from error
