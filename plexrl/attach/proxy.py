"""The loopback proxy of one logical job: `python -I -m plexrl.attach.proxy`, settings as JSON on stdin.

It ends HTTP in the job's own cgroup and under the job's uid, so that neither the API key nor plain HTTP crosses the
network, and so that the address which the job's programs know outlives any head. When it listens and is admitted it
prints one line, `{"port": N}`, or `{"error": why}`, and then leaves its parent's session.
"""

import asyncio
import contextlib
import os
import resource
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import uvicorn
import uvloop

from plexrl.attach.app import App
from plexrl.attach.link import Link
from plexrl.attach.settings import Settings
from plexrl.types import BadInput, PlexrlError

_LAST_S = 5.0


class _Listener(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the proxy's own: it has to take leave of the head first."""
        yield


async def serve(settings: Settings, ready: Callable[[int], None]) -> None:
    """Run a proxy until its lifeline closes or SIGTERM comes; ready(port) is called once it listens and is admitted.

    Raises PlexrlError when it is not admitted.
    """
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()

    def end() -> None:
        ended.set()
        # Nobody else ends a proxy under proctrack/linuxproc: it must not wait for what does not come.
        loop.call_later(_LAST_S, os._exit, 0)

    loop.add_signal_handler(signal.SIGTERM, end)

    def lifeline() -> None:
        if not os.read(settings.lifeline, 4096):
            loop.remove_reader(settings.lifeline)
            end()

    loop.add_reader(settings.lifeline, lifeline)
    link = Link(settings)
    link.start()
    over = loop.create_task(ended.wait())
    failure = loop.create_task(link.failure())
    waiting: set[asyncio.Future[Any]] = {over, failure}
    try:
        admitted = loop.create_task(link.admitted())
        await asyncio.wait({admitted, *waiting}, return_when=asyncio.FIRST_COMPLETED)
        if failure.done():
            await failure
        if over.done():
            admitted.cancel()
            return
        await admitted
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            app = App(link, settings.secret, settings.holds.create)
            server = _Listener(
                uvicorn.Config(
                    app,
                    http="httptools",
                    loop="none",
                    ws="none",
                    lifespan="off",
                    log_config=None,
                    access_log=False,
                    proxy_headers=False,
                    server_header=False,
                    date_header=False,
                    backlog=1024,
                    # The clients end idle connections; a server that does so first breaks a request now and then.
                    timeout_keep_alive=3600,
                    timeout_graceful_shutdown=1,
                )
            )
            serving = loop.create_task(server.serve(sockets=[listening]))
            while not server.started and not serving.done():
                await asyncio.sleep(0.005)
            ready(listening.getsockname()[1])
            await asyncio.wait({serving, *waiting}, return_when=asyncio.FIRST_COMPLETED)
            server.should_exit = True
            if failure.done():
                await failure
            await link.close()
            await serving
            await app.close()
    finally:
        over.cancel()
        failure.cancel()
        await link.close()


def main() -> None:
    """Entry point of the module."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    detached = False

    def ready(port: int) -> None:
        nonlocal detached
        _say({"port": port})
        _detach()
        detached = True

    try:
        settings = _settings()
        uvloop.run(serve(settings, ready))
    except PlexrlError as error:
        if not detached:
            _say({"error": str(error)})
        sys.exit(error.exit_code)
    except Exception:
        _report(traceback.format_exc())
        raise


def _settings() -> Settings:
    try:
        settings = msgspec.json.decode(sys.stdin.buffer.read(), type=Settings)
        os.fstat(settings.lifeline)
    except msgspec.MsgspecError as error:
        raise BadInput(f"the proxy's settings are malformed: {error}", "Start it by plexrl.attach.helper") from error
    except OSError as error:
        raise BadInput("the proxy's lifeline is not open", "Hand down the read end of a pipe") from error
    return settings


def _say(line: dict[str, Any]) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
    sys.stdout.buffer.flush()


def _detach() -> None:
    """Leave the parent's session, terminal, folder and streams."""
    if os.getsid(0) != os.getpid():
        os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    os.chdir("/")
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    os.close(null)


def _report(text: str) -> None:
    """Nobody reads a detached proxy's stderr: leave what broke it in a private file where the job's files are."""
    fd, _ = tempfile.mkstemp(prefix="plexrl-proxy-", suffix=".log")
    with os.fdopen(fd, "w") as file:
        file.write(text)


if __name__ == "__main__":
    main()
