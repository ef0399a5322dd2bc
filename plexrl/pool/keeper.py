"""Keeps the processes of a private pool running: a head and an agent, each started again when it dies or asks for it.

What sbatch_templates/pool.sbatch does for a site pool. Whoever dies at once five times stays dead, and then the pool
ends. The processes end with the keeper, however that ends.
"""

import asyncio
import ctypes
import logging
import os
import signal
import time
from collections.abc import Sequence

log = logging.getLogger("plexrl.keeper")
AGAIN = 75
_QUICK_S = 10.0
_FALLS = 5
_PAUSE_S = 1.0
_PR_SET_PDEATHSIG = 1


async def keep(head: Sequence[str], agent: Sequence[str]) -> int:
    """Run both until SIGINT or SIGTERM, which drain the pool, or until the head ends. The head's exit code.

    SIGHUP goes on to the head: it reads plexrl.yaml again.
    """
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    running: dict[str, asyncio.subprocess.Process] = {}
    loop.add_signal_handler(signal.SIGHUP, lambda: _hang_up(running.get("head")))
    end_agent = asyncio.Event()
    # An agent takes SIGTERM for the end of its allocation, and waits for what the head has to say about that.
    agents = asyncio.create_task(_keep("agent", agent, end_agent, signal.SIGINT, running))
    heads = asyncio.create_task(_keep("head", head, stop, signal.SIGTERM, running))
    await asyncio.wait([agents, heads], return_when=asyncio.FIRST_COMPLETED)
    stop.set()  # an agent that cannot be kept ends the pool
    code = await heads
    end_agent.set()
    return code or await agents


def _hang_up(child: asyncio.subprocess.Process | None) -> None:
    if child is not None and child.returncode is None:
        child.send_signal(signal.SIGHUP)


async def _keep(
    name: str,
    command: Sequence[str],
    stop: asyncio.Event,
    end: signal.Signals,
    running: dict[str, asyncio.subprocess.Process],
) -> int:
    """running: by name, the process that is there now."""
    falls = 0
    while True:
        began = time.monotonic()
        child = await asyncio.create_subprocess_exec(*command, start_new_session=True, preexec_fn=_end_with_parent)
        running[name] = child
        ended, told = asyncio.create_task(child.wait()), asyncio.create_task(stop.wait())
        await asyncio.wait([ended, told], return_when=asyncio.FIRST_COMPLETED)
        told.cancel()
        if stop.is_set():
            if child.returncode is None:
                child.send_signal(end)
            return max(await ended, 0)
        code = await ended
        if code >= 0 and code != AGAIN:
            return code
        falls = falls + 1 if time.monotonic() - began < _QUICK_S else 0
        if falls >= _FALLS:
            log.critical("the %s ended %d times at once, with %d: it is given up", name, falls, code)
            return AGAIN if code < 0 else code
        log.error("the %s ended with %d; starting it again", name, code)
        await asyncio.sleep(_PAUSE_S if falls > 1 else 0)


def _end_with_parent() -> None:
    """In the child: SIGTERM when the keeper dies without having been able to say so."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)
