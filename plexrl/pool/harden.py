"""A process that holds tenants' state leaves no core dump and lets no other process of its uid read its memory."""

import ctypes
import resource

_PR_SET_DUMPABLE = 4


def harden() -> None:
    """No core dumps, no ptrace from processes without privilege. See docs/security.md for what that does not cover."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
