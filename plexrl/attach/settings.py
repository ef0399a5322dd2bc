"""What a proxy is told when it starts: JSON on its stdin, so that the secret stands in no argv and no environment."""

import msgspec


class Holds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long a request is held while there is no head, seconds; see attach.holds for what is answered then.

    silent: how long a connected head may leave a request unanswered; above its own hold of a poll, below the 45 s after
    which the SDK gives a poll up.
    """

    poll: float = 25.0
    submit: float = 20.0
    create: float = 50.0
    brief: float = 2.0
    silent: float = 40.0


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a proxy.

    pool_uids: whose registry files are believed, beside root's. job, restart: the Slurm job, or for a private pool
    without Slurm a process id and 0. secret: the API key that the job's programs show. lifeline: an inherited pipe's
    read end; the proxy ends when its last writer does. deadline: seconds to be admitted in, else the start fails.
    max_staleness: published versions behind the newest that the job may draw from; None: any number.
    """

    pool: str
    registry: str
    pool_uids: tuple[int, ...]
    job: int
    restart: int
    secret: str
    lifeline: int
    munge_socket: str | None = None
    max_staleness: int | None = None
    deadline: float = 40.0
    holds: Holds = Holds()
