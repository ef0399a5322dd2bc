"""Tries to use what is another job's, by raw HTTP. argv: model id, checkpoint path. Prints the answers as JSON."""

import http.client
import json
import os
import sys
from urllib.parse import urlparse

model, checkpoint = sys.argv[1:3]
where = urlparse(os.environ["TINKER_BASE_URL"])
connection = http.client.HTTPConnection(where.hostname, where.port, timeout=60)


def post(route: str, key: str = os.environ["TINKER_API_KEY"], /, **body: object) -> tuple[int, dict]:
    headers = {"X-API-Key": key, "Content-Type": "application/json", "X-Idempotency-Key": route}
    connection.request("POST", f"/api/v1/{route}", json.dumps(body), headers)
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


opened = post("create_session", tags=[], user_metadata={}, sdk_version="0.38.0", type="create_session")
session = opened[1]["session_id"]
adam = {"learning_rate": 1.0, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
print(
    json.dumps(
        {
            "get_info": post("get_info", model_id=model, type="get_info"),
            "optim_step": post("optim_step", model_id=model, seq_id=99, adam_params=adam, type="optim_step"),
            "unload": post("unload_model", model_id=model, type="unload_model"),
            "retrieve": post("retrieve_future", request_id=f"{model}:1", allow_metadata_only=True),
            "load": post(
                "load_weights",
                session_id=session,
                model_seq_id=0,
                path=checkpoint,
                optimizer=False,
                type="load_weights",
            ),
            "sample": post(
                "create_sampling_session",
                session_id=session,
                sampling_session_seq_id=0,
                model_path=checkpoint.replace("/weights/", "/sampler_weights/"),
                type="create_sampling_session",
            ),
            "forged_key": post("get_info", "tml-forged", model_id=model, type="get_info"),
        }
    )
)
