"""Errors that say what was wrong, where, and the mend."""


class PlexrlError(Exception):
    """Base of all errors shown to people. exit_code is what the command line ends with."""

    exit_code = 1

    def __init__(self, what: str, mend: str = "") -> None:
        super().__init__(f"{what}. {mend}" if mend else what)
        self.what = what
        self.mend = mend


class BadInput(PlexrlError):
    """The caller's input is wrong; trying again unchanged is useless."""

    exit_code = 2


class DoesNotFit(PlexrlError):
    """A model, gang or snapshot exceeds a device or host budget."""

    exit_code = 3


class Unavailable(PlexrlError):
    """The pool, a daemon or a peer is not there now; trying again may help."""

    exit_code = 4


class ApiError(PlexrlError):
    """A refusal that a client sees as an HTTP status with a JSON body.

    consumed: (model, seq) of a refused training call. The client counts that seq as used, so the head must too.
    kind: the body's `type`, "" where the status says it all.
    """

    consumed: tuple[str, int] | None = None
    kind = ""

    def __init__(self, status: int, what: str, mend: str = "") -> None:
        super().__init__(what, mend)
        self.status = status


class StaleVersion(ApiError):
    """What drew, or would draw, is more versions behind the newest of its model than the job allows (max_staleness)."""

    kind = "stale_version"

    def __init__(self, version: str, newest: str, behind: int, allowed: int, mend: str) -> None:
        super().__init__(
            400,
            f"version {version!r} is {behind} behind {newest!r}, the newest of its model; this job allows {allowed} "
            "(max_staleness)",
            mend,
        )
        self.version = version
        self.newest = newest
