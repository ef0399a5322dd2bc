"""Starts a proxy and waits until it is admitted; what the job's programs then need in their environment."""

import os
import secrets
import select
import subprocess
import sys
import time

import msgspec

from plexrl.attach.settings import Settings
from plexrl.types import BadInput, PlexrlError, Unavailable

STALENESS = "PLEXRL_MAX_STALENESS"
"""The variable that a job is submitted (or attached) with."""

# The proxy's own deadline comes first, because it knows what it waited for.
_MARGIN_S = 3.0


class Started(msgspec.Struct, frozen=True):
    """A proxy that listens and is admitted; the caller may leave it or end it."""

    process: subprocess.Popen[bytes]
    port: int


class _Line(msgspec.Struct):
    port: int = 0
    error: str = ""


def new_secret() -> str:
    """A job's API key. The prefix is what the tinker SDK insists on."""
    return "tml-" + secrets.token_urlsafe(32)


def start(settings: Settings, deadline: float) -> Started:
    """Start the proxy. Raises PlexrlError with the reason when it is not admitted in deadline seconds."""
    try:
        os.fstat(settings.lifeline)
    except OSError as error:
        raise BadInput(f"lifeline {settings.lifeline} is not open", "Hand down the read end of a pipe") from error
    settings = msgspec.structs.replace(settings, deadline=max(deadline - _MARGIN_S, deadline / 2))
    ends = time.monotonic() + deadline
    process = subprocess.Popen(
        [sys.executable, "-I", "-m", "plexrl.attach.proxy"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=(settings.lifeline,),
    )
    try:
        try:
            process.stdin.write(msgspec.json.encode(settings))
            process.stdin.close()
        except BrokenPipeError as error:
            raise Unavailable("the proxy ended before it read its settings", "See its message above") from error
        line = _first_line(process, ends)
    except BaseException:
        process.kill()
        process.wait()
        raise
    if line.port:
        return Started(process, line.port)
    process.wait()
    raise PlexrlError(line.error)


def environment(port: int, secret: str, pool: str, no_proxy: str) -> dict[str, str]:
    """What a program needs to use the pool. no_proxy: what the job has; a site's HTTP proxy must not get our key."""
    hosts = [host for host in no_proxy.split(",") if host]
    hosts += [host for host in ("127.0.0.1", "localhost") if host not in hosts]
    return {
        "TINKER_BASE_URL": f"http://127.0.0.1:{port}",
        "TINKER_API_KEY": secret,
        "OPENAI_BASE_URL": f"http://127.0.0.1:{port}/v1",
        "OPENAI_API_KEY": secret,
        "NO_PROXY": ",".join(hosts),
        "no_proxy": ",".join(hosts),
        "SLURM_PLEXRL_POOL": pool,
    }


def own_no_proxy() -> str:
    """What this process's environment says of hosts to be reached directly."""
    return os.environ.get("NO_PROXY") or os.environ.get("no_proxy") or ""


def own_max_staleness() -> int | None:
    """What PLEXRL_MAX_STALENESS of this process's environment says. Raises BadInput for anything but a count."""
    text = os.environ.get(STALENESS, "").strip()
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise BadInput(
            f"{STALENESS} is {text[:40]!r}", "Give how many published versions behind the newest are allowed, from 0"
        )
    return int(text)


def _first_line(process: subprocess.Popen[bytes], ends: float) -> _Line:
    fd = process.stdout.fileno()
    read = b""
    while not read.endswith(b"\n"):
        left = ends - time.monotonic()
        if left <= 0 or not select.select([fd], [], [], left)[0]:
            raise Unavailable("the proxy was not ready in time", "See `plexrl pool status`, then submit again")
        more = os.read(fd, 65536)
        if not more:
            raise Unavailable(f"the proxy ended with {process.wait()}", "See its message above")
        read += more
    return msgspec.json.decode(read, type=_Line)
