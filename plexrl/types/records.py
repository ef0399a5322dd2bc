"""What the head journals: one struct per event, replayed by a new head and read by accounting.

Every record carries now_us, unix time in microseconds. Records marked (durable) are on disk before anything that
follows from them is acknowledged. `strip` gives the form without request and response bodies that the ledger keeps.
"""

from msgspec import Struct, structs

from plexrl.types.calls import Call
from plexrl.types.groups import GroupSpec, Placement
from plexrl.types.memory import Moved
from plexrl.types.spans import Span
from plexrl.types.words import Epoch


class Record(Struct, frozen=True, tag=True, kw_only=True, gc=False):
    """Base of all records. They hold no cycles, and a head holds many: the collector need not look at them."""

    now_us: int


class EpochStarted(Record):
    """(durable) A head took over. gpus: every GPU of the allocation. allocated_us: StartTime as slurmctld gives it."""

    epoch: Epoch
    pool: str
    instance: str
    gpus: tuple[str, ...]
    slurm_job: int
    allocated_us: int


class EpochEnded(Record):
    """(durable) The head ended in order: nobody writes in this epoch any more."""

    reason: str


class JobAttached(Record):
    """(durable) A logical job was admitted. job: `<Slurm job id>.<restart count>`.

    qos, partition: of its Slurm job. declared_gpus: what its script asked Slurm for, before that was taken out.
    max_staleness: how many versions behind the newest of a model it lets itself draw and train; None: any number.
    """

    job: str
    slurm_job: int
    uid: int
    user: str
    account: str
    qos: str = ""
    partition: str = ""
    declared_gpus: int = 0
    max_staleness: int | None = None


class JobEnded(Record):
    """(durable) A logical job ended; its deployments end with it."""

    job: str
    reason: str


class SessionOpened(Record):
    """(durable)"""

    session: str
    job: str
    uid: int
    account: str
    key: str


class SessionEnded(Record):
    """(durable)"""

    session: str
    reason: str


class GroupPlaced(Record):
    """(durable) A worker group has its gangs for life.

    base: model name. kind: lora or full. model: the owning full-parameter deployment, else "".
    """

    spec: GroupSpec
    placement: Placement
    base: str
    kind: str
    model: str


class GroupEnded(Record):
    """(durable)"""

    group: str
    reason: str


class Unbuilt(Record):
    """(durable) The engine of a gang that slept was ended: its deployments are whole in host memory or on NVMe.

    built: it is there again, and may have changed them.
    """

    gang: str
    built: bool = False


class ModelCreated(Record):
    """(durable) A deployment was asked for; its future is `<model>:0`. lora_rank None: full parameters."""

    model: str
    session: str
    job: str
    uid: int
    account: str
    base: str
    lora_rank: int | None
    seed: int
    attn: bool
    mlp: bool
    unembed: bool
    group: str
    init_path: str = ""
    init_optimizer: bool = False
    promise: str = "create_model"


class ModelEnded(Record):
    """(durable) A deployment is gone. lost: its state was destroyed by a fault, not by its owner."""

    model: str
    reason: str
    lost: bool = False


class VersionPublished(Record):
    """(durable) An immutable snapshot of a model's weights exists. folder: its place on disk, "" if in memory only.

    nodes: where it was packed into memory. checksum: of its bytes, by `memory.checksum`; "" of an engine without any.
    ephemeral: it has no name of its user's, and goes with the sessions that read it.
    """

    version: str
    model: str
    job: str
    uid: int
    account: str
    base: str
    lora_rank: int | None
    attn: bool
    mlp: bool
    unembed: bool
    size: int
    nodes: tuple[str, ...]
    folder: str
    checksum: str = ""
    ephemeral: bool = False


class VersionDropped(Record):
    """(durable) The nodes have the snapshot no more, neither in memory nor on NVMe; a folder can be read back."""

    version: str


class VersionKept(Record):
    """(durable) The nodes that have the snapshot are others now: one was lost, or has read it from its folder."""

    version: str
    nodes: tuple[str, ...]


class SamplerOpened(Record):
    """(durable) A sampling session, pinned to one version ("" = the base model)."""

    sampler: str
    session: str
    job: str
    uid: int
    base: str
    version: str


class SeqConsumed(Record):
    """(durable) A training call was refused at submission; its seq_id will not come again.

    since above 0: none from `since` to seq will (a gap that never closed); calls held behind it fail.
    """

    model: str
    seq: int
    since: int = 0


class CallAccepted(Record):
    """(durable) A call is ours: it ends exactly once. after: the last result delivered to the job before it."""

    call: Call
    uid: int
    digest: str
    work: dict[str, object]
    body: bytes
    after: str = ""


class CallEnded(Record):
    """(durable) ok, or error with its category (user, server, cancelled). cpu_us: the busiest rank's CPU time.

    moved_bytes: state that all ranks had to move, out and in, before the call could run; moved_us: what that took.
    """

    id: str
    ok: bool
    content_type: str = ""
    body: bytes = b""
    error: str = ""
    category: str = ""
    units: int = 0
    cpu_us: int = 0
    wall_us: int = 0
    gang: str = ""
    headers: dict[str, str] = {}
    moved_bytes: int = 0
    moved_us: int = 0


class Delivered(Record):
    """A result was handed to the client's proxy for the first time."""

    id: str
    job: str


class SpanClosed(Record):
    """A closed interval of one GPU."""

    span: Span


class Switched(Record):
    """A gang's state moved on one GPU: in when incoming, else out."""

    gang: str
    gpu: str
    incoming: bool
    moved: Moved


class AgentInterval(Record):
    """An agent's own measure, by its own clock, that it held a GPU from start_us to end_us.

    A later one of the same start replaces an earlier one.
    """

    node: str
    gpu: str
    slurm_job: int
    start_us: int
    end_us: int
    final: bool


AnyRecord = (
    EpochStarted
    | EpochEnded
    | JobAttached
    | JobEnded
    | SessionOpened
    | SessionEnded
    | GroupPlaced
    | GroupEnded
    | Unbuilt
    | ModelCreated
    | ModelEnded
    | VersionPublished
    | VersionDropped
    | VersionKept
    | SamplerOpened
    | SeqConsumed
    | CallAccepted
    | CallEnded
    | Delivered
    | SpanClosed
    | Switched
    | AgentInterval
)


def strip(record: Record) -> Record:
    """The record without bodies: what the ledger keeps of it."""
    if isinstance(record, CallAccepted | CallEnded):
        return structs.replace(record, body=b"")
    return record
