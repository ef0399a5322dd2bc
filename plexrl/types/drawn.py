"""What was drawn of a sample call so far, as the head tells a job's proxy: msgpack of these, and no protobuf there."""

from msgspec import Struct


class Sequence(Struct, frozen=True, kw_only=True):
    """One answer. tokens: int32, logprobs: float32, both little-endian. stopped: ended by a stop.

    top_tokens, top_logprobs: the k likeliest of each position, one row after the other; k 0: nobody asked.
    """

    tokens: bytes
    logprobs: bytes
    stopped: bool
    k: int = 0
    top_tokens: bytes = b""
    top_logprobs: bytes = b""


class Drawn(Struct, frozen=True, kw_only=True):
    """A call's answers. ended: nothing more will come. version: that drew them, "" for a base model as it is.

    prompt_logprobs: float32, the first NaN; prompt_top_*: rows of prompt_k, the first empty (-99999). Both may be
    empty before the prompt was read, and when nobody asked for them.
    """

    ended: bool
    version: str
    sequences: tuple[Sequence, ...]
    prompt_logprobs: bytes = b""
    prompt_k: int = 0
    prompt_top_tokens: bytes = b""
    prompt_top_logprobs: bytes = b""
