"""Run one daemon of a development cluster and end everything that descends from it when it ends.

Started as a plain file (`python -I -S keeper.py SECONDS COMMAND...`), so that it imports nothing of PlexRL.
proctrack/linuxproc leaves orphans of jobs alive, and a job may detach from anything it likes; as the subreaper of its
tree this process is their new parent, so that the cluster ends exactly what it started and need not guess by name.
"""

import ctypes
import os
import signal
import sys
import time

_PR_SET_CHILD_SUBREAPER = 36
_GRACE_SECONDS = 3.0


def _children() -> list[int]:
    me = os.getpid()
    with open(f"/proc/{me}/task/{me}/children") as listing:
        return [int(pid) for pid in listing.read().split()]


def _reap() -> bool:
    """Collect ended children; False when there are none left."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def _end_rest() -> None:
    """Orphans become our children one generation at a time: ask, then kill, until none is left."""
    deadline = time.monotonic() + _GRACE_SECONDS
    asked: set[int] = set()
    while _reap():
        late = time.monotonic() >= deadline
        for pid in _children():
            if late or pid not in asked:
                os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
                asked.add(pid)
        time.sleep(0.02)


def main(patience: float, command: list[str]) -> int:
    """Run `command`. SIGTERM and SIGINT are passed on to it, and after `patience` seconds more it is killed.

    Returns its exit code, 128 + signal if it died by one.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    caught: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _frame: caught.append(number))
    child = os.posix_spawn(command[0], command, os.environ, setsigdef=[signal.SIGTERM, signal.SIGINT])
    deadline = float("inf")
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == child:
            break
        if caught:
            os.kill(child, caught.pop())
            deadline = min(deadline, time.monotonic() + patience)
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
        if not pid:
            time.sleep(0.05)
    _end_rest()
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
