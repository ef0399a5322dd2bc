"""Raw requests that no SDK would send: each gets a status, a reason and a mend, and nothing else happens."""

import json
import re

import pytest
from tinker.proto import tinker_public_pb2 as pb

from plexrl.gateway import TinkerGateway
from plexrl.types import (
    ApiError,
    Cancel,
    CreateModel,
    Failed,
    GetInfo,
    Heartbeat,
    HttpRequest,
    HttpResponse,
    Ok,
    OpenSession,
    Pending,
    Retrieve,
    Sample,
    Telemetry,
    Train,
)

MODEL = "s0:train:0"


def post(path: str, body: object, **headers: str) -> HttpRequest:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    return HttpRequest(method="POST", path=f"/api/v1/{path}", headers=headers, body=raw)


def refusal(gateway: TinkerGateway, request: HttpRequest) -> ApiError:
    with pytest.raises(ApiError) as caught:
        gateway.parse(request)
    response = gateway.render_error(caught.value)
    body = json.loads(response.body)
    assert response.status == caught.value.status
    assert body["detail"] == str(caught.value)
    assert body["mend"]
    return caught.value


def sample_body(**changes: object) -> dict:
    params = {"max_tokens": 4, "temperature": 1.0, "top_k": -1, "top_p": 1.0} | changes.pop("params", {})
    body = {
        "num_samples": 1,
        "prompt": {"chunks": [{"tokens": [1, 2], "type": "encoded_text"}]},
        "sampling_params": params,
        "sampling_session_id": "s0:sampler:0",
        "seq_id": 0,
    }
    return body | changes


def create_body(rank: int | None = 8, **changes: object) -> dict:
    lora = None if rank is None else {"rank": rank, "train_unembed": True, "train_mlp": True, "train_attn": True}
    body = {"session_id": "s0", "model_seq_id": 0, "base_model": "smol", "lora_config": lora, "type": "create_model"}
    return body | changes


def step_body(**adam: object) -> dict:
    return {"model_id": MODEL, "seq_id": 3, "adam_params": {"learning_rate": 1e-4} | adam, "type": "optim_step"}


def losses(tokens: bytes = b"\1\0\0\0\2\0\0\0", **changes: object) -> pb.ForwardBackwardRequest:
    message = pb.ForwardBackwardRequest(model_id=MODEL, seq_id=3, loss_fn="cross_entropy")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = tokens
    for name, dtype in (("target_tokens", pb.DTYPE_INT64), ("weights", pb.DTYPE_FLOAT32)):
        datum.loss_fn_inputs[name].dtype = dtype
        datum.loss_fn_inputs[name].shape.append(2)
        datum.loss_fn_inputs[name].dense = b"\0" * (16 if dtype == pb.DTYPE_INT64 else 8)
    for name, value in changes.items():
        setattr(message, name, value)
    return message


def forward_backward(message: pb.ForwardBackwardRequest | bytes, **headers: str) -> HttpRequest:
    raw = message if isinstance(message, bytes) else message.SerializeToString()
    return post("forward_backward", raw, **({"content_type": "application/x-protobuf"} | headers))


@pytest.mark.parametrize(
    "route", ["asample", "retrieve_future", "optim_step", "save_weights", "create_model", "get_info"]
)
@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'"x"', b"{}", b'{"seq_id": NaN}', b"\xff\xfe"])
def test_malformed_json(gateway: TinkerGateway, route: str, body: bytes):
    assert refusal(gateway, post(route, body)).status == 400


def test_malformed_protobuf(gateway: TinkerGateway):
    for body in (b"\xff\xff\xff", b"{}", losses().SerializeToString()[:-3]):
        error = refusal(gateway, forward_backward(body))
        assert (error.status, error.consumed) == (400, None)
    assert refusal(gateway, forward_backward(b"")).status == 400


def test_forward_backward_in_another_form(gateway: TinkerGateway):
    assert refusal(gateway, post("forward_backward", {"model_id": MODEL})).status == 415
    error = refusal(gateway, forward_backward(losses(), content_encoding="zstd"))
    assert error.status == 415
    assert "proto_compress_fwdbwd" in error.mend


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (losses(seq_id=0), "seq_id 0 is out of range"),
        (losses(model_id=""), "no model_id"),
        (losses(loss_fn="nonsense"), "no loss function"),
        (losses(loss_fn="custom"), "Custom losses on the server are not built"),
        (losses(tokens=b""), "0 bytes of tokens"),
        (losses(tokens=b"\1\0\0"), "3 bytes of tokens"),
        (losses(tokens=b"\0\0\0\0" * 513), "513 tokens"),
        (losses(loss_fn="importance_sampling"), "lacks the loss input 'logprobs'"),
        (pb.ForwardBackwardRequest(model_id=MODEL, seq_id=3, loss_fn="cross_entropy"), "no data"),
    ],
)
def test_bad_training_data(gateway: TinkerGateway, message: pb.ForwardBackwardRequest, why: str):
    error = refusal(gateway, forward_backward(message))
    assert why in error.what
    readable = message.model_id and message.seq_id
    assert error.consumed == ((message.model_id, message.seq_id) if readable else None)


