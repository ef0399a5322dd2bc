"""Messages between the head and its agents and engine hosts (leaders), on the pool's inner CURVE channel."""

import msgspec
from msgspec import Struct

from plexrl.types import Epoch, Slab


class Message(Struct, frozen=True, tag=True, kw_only=True):
    """Base of all messages."""


# --- head to anybody --------------------------------------------------------------------------------------------------


class Who(Message):
    """The head does not know the sender: say hello."""


class Welcome(Message):
    """The hello was accepted by the head of this epoch."""

    epoch: Epoch


class Ping(Message):
    """Sign of life, both ways."""


class Reply(Message):
    """Answer to an order. value: what the order's docstring says."""

    id: int
    ok: bool
    value: dict[str, object] = {}
    error: str = ""
    category: str = "server"


# --- agents -----------------------------------------------------------------------------------------------------------


class AgentHello(Message):
    """A node's agent, its GPUs in order, and what it holds.

    birth: another one means that the process, its memory and its engine hosts are others. children: engine hosts as
    (gang, rank, build). slabs: names in the arena. spilled: names of slabs that are on NVMe instead.
    """

    node: str
    gpus: tuple[str, ...]
    birth: str
    children: tuple[tuple[str, int, str], ...]
    slabs: tuple[str, ...]
    spilled: tuple[str, ...] = ()


class ChildEnded(Message):
    """An engine host's process ended without having been told to. tail: the end of its log."""

    gang: str
    rank: int
    build: str
    code: int
    tail: str


class Allocate(Message):
    """Order: a slab in the node's arena, idempotent by name. Value: slab.

    gpu: index of the GPU that it will move to and from; its NUMA node is preferred. -1: any. Category `user`: it does
    not fit.
    """

    id: int
    name: str
    size: int
    owner: int
    gpu: int = -1


class Free(Message):
    """Order: give a slab back, wherever its bytes are (one that is gone is fine)."""

    id: int
    name: str


class Spill(Message):
    """Order: move a slab that no engine host maps any more to NVMe. Value: bytes, seconds.

    The slab is cleared and free afterwards. Category `user`: no room there; then the slab is as it was.
    """

    id: int
    name: str


class Refill(Message):
    """Order: move a spilled slab back into the arena; it may lie elsewhere than before. Value: slab, bytes, seconds.

    Category `user`: no room in the arena, it stays on NVMe. `damaged`: what was read is not what was written; the
    bytes are lost, `Free` forgets them.
    """

    id: int
    name: str
    gpu: int = -1


class Fill(Message):
    """Order: a new slab with the weights of a version, from its folder; the existing one of that name. Value: slab.

    model_dir, dtype, lora_rank, attn, mlp, unembed: what the weights are of. Category `user`: no room, or no such file.
    """

    id: int
    name: str
    owner: int
    folder: str
    model_dir: str
    dtype: str
    lora_rank: int | None
    attn: bool
    mlp: bool
    unembed: bool
    gpu: int = -1


class Spawn(Message):
    """Order: start one rank of a gang. base: name and size of the frozen base's slab, if it has one. Value: pid.

    build: which life of the gang; what is left of an earlier one is ended first.
    """

    id: int
    gang: str
    rank: int
    build: str
    gpu: int
    engine: dict[str, object]
    nodes: tuple[str, ...]
    base: tuple[str, int] | None
    owner: int


class Kill(Message):
    """Order: end all ranks of a gang on this node. Answered when their processes are gone."""

    id: int
    gang: str


class Shutdown(Message):
    """The pool ends: end the engine hosts, close the interval, exit."""


# --- engine hosts -----------------------------------------------------------------------------------------------------


class Work(Struct, frozen=True, kw_only=True):
    """One call as an engine host needs it. args: kind-specific (optimizer, folder, slabs by node, version, ...)."""

    id: str
    kind: str
    deployment: str
    seq: int | None
    args: dict[str, object]
    body: bytes


class Outcome(Struct, frozen=True, kw_only=True):
    """How a call ended, kept by the engine host until the head has it on disk."""

    id: str
    ok: bool
    content_type: str = ""
    body: bytes = b""
    error: str = ""
    category: str = ""
    units: int = 0
    cpu_us: int = 0
    wall_us: int = 0
    moved_bytes: int = 0
    moved_us: int = 0


class HostHello(Message):
    """A gang's leader. build: which life of the gang. queue: calls it holds that have not ended.

    kept: device bytes that its ranks' processes held beside their extents when they were built, the most of one.
    """

    gang: str
    build: str
    resident: bool
    deployments: tuple[str, ...]
    versions: tuple[str, ...]
    outcomes: tuple[Outcome, ...]
    queue: tuple[str, ...]
    device_bytes: int
    kept: int = 0


class Ended(Message):
    """A call ended."""

    outcome: Outcome


class Progress(Message):
    """What a sample has drawn so far (a SampleResponse), of calls whose work asks for it. tokens: of all sequences."""

    call: str
    tokens: int
    body: bytes


class Paused(Message):
    """The turn has stopped at a safe point; unfinished calls in order, the first may be half done."""

    build: str
    unfinished: tuple[str, ...]


class Order(Message):
    """Order to an engine host: create, drop, attach, detach, take, offload, load, spill or rehome.

    Value: what was moved; of take, what was drawn of each call.
    """

    id: int
    verb: str
    args: dict[str, object]


class Run(Message):
    """Start, continue or widen the turn. A call that the host already holds goes on where it stopped."""

    works: tuple[Work, ...]


class Pause(Message):
    """Stop at the next safe point and answer Paused."""


class Ack(Message):
    """These outcomes are on disk: forget them."""

    ids: tuple[str, ...]


class Cancel(Message):
    """End a call early if it has not ended."""

    call: str


class Exit(Message):
    """End the gang."""


AnyMessage = (
    Who
    | Welcome
    | Ping
    | Reply
    | AgentHello
    | ChildEnded
    | Allocate
    | Free
    | Spill
    | Refill
    | Fill
    | Spawn
    | Kill
    | Shutdown
    | HostHello
    | Ended
    | Progress
    | Paused
    | Order
    | Run
    | Pause
    | Ack
    | Cancel
    | Exit
)

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(AnyMessage).decode


def slab_of(value: object) -> Slab:
    """A Slab from a message's plain value."""
    return msgspec.convert(value, Slab)
