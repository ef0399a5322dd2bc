"""Messages between proxy and head: round trips, and nothing else gets through."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plexrl.types import BadInput
from plexrl.wire import messages as m

FROM_PROXY = [m.Hello("lab", "MUNGE:x", 7, 1), m.Request(3, "POST", "/api/v1/asample", {"a": "b"}), m.Bye()]
FROM_HEAD = [m.Welcome("alice", "ml"), m.Refused("no"), m.Reply(3, 200, {"content-type": "application/json"})]


@pytest.mark.parametrize("message", FROM_PROXY, ids=lambda message: type(message).__name__)
def test_round_trip_from_proxy(message):
    assert m.decode_from_proxy(m.encode(message, b"body")) == (message, b"body")


@pytest.mark.parametrize("message", FROM_HEAD, ids=lambda message: type(message).__name__)
def test_round_trip_from_head(message):
    assert m.decode_from_head(m.encode(message, b"body")) == (message, b"body")


def test_a_proxy_cannot_say_what_a_head_says():
    for message in FROM_HEAD:
        with pytest.raises(BadInput):
            m.decode_from_proxy(m.encode(message))


@given(st.lists(st.binary(max_size=200), max_size=4))
def test_bytes_are_a_message_or_bad_input(frames):
    for decode in (m.decode_from_proxy, m.decode_from_head):
        try:
            decode(frames)
        except BadInput:
            continue


@pytest.mark.parametrize(
    "header",
    [
        b"\x91" * 100_000,
        msgspec.msgpack.encode({"t": "req", "id": "x", "method": "GET", "path": "/", "headers": {}}),
        msgspec.msgpack.encode({"t": "req", "id": 1, "method": "GET", "path": "/", "headers": {"a": b"\xff"}}),
        msgspec.msgpack.encode({"t": "req", "id": 1, "method": "GET", "path": "/"}),
        msgspec.msgpack.encode({"id": 1}),
        msgspec.msgpack.encode({"t": "hello"}),
        b"\x81\xa1t\xa5\xff\xff\xff\xff\xff",
    ],
)
def test_malformed_headers_are_bad_input(header):
    with pytest.raises(BadInput):
        m.decode_from_proxy([header, b""])


def test_a_proof_survives_and_garbage_does_not():
    proof = m.Proof("lab", "i1", "n", 7, 1, "k" * 40)
    assert m.decode_proof(m.encode_proof(proof)) == proof
    for payload in (b"", b"\xff", b"\x91" * 100_000, msgspec.msgpack.encode({"pool": 1})):
        with pytest.raises(BadInput):
            m.decode_proof(payload)