def test_unbuilt_parts_of_training_data(gateway: TinkerGateway):
    image, spans, config, dtype = losses(), losses(), losses(), losses()
    image.data[0].model_input.add().image.data = b"x"
    spans.data[0].model_input_spans.add().prompt_tokens.length = 2
    config.loss_fn_config_v2["clip"].number = 0.2
    dtype.data[0].loss_fn_inputs["weights"].dtype = pb.DTYPE_BFLOAT16
    for message in (image, spans, config, dtype):
        error = refusal(gateway, forward_backward(message))
        assert (error.status, error.consumed) == (400, (MODEL, 3))


@pytest.mark.parametrize(
    "adam",
    [
        {"learning_rate": -1e-4},
        {"learning_rate": 2},
        {"learning_rate": "fast"},
        {"beta1": 1.0},
        {"beta2": -0.1},
        {"eps": -1e-9},
        {"weight_decay": -1},
        {"grad_clip_norm": -1},
        {"momentum": 0.9},
    ],
)
def test_optimizer_out_of_range(gateway: TinkerGateway, adam: dict):
    error = refusal(gateway, post("optim_step", step_body(**adam)))
    assert (error.status, error.consumed) == (400, (MODEL, 3))
    assert next(iter(adam)) in error.what


def test_other_optimizers_are_not_built(gateway: TinkerGateway):
    body = {"model_id": MODEL, "seq_id": 3, "optimizer_params": {"type": "dimuon", "learning_rate": 1}}
    assert "not built" in refusal(gateway, post("optim_step", body)).what
    asked = create_body(optimizer_config={"type": "dimuon"})
    assert "'dimuon' is not built" in refusal(gateway, post("create_model", asked)).what


@pytest.mark.parametrize(
    "name", ["../x", "a/b", "..", "a..b", ".hidden", "", "x" * 129, "ü", "a b", "a\0b", "/etc/passwd"]
)
def test_names_that_leave_the_owners_directory(gateway: TinkerGateway, name: str):
    body = {"model_id": MODEL, "seq_id": 3, "path": name}
    assert refusal(gateway, post("save_weights", body)).consumed == (MODEL, 3)
    assert refusal(gateway, post("save_weights_for_sampler", body)).consumed == (MODEL, 3)
    for path in (f"tinker://{MODEL}/weights/{name}", f"tinker://{name}/weights/x", name):
        body = {"model_id": MODEL, "seq_id": 3, "path": path, "optimizer": False}
        if not re.fullmatch(r"tinker://\.?[\w:]+/weights/\w+", path):
            assert refusal(gateway, post("load_weights", body)).consumed == (MODEL, 3)


def test_checkpoints_of_the_wrong_kind(gateway: TinkerGateway):
    sampler = f"tinker://{MODEL}/sampler_weights/v1"
    state = f"tinker://{MODEL}/weights/v1"
    body = {"session_id": "s0", "model_seq_id": 1, "path": sampler, "optimizer": True}
    assert "holds no training state" in refusal(gateway, post("load_weights", body)).what
    body = {"session_id": "s0", "sampling_session_seq_id": 0, "model_path": state}
    assert "cannot be sampled from" in refusal(gateway, post("create_sampling_session", body)).what


@pytest.mark.parametrize(
    "name", ["", "/models/smol", "../smol", "a/b/c", "https://hub/x", "x" * 300, "smol\n", "sm öl", "-x", "C:\\x"]
)
def test_absurd_base_models(gateway: TinkerGateway, name: str):
    for request in (
        post("create_model", create_body(base_model=name)),
        post("create_sampling_session", {"session_id": "s0", "sampling_session_seq_id": 0, "base_model": name}),
    ):
        assert "get_server_capabilities" in refusal(gateway, request).mend


@pytest.mark.parametrize("rank", [-1, 33, 10**9, "8", 2.5])
def test_rank_out_of_range(gateway: TinkerGateway, rank: object):
    asked = create_body()
    asked["lora_config"]["rank"] = rank
    if rank == "8":  # the SDK's type takes it for a number
        assert isinstance(gateway.parse(post("create_model", asked)), CreateModel)
    else:
        assert refusal(gateway, post("create_model", asked)).status == 400


