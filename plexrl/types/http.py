"""HTTP messages as they cross the CURVE connection between a job's proxy and the head."""

from msgspec import Struct, field


class Peer(Struct, frozen=True, kw_only=True):
    """Who speaks, as MUNGE and slurmctld (of a private pool: the kernel) vouch for it. job: `<job id>.<restart>`.

    qos, partition, declared_gpus: as in `records.JobAttached`.
    """

    uid: int
    user: str
    account: str
    job: str
    qos: str = ""
    partition: str = ""
    declared_gpus: int = 0


class HttpRequest(Struct, frozen=True, kw_only=True):
    """A request; header names in lower case."""

    method: str
    path: str
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


class HttpResponse(Struct, frozen=True, kw_only=True):
    """A response."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
