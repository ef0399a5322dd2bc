"""What is ours beside the Tinker API: why the job waits."""

import json

import pytest

from plexrl.gateway import TinkerGateway
from plexrl.types import ApiError, Explain, Explained, HttpRequest


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