def test_loras_that_make_no_sense(gateway: TinkerGateway):
    nothing, part, seed = create_body(), create_body(rank=0), create_body()
    nothing["lora_config"] |= {"train_attn": False, "train_mlp": False, "train_unembed": False}
    part["lora_config"] |= {"train_mlp": False}
    seed["lora_config"]["seed"] = -1
    for asked in (nothing, part, seed, create_body(model_seq_id=-1), create_body(surprise=1)):
        assert refusal(gateway, post("create_model", asked)).status == 400


def test_no_lora_config_is_full_parameters(gateway: TinkerGateway):
    assert gateway.parse(post("create_model", create_body(rank=None))).lora_rank is None


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"num_samples": 0}, "num_samples"),
        ({"num_samples": 5000}, "num_samples"),
        ({"params": {"max_tokens": 0}}, "max_tokens"),
        ({"params": {"max_tokens": 511}}, "context of 512"),
        ({"params": {"temperature": -1}}, "temperature"),
        ({"params": {"top_p": 0}}, "top_p"),
        ({"params": {"top_k": 0}}, "top_k"),
        ({"params": {"top_k": -2}}, "top_k"),
        ({"params": {"stop": [""]}}, "stop"),
        ({"params": {"stop": ["a", 3]}}, "stop"),
        ({"params": {"stop": ["a"] * 65}}, "stop"),
        ({"params": {"seed": 2**70}}, "seed"),
        ({"seq_id": -1}, "seq_id"),
        ({"seq_id": None}, "sampling session"),
        ({"sampling_session_id": None}, "sampling session"),
        ({"sampling_session_id": "a b"}, "sampling_session_id"),
        ({"prompt": {"chunks": []}}, "chunks"),
        ({"prompt": {"chunks": [{"tokens": [], "type": "encoded_text"}]}}, "at least one token"),
        ({"prompt": {"chunks": [{"tokens": [-1], "type": "encoded_text"}]}}, "tokens"),
        ({"prompt": {"chunks": [{"tokens": [2**31], "type": "encoded_text"}]}}, "tokens"),
        ({"prompt": {"chunks": [{"tokens": ["a"], "type": "encoded_text"}]}}, "tokens"),
        ({"prompt": {"chunks": [{"tokens": [1] * 513, "type": "encoded_text"}]}}, "context of 512"),
        ({"prompt": {"chunks": [{"data": "x", "type": "image"}]}}, "'image' is not built"),
        ({"topk_prompt_logprobs": -1}, "topk_prompt_logprobs"),
        ({"topk_sample_logprobs": 5000}, "topk_sample_logprobs"),
        ({"target_prompt_logprobs": {"data": [1]}}, "target_prompt_logprobs is not built"),
        ({"prompt_logprobs_last_n": 1}, "prompt_logprobs_last_n is not built"),
        ({"prompt_alt_tokens_k": 1}, "prompt_alt_tokens_k is not built"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_bad_samples(gateway: TinkerGateway, changes: dict, why: str):
    error = refusal(gateway, post("asample", sample_body(**changes)))
    assert error.status == 400
    assert why in str(error)


def test_publishing_needs_one_address(gateway: TinkerGateway):
    for extra in ({}, {"path": "v1", "sampling_session_seq_id": 0}, {"sampling_session_seq_id": -1}):
        body = {"model_id": MODEL, "seq_id": 3} | extra
        assert refusal(gateway, post("save_weights_for_sampler", body)).consumed == (MODEL, 3)


def test_loading_needs_one_address(gateway: TinkerGateway):
    path = f"tinker://{MODEL}/weights/x"
    for extra in ({}, {"model_id": MODEL}, {"session_id": "s0"}, {"model_id": MODEL, "seq_id": 1, "session_id": "s0"}):
        assert refusal(gateway, post("load_weights", {"path": path, "optimizer": False} | extra)).status == 400
    token = {"model_id": MODEL, "seq_id": 3, "path": path, "optimizer": False, "weights_access_token": "x"}
    assert "not built" in refusal(gateway, post("load_weights", token)).what


def test_odd_lifetimes(gateway: TinkerGateway):
    for seconds in (0, -5, 10**12):
        body = {"model_id": MODEL, "seq_id": 3, "path": "x", "ttl_seconds": seconds}
        assert "ttl_seconds" in refusal(gateway, post("save_weights", body)).what


def test_paths(gateway: TinkerGateway):
    def get(path: str, method: str = "GET") -> ApiError:
        return refusal(gateway, HttpRequest(method=method, path=path))

    assert get("/").status == 404
    assert get("/v1/models").status == 404
    assert get("/api/v1/../../etc/passwd").status == 404
    assert get("/api/v1/training_runs/x").status == 404
    assert get("/api/v1/asample").status == 405
    assert get("/api/v1/retrieve_futures", "POST").status == 400
    assert json.loads(gateway.render_error(get("/api/v1/save_weights_external", "POST")).body)["type"] == "not_built"


def test_body_larger_than_the_limit(gateway: TinkerGateway):
    error = refusal(gateway, post("asample", b" " * (64 * 2**20 + 1)))
    assert (error.status, "limits.body_bytes" in error.mend) == (413, True)


def test_sessions(gateway: TinkerGateway):
    body = {"tags": [], "user_metadata": {"a": "b", "n": 3}, "sdk_version": "0.38.0"}
    assert "X-Idempotency-Key" in refusal(gateway, post("create_session", body)).what
    command = gateway.parse(post("create_session", body, x_idempotency_key="k1"))
    assert command == OpenSession(idempotency_key="k1", user_metadata={"a": "b", "n": "3"}, sdk_version="0.38.0")
    assert refusal(gateway, post("sessions/s0/finish", {"reason": {"type": "tired"}})).status == 400


def test_same_data_same_digest_other_data_another(gateway: TinkerGateway):
    def digest(message: pb.ForwardBackwardRequest) -> str:
        return gateway.parse(forward_backward(message)).digest

    reordered = losses()
    inputs = {name: tensor.SerializeToString() for name, tensor in reordered.data[0].loss_fn_inputs.items()}
    reordered.data[0].ClearField("loss_fn_inputs")
    for name in reversed(inputs):
        reordered.data[0].loss_fn_inputs[name].ParseFromString(inputs[name])
    assert digest(losses()) == digest(reordered)
    assert digest(losses()) != digest(losses(tokens=b"\1\0\0\0\3\0\0\0"))

    def step(**adam: object) -> str:
        return gateway.parse(post("optim_step", step_body(**adam))).digest

    assert step() == step()
    assert step() != step(learning_rate=2e-4)

    def publish(number: int) -> Train:
        return gateway.parse(
            post("save_weights_for_sampler", {"model_id": MODEL, "seq_id": 3, "sampling_session_seq_id": number})
        )

    assert publish(0).digest == publish(1).digest == ""


def test_rendering(gateway: TinkerGateway):
    asked = Retrieve(request_id="s0:train:0:1", proto=True)
    pending = gateway.render(asked, Pending())
    assert pending.status == 408
    assert json.loads(pending.body) == {"type": "try_again", "request_id": asked.request_id, "queue_state": "active"}
    paused = json.loads(gateway.render(asked, Pending(reason="drain")).body)
    assert (paused["queue_state"], paused["queue_state_reason"]) == ("paused_capacity", "drain")
    failed = gateway.render(asked, Failed(error="e", category="server"))
    assert (failed.status, json.loads(failed.body)) == (200, {"error": "e", "category": "server"})
    assert json.loads(gateway.render(Heartbeat(session="s0"), Ok()).body) == {"type": "session_heartbeat"}
    assert json.loads(gateway.render(Telemetry(body=b""), Ok()).body) == {"status": "accepted"}
    assert gateway.render(Cancel(request_id="x"), Ok()).status == 200
    busy = gateway.render_error(ApiError(429, "Too many calls wait"))
    assert (busy.status, busy.headers["retry-after-ms"]) == (429, "1000")
    for command, answer in ((GetInfo(model=MODEL), Ok()), (GetInfo(model=MODEL), Pending())):
        with pytest.raises(TypeError):
            gateway.render(command, answer)


def test_client_config_asks_for_what_is_built(gateway: TinkerGateway):
    response = gateway.parse(post("client/config", {"sdk_version": "0.38.0"}))
    assert isinstance(response, HttpResponse)
    flags = json.loads(response.body)
    assert not flags["parallel_fwdbwd_chunks"]
    assert not flags["proto_compress_fwdbwd"]
    assert flags["fwdbwd_max_chunk_bytes_count"] < 64 * 2**20
    dynamic = gateway.parse(post("client/dynamic_config", {}))
    assert json.loads(dynamic.body)["sample_cancel_enabled"]


def test_sample_and_retrieve(gateway: TinkerGateway):
    command = gateway.parse(post("asample", sample_body(num_samples=3)))
    assert isinstance(command, Sample)
    assert (command.sampler, command.seq, command.num_samples, command.units) == ("s0:sampler:0", 0, 3, 2 + 3 * 4)
    clone = gateway.parse(post("asample", sample_body(seq_id=7 * 10**9 + 1)))
    assert clone.seq == 7 * 10**9 + 1
    request = post(
        "retrieve_future", {"request_id": "x:1", "allow_metadata_only": True}, accept="application/x-protobuf"
    )
    assert gateway.parse(request) == Retrieve(request_id="x:1", proto=True)
