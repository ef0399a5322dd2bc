"""A head that answers commands from memory at once, and an HTTP server that puts a gateway before it."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
from tinker.proto import tinker_public_pb2 as pb

from plexrl.gateway import TinkerGateway
from plexrl.types import (
    AnyAnswer,
    AnyCommand,
    ApiError,
    CallKind,
    CapabilitiesList,
    Capability,
    Done,
    Failed,
    HttpRequest,
    HttpResponse,
    ModelInfo,
    Ok,
    Pending,
    Promise,
    SamplePromise,
    SamplerInfo,
    SamplerOpened,
    SessionOpened,
)

JSON = "application/json"
PROTO = "application/x-protobuf"


class FakeHead:
    """Keeps what it was asked in `commands`, and the seq ids of refused calls in `consumed`."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.commands: list[AnyCommand] = []
        self.consumed: list[tuple[str, int]] = []
        self.fail_next: Failed | None = None
        self.polls_held = 0
        self._sessions: dict[str, str] = {}
        self._ranks: dict[str, int | None] = {}
        self._samplers: dict[str, str | None] = {}
        self._seen: dict[str, tuple[str, str]] = {}
        self._results: dict[str, Done | Failed] = {}
        self._lock = threading.Lock()

    def asked(self, verb: str) -> list[AnyCommand]:
        return [command for command in self.commands if command.verb == verb]

    def answer(self, command: AnyCommand) -> AnyAnswer:
        with self._lock:
            self.commands.append(command)
            return getattr(self, f"_{command.verb}")(command)

    def _open_session(self, command):
        return SessionOpened(
            session=self._sessions.setdefault(command.idempotency_key, f"s{len(self._sessions)}"),
            info_message="a fake pool",
        )

    def _heartbeat(self, command):
        return Ok()

    _finish_session = _cancel = _telemetry = _heartbeat

    def _create_model(self, command):
        if command.base_model != "smol":
            raise ApiError(400, f"Unknown base model {command.base_model!r}", "Ask for one of: smol")
        model = f"{command.session}:train:{command.model_seq}"
        self._ranks[model] = command.lora_rank
        return self._promise(model, 0, {"type": "create_model", "model_id": model})

    def _load_model(self, command):
        model = f"{command.session}:train:{command.model_seq}"
        self._ranks[model] = 8
        return self._promise(model, 0, {"type": "load_weights", "model_id": model, "path": command.path})

    def _get_info(self, command):
        return ModelInfo(
            model=command.model,
            base_model="smol",
            model_dir=self.folder,
            lora_rank=self._ranks[self._own(command.model)],
            arch="llama",
        )

    def _unload_model(self, command):
        self._own(command.model)
        return self._promise(command.model, 2**31, {"type": "unload_model", "model_id": command.model})

    def _own(self, model: str) -> str:
        if model.startswith("other"):
            raise ApiError(403, f"The model {model} is another user's")
        if model not in self._ranks:
            raise ApiError(404, f"There is no model {model}")
        return model

    def _train(self, command):
        key = f"{self._own(command.model)}:{command.seq}"
        identity = (command.kind, command.digest)
        if self._seen.setdefault(key, identity) != identity:
            raise ApiError(400, f"seq_id {command.seq} of {command.model} was used for another call")
        if key in self._results:
            return Promise(request_id=key, model=command.model)
        match command.kind:
            case CallKind.FORWARD | CallKind.FORWARD_BACKWARD:
                self._results[key] = Done(content_type=PROTO, body=_losses(command.body))
            case CallKind.OPTIM_STEP:
                self._promise(command.model, command.seq, {"metrics": {"grad_norm": 1.5}})
            case CallKind.SAVE_STATE:
                path = f"tinker://{command.model}/weights/{command.name}"
                self._promise(command.model, command.seq, {"path": path, "type": "save_weights"})
            case CallKind.LOAD_STATE:
                self._promise(command.model, command.seq, {"path": command.path, "type": "load_weights"})
            case CallKind.PUBLISH:
                sampler = f"{command.model}:sampler:{command.sampler_seq}"
                path = f"tinker://{command.model}/sampler_weights/{command.name}"
                self._samplers[sampler] = path
                named = {"path": path} if command.name else {"sampling_session_id": sampler}
                self._promise(command.model, command.seq, named | {"type": "save_weights_for_sampler"})
        if self.fail_next is not None:
            self._results[key], self.fail_next = self.fail_next, None
        return Promise(request_id=key, model=command.model)

    def _promise(self, model: str, seq: int, result: dict) -> Promise:
        self._results[f"{model}:{seq}"] = Done(content_type=JSON, body=json.dumps(result).encode())
        return Promise(request_id=f"{model}:{seq}", model=model)

    def _open_sampler(self, command):
        sampler = f"{command.session}:sampler:{command.sampler_seq}"
        self._samplers[sampler] = command.model_path
        return SamplerOpened(sampler=sampler, base_model_dir=self.folder, model_path=command.model_path)

    def _get_sampler(self, command):
        path = self._samplers[command.sampler]
        return SamplerInfo(sampler=command.sampler, base_model_dir=self.folder, model_path=path)

    def _sample(self, command):
        key = f"{command.sampler}:{command.seq}"
        self._results[key] = Done(content_type=PROTO, body=_samples(command), headers={"x-plexrl-version": "v1"})
        return SamplePromise(request_id=key, num_samples=command.num_samples)

    def _retrieve(self, command):
        if self.polls_held:
            self.polls_held -= 1
            return Pending(reason="the pool serves others")
        return self._results[command.request_id]

    def _capabilities(self, command):
        return CapabilitiesList(models=(Capability(name="smol", max_context=512),))


