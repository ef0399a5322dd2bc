"""What proxy and head say to each other: two ZeroMQ parts, a msgpack header and a raw body.

Bodies travel as they were received; only headers are parsed, against these types and nothing else.
"""

from typing import TypeVar

import msgspec

from plexrl.types import BadInput

T = TypeVar("T")

BODY_BYTES = 64 * 1024 * 1024


class Hello(msgspec.Struct, frozen=True, tag_field="t", tag="hello"):
    """A proxy asks to be admitted. credential: from wire.munge around a Proof; empty at a private pool.

    max_staleness: how many published versions behind its model's newest the job lets itself draw; None: any number.
    """

    pool: str
    credential: str
    job: int
    restart: int
    max_staleness: int | None = None


class Request(msgspec.Struct, frozen=True, tag_field="t", tag="req"):
    """An HTTP request of the job, the body in the second part. id: unique for the life of the proxy."""

    id: int
    method: str
    path: str
    headers: dict[str, str]


class Bye(msgspec.Struct, frozen=True, tag_field="t", tag="bye"):
    """The proxy ends; nobody waits for what it asked."""


class Welcome(msgspec.Struct, frozen=True, tag_field="t", tag="welcome"):
    """The peer is admitted under this name. body_bytes: the largest body that the pool takes."""

    user: str
    account: str
    body_bytes: int = BODY_BYTES


class Refused(msgspec.Struct, frozen=True, tag_field="t", tag="refused"):
    """The peer is not admitted, or spoke before it was.

    id: of the Request that is refused, 0 for a Hello. later: the head cannot tell now (MUNGE or Slurm does not answer);
    nothing is wrong with the job, which goes on asking and waits.
    """

    why: str
    id: int = 0
    later: bool = False


class Reply(msgspec.Struct, frozen=True, tag_field="t", tag="res"):
    """The answer to the Request of that id, the body in the second part."""

    id: int
    status: int
    headers: dict[str, str]


class Proof(msgspec.Struct, frozen=True):
    """The payload of a MUNGE credential: who asks (job, restart), at which head (pool, instance, nonce), by which key.

    A head must find its own nonce and instance, and in proxy_key the CURVE key (z85) that the Hello came from.
    """

    pool: str
    instance: str
    nonce: str
    job: int
    restart: int
    proxy_key: str


FromProxy = Hello | Request | Bye
FromHead = Welcome | Refused | Reply

_encode = msgspec.msgpack.Encoder().encode
_from_proxy = msgspec.msgpack.Decoder(FromProxy)
_from_head = msgspec.msgpack.Decoder(FromHead)
_proof = msgspec.msgpack.Decoder(Proof)


def encode(message: FromProxy | FromHead, body: bytes = b"") -> list[bytes]:
    """The two parts of a message."""
    return [_encode(message), body]


def decode_from_proxy(frames: list[bytes]) -> tuple[FromProxy, bytes]:
    """The message and its body. Raises BadInput for anything that is not one."""
    return _decode(_from_proxy, frames)


def decode_from_head(frames: list[bytes]) -> tuple[FromHead, bytes]:
    """The message and its body. Raises BadInput for anything that is not one."""
    return _decode(_from_head, frames)


def encode_proof(proof: Proof) -> bytes:
    """The payload of a credential."""
    return _encode(proof)


def decode_proof(payload: bytes) -> Proof:
    """The proof in a credential's payload. Raises BadInput."""
    try:
        return _proof.decode(payload)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise BadInput(f"the credential holds no proof: {error}", _MEND) from error


_MEND = "Job and pool must run the same release of PlexRL"


def _decode(decoder: msgspec.msgpack.Decoder[T], frames: list[bytes]) -> tuple[T, bytes]:
    if len(frames) != 2:
        raise BadInput(f"a message of {len(frames)} parts instead of 2", _MEND)
    try:
        return decoder.decode(frames[0]), frames[1]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadInput(f"not a message: {error}", _MEND) from error
