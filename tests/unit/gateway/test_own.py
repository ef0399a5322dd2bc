"""What is ours beside the Tinker API: why the job waits, and what its OpenAI API needs."""

import json

import msgspec
import pytest
from tinker.proto import tinker_public_pb2 as pb

from plexrl.gateway import TinkerGateway
from plexrl.types import ApiError, Explain, Explained, Failed, GetDrawn, HttpRequest, ListModels, Pending, SoFar
from plexrl.types.drawn import Drawn, Sequence


def test_explain(gateway: TinkerGateway):
    command = gateway.parse(HttpRequest(method="GET", path="/plexrl/v1/explain?job=8.0"))
    assert command == Explain()  # whose job it is, the connection says and nothing else
    response = gateway.render(command, Explained(job="7.0", text="Job 7.0 has no calls."))
    assert (response.status, json.loads(response.body)) == (200, {"job": "7.0", "explained": "Job 7.0 has no calls."})


@pytest.mark.parametrize(
    ("method", "path", "status"), [("POST", "explain", 405), ("GET", "explain/8.0", 404), ("GET", "", 404)]
)
def test_nothing_else(gateway: TinkerGateway, method: str, path: str, status: int):
    with pytest.raises(ApiError) as caught:
        gateway.parse(HttpRequest(method=method, path=f"/plexrl/v1/{path}"))
    assert caught.value.status == status


def test_what_the_openai_api_needs(gateway: TinkerGateway):
    body = pb.SampleResponse()
    body.sequences.add(stop_reason=pb.STOP_REASON_STOP, tokens=b"\1\0\0\0", logprobs=b"\0\0\0\0")
    request = HttpRequest(method="POST", path="/plexrl/v1/drawn", body=b'{"request_id": "s:sample:0:1", "have": 3}')
    command = gateway.parse(request)
    assert command == GetDrawn(request_id="s:sample:0:1", have=3)
    response = gateway.render(command, SoFar(version="v", ended=True, body=body.SerializeToString()))
    drawn = msgspec.msgpack.decode(response.body, type=Drawn)
    assert (drawn.ended, drawn.version) == (True, "v")
    assert drawn.sequences == (Sequence(tokens=b"\1\0\0\0", logprobs=b"\0\0\0\0", stopped=True),)
    assert gateway.parse(HttpRequest(method="GET", path="/plexrl/v1/models")) == ListModels()
    assert gateway.render(command, Failed(error="lost", category="server")).status == 200
    assert gateway.render(command, Pending(reason="busy")).status == 408


@pytest.mark.parametrize("body", [b"", b"{}", b'{"request_id": 7}', b'{"request_id": "x", "have": -1}', b'{"x": 1}'])
def test_a_malformed_question_is_refused(gateway: TinkerGateway, body: bytes):
    with pytest.raises(ApiError) as caught:
        gateway.parse(HttpRequest(method="POST", path="/plexrl/v1/drawn", body=body))
    assert caught.value.status == 400