def _losses(body: bytes) -> bytes:
    """Log-probability -0.5 for every target."""
    asked = pb.ForwardBackwardRequest.FromString(body)
    lengths = [datum.loss_fn_inputs["target_tokens"].shape[0] for datum in asked.data]
    record = pb.ArrayRecord(num_datums=len(lengths))
    batched = record.fields["logprobs"]
    batched.dtype = pb.DTYPE_FLOAT32
    batched.data = np.full(sum(lengths), -0.5, np.float32).tobytes()
    batched.offsets = (4 * np.cumsum([0, *lengths])).astype(np.int64).tobytes()
    output = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", loss_fn_outputs=[record])
    output.metrics["loss:sum"] = 0.5 * sum(lengths)
    return output.SerializeToString()


def _samples(command) -> bytes:
    asked = json.loads(command.body)
    prompt = [token for chunk in asked["prompt"]["chunks"] for token in chunk["tokens"]]
    answer = pb.SampleResponse()
    for index in range(command.num_samples):
        answer.sequences.add(
            stop_reason=pb.STOP_REASON_STOP,
            tokens=np.array([index, 7], np.int32).tobytes(),
            logprobs=np.array([-1.0, -2.0], np.float32).tobytes(),
        )
    if asked.get("prompt_logprobs"):
        answer.prompt_logprobs = np.array([np.nan] + [-3.0] * (len(prompt) - 1), np.float32).tobytes()
    return answer.SerializeToString()


def exchange(gateway: TinkerGateway, head: FakeHead, request: HttpRequest) -> HttpResponse:
    """What the real head does with a request."""
    try:
        parsed = gateway.parse(request)
        if isinstance(parsed, HttpResponse):
            return parsed
        return gateway.render(parsed, head.answer(parsed))
    except ApiError as error:
        if error.consumed is not None:
            head.consumed.append(error.consumed)
        return gateway.render_error(error)


@contextmanager
def serve(gateway: TinkerGateway, head: FakeHead) -> Iterator[str]:
    """The base URL of a server on the loopback interface."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def _any(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            headers = {name.lower(): value for name, value in self.headers.items()}
            request = HttpRequest(method=self.command, path=self.path, headers=headers, body=body)
            response = exchange(gateway, head, request)
            self.send_response(response.status)
            for name, value in response.headers.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(response.body)))
            self.end_headers()
            self.wfile.write(response.body)

        do_GET = do_POST = do_PUT = do_DELETE = _any

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
