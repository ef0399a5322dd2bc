"""A call: one API request that needs a model."""

from enum import StrEnum

from msgspec import Struct


class CallKind(StrEnum):
    """The functions that a deployment can execute."""

    SAMPLE = "sample"
    FORWARD = "forward"
    FORWARD_BACKWARD = "forward_backward"
    OPTIM_STEP = "optim_step"
    SAVE_STATE = "save_state"
    LOAD_STATE = "load_state"
    PUBLISH = "publish"


class Call(Struct, frozen=True, kw_only=True, gc=False):
    """What the scheduler knows of a call. It never sees a tensor.

    id: the request id, `<model id>:<seq>` or `<sampling session>:<seq>`.
    seq: the order among the training calls of one deployment; None for samples, which are unordered.
    cost_us: expected service time on the whole gang, microseconds (a prior until a model is fitted).
    units: expected work in tokens; splits the seconds of a shared turn. Of them prompt_tokens are read, and the rest
    drawn by so many sequences: of a sample; for accounting alone.
    peer: a second worker group whose first gang is needed in the same turn (direct transfer of weights), else "".
    """

    id: str
    kind: CallKind
    group: str
    deployment: str
    job: str
    seq: int | None = None
    cost_us: int = 0
    units: int = 1
    peer: str = ""
    prompt_tokens: int = 0
    sequences: int = 1


class Result(Struct, frozen=True, kw_only=True):
    """What an engine returns for a call, in the form in which the client gets it.

    units: tokens really worked on. cpu_us: CPU time of this rank, microseconds. moved_bytes, moved_us: state that the
    call itself had to move before it could run (an adapter, what a switch had left for later), bytes and microseconds.
    """

    content_type: str
    body: bytes
    units: int = 0
    cpu_us: int = 0
    moved_bytes: int = 0
    moved_us: int = 0
