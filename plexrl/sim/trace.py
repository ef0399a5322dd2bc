"""A recorded run as one file of JSON lines, from a live pool (`plexrl trace export`): schema, reading, writing.

The first line is the header; then, in any order, jobs, groups, links, switches and calls. Each line is an object whose
`type` says which. Times are integer microseconds: `at`-like fields count from the header's from_us. No line holds what
users sent or got.
"""

import gzip
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, field

from plexrl.types import BadInput, CallKind, Role

VERSION = 1
_GZIP = b"\x1f\x8b"


class Line(Struct, frozen=True, kw_only=True, tag_field="type", forbid_unknown_fields=True, omit_defaults=True):
    """Base of all lines."""


class Header(Line, kw_only=True, tag="header"):
    """What was recorded. from_us: unix microseconds of time 0. until_us: end of the recording.

    gpus: names, `<node>:<index>`. gpu_bytes, host_bytes: of a GPU and of a node, 0 where unknown. policy: the
    scheduler's section of the configuration, by the names of scheduler.Policy. virtual: its devices give stable virtual
    addresses (CUDA), so that gangs need no fixed places in memory. classes: GPU-microseconds by class of the ledger.
    """

    version: int
    pool: str = ""
    from_us: int
    until_us: int
    gpus: tuple[str, ...]
    gpu_bytes: int = 0
    host_bytes: int = 0
    policy: dict[str, Any] = field(default_factory=dict)
    virtual: bool = False
    classes: dict[str, int] = field(default_factory=dict)


class Job(Line, kw_only=True, tag="job"):
    """A logical job. arrival_us: it asked for its first model or sample. ended_us: its last result, or its end.

    busy_us, switch_us, kept_us: GPU-microseconds charged to it.
    """

    job: str
    account: str = ""
    user: str = ""
    arrival_us: int
    ended_us: int
    busy_us: int = 0
    switch_us: int = 0
    kept_us: int = 0


class Seat(Struct, frozen=True, kw_only=True):
    """A gang and its GPUs. build_us: its first switch. switches: those after it; switch_us: what they took, exposed,
    together."""

    gang: str
    gpus: tuple[str, ...]
    build_us: int = 0
    switches: int = 0
    switch_us: int = 0


class Group(Line, kw_only=True, tag="group"):
    """A worker group. base: model. shared: it hosts adapters of any job (LoRA). device_bytes, host_bytes,
    residual_bytes: as in types.GroupSpec."""

    group: str
    role: Role
    base: str = ""
    shared: bool = False
    device_bytes: int
    host_bytes: int = 0
    residual_bytes: int = 0
    seats: tuple[Seat, ...]


class Link(Line, kw_only=True, tag="link"):
    """What the pool had learned of a node's links by the time of the export: GB (1e9 bytes) per second and GPU between
    GPU and host, and between host and NVMe, 0 where nothing was seen; overhead_us: of a switch, beyond its copies."""

    node: str
    gbps_in: float = 0.0
    gbps_out: float = 0.0
    gbps_refill: float = 0.0
    gbps_spill: float = 0.0
    overhead_us: int = 0


class Move(Line, kw_only=True, tag="switch"):
    """A gang's state moved on one GPU. bytes_clean: those that the host had already. waited_us: of took_us, what it
    waited for another gang's bytes to leave."""

    gang: str
    gpu: str
    at_us: int
    incoming: bool
    bytes_in: int = 0
    bytes_out: int = 0
    bytes_clean: int = 0
    took_us: int = 0
    waited_us: int = 0


class Request(Line, kw_only=True, tag="call"):
    """A call. accepted_us <= started_us <= ended_us. served_us: of the time between the last two, what its gang spent
    on work. delivered_us: the job was given the result; None: never.

    units: tokens worked on. seen: results that the job had been given when it submitted this, creations of models not
    counted; think_us: from the last of them (or its arrival) to the submission. after: id of that result.
    """

    id: str
    job: str
    group: str
    deployment: str = ""
    kind: CallKind
    seq: int | None = None
    accepted_us: int
    started_us: int
    ended_us: int
    served_us: int
    delivered_us: int | None = None
    units: int = 1
    cpu_us: int = 0
    gang: str = ""
    seen: int = 0
    think_us: int = 0
    after: str = ""


AnyLine = Header | Job | Group | Link | Move | Request
_decode = msgspec.json.Decoder(AnyLine).decode
_encode = msgspec.json.Encoder().encode


class Recording(Struct, kw_only=True):
    """A trace in memory. calls: by submission."""

    header: Header
    jobs: list[Job] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)
    calls: list[Request] = field(default_factory=list)

    def lines(self) -> list[AnyLine]:
        """In the order of a file."""
        return [self.header, *self.jobs, *self.groups, *self.links, *self.moves, *self.calls]


def encode(recording: Recording) -> bytes:
    """The file's content."""
    return b"".join(_encode(line) + b"\n" for line in recording.lines())


def write(recording: Recording, path: Path) -> None:
    """Raises BadInput where the file cannot be written."""
    try:
        path.write_bytes(encode(recording))
    except OSError as error:
        raise BadInput(f"{path} cannot be written ({error.strerror})", "Name a file in a folder of yours") from error


def read(path: Path) -> Recording:
    """A trace, plain or gzipped. Raises BadInput, naming file, line and field, for what is none of this version."""
    try:
        data = path.read_bytes()
        data = gzip.decompress(data) if data.startswith(_GZIP) else data
    except (OSError, EOFError) as error:
        raise BadInput(f"{path} cannot be read ({error})", "Write one with plexrl trace export") from error
    return parse(data.splitlines(), str(path))


def is_trace(path: Path) -> bool:
    """Whether a file is gzipped or begins as a trace does. False where it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(16).startswith((_GZIP, b'{"type":"header"'))
    except OSError:
        return False


def parse(lines: Iterable[bytes], where: str) -> Recording:
    """`where`: the file's name, for errors. Raises BadInput as `read` does."""
    recording: Recording | None = None
    for number, text in enumerate(lines, 1):
        try:
            line = _decode(text)
        except msgspec.MsgspecError as error:
            mend = "A trace is what plexrl trace export writes"
            raise BadInput(f"{where}:{number}: {error}", mend) from error
        if recording is None:
            if not isinstance(line, Header):
                raise BadInput(f"{where}:{number}: the header is missing", "It is the first line of a trace")
            if line.version != VERSION:
                mend = f"This plexrl reads version {VERSION}: export it again"
                raise BadInput(f"{where}:{number}: version {line.version}", mend)
            recording = Recording(header=line)
            continue
        match line:
            case Header():
                raise BadInput(f"{where}:{number}: a second header", "One file holds one trace")
            case Job():
                recording.jobs.append(line)
            case Group():
                recording.groups.append(line)
            case Link():
                recording.links.append(line)
            case Move():
                recording.moves.append(line)
            case Request():
                recording.calls.append(line)
    if recording is None:
        raise BadInput(f"{where} is empty", "Write one with plexrl trace export")
    recording.calls.sort(key=lambda call: call.accepted_us)
    _check(recording, where)
    return recording


def _check(recording: Recording, where: str) -> None:
    jobs = {job.job for job in recording.jobs}
    groups = {group.group for group in recording.groups}
    for call in recording.calls:
        for name, known in (("job", jobs), ("group", groups)):
            if getattr(call, name) not in known:
                what = f"{where}: call {call.id}: its {name} {getattr(call, name)!r} has no line"
                raise BadInput(what, "The file is cut: export it again")
