"""The Tinker API by hand, for requests that no SDK sends."""

import http.client
import json
import secrets
import sys
import threading
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

from tinker.proto import tinker_public_pb2 as pb

from .localpool import LocalPool


@dataclass
class Answer:
    """What came back."""

    status: int
    body: bytes

    @property
    def json(self) -> dict:
        """The body as JSON."""
        return json.loads(self.body)

    @property
    def detail(self) -> str:
        """Why a request was refused, or a future failed."""
        found = self.json
        return found["detail"] if "detail" in found else found["error"]

    @property
    def failed(self) -> bool:
        """Whether a future ended in an error."""
        return self.body[:1] == b"{" and "error" in self.json

    def logprobs(self) -> list[float]:
        """Of the only datum of a forward or forward_backward."""
        import numpy

        message = pb.ForwardBackwardOutput.FromString(self.body)
        return numpy.frombuffer(message.loss_fn_outputs[0].fields["logprobs"].data, "<f4").tolist()


class RawClient:
    """One logical job. `ask` is the transport's; everything else is the protocol."""

    session: str = ""

    def ask(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        """Send one request."""
        raise NotImplementedError

    def post(self, route: str, body: bytes | None = None, /, **fields: object) -> Answer:
        """A JSON request of these fields, or these bytes."""
        headers = {"content-type": "application/json", "x-idempotency-key": secrets.token_hex(8)}
        raw = json.dumps(fields).encode() if body is None else body
        return self.ask("POST", f"/api/v1/{route}", headers, raw)

    def wait(self, answer: Answer | str, timeout: float = 60.0) -> Answer:
        """The end of a promised future, or of one by its id."""
        if isinstance(answer, Answer):
            assert answer.status == 200, (answer.status, answer.body)
            answer = answer.json["request_id"]
        deadline = time.monotonic() + timeout
        while True:
            found = self.post("retrieve_future", request_id=answer)
            if found.status != 408:
                return found
            assert time.monotonic() < deadline, f"{answer} has not ended after {timeout} s: {found.body!r}"

    # -- sessions and models -------------------------------------------------------------------------------------------

    def open(self) -> str:
        """A new session, which is used from now on."""
        opened = self.post("create_session", tags=[], user_metadata={}, sdk_version="0.38.0", type="create_session")
        assert opened.status == 200, opened.body
        self.session = opened.json["session_id"]
        self._count = 0
        return self.session

    def ask_model(self, base: str = "tiny", rank: int | None = 8, **changes: object) -> Answer:
        """create_model as it is answered."""
        lora = None if rank is None else {"rank": rank, "train_unembed": True, "train_mlp": True, "train_attn": True}
        fields = {"session_id": self.session, "model_seq_id": self._next(), "base_model": base, "lora_config": lora}
        return self.post("create_model", **{**fields, "type": "create_model", **changes})

    def model(self, base: str = "tiny", rank: int | None = 8) -> str:
        """A new model that works."""
        answer = self.wait(self.ask_model(base, rank))
        assert answer.status == 200 and not answer.failed, answer.body
        return answer.json["model_id"]

    def unload(self, model: str) -> None:
        """Unload it and wait until it is gone."""
        assert self.wait(self.post("unload_model", model_id=model, type="unload_model")).status == 200

    def _next(self) -> int:
        self._count += 1
        return self._count - 1

    # -- training ------------------------------------------------------------------------------------------------------

    def train(
        self, model: str, seq: int, tokens: list[int] | None = None, forward_only: bool = False, rows: int = 1
    ) -> Answer:
        """forward_backward (or forward) with cross_entropy on tokens."""
        message = datum_of(model, seq, tokens or list(range(1, 17)), rows)
        message.forward_only = forward_only
        return self.protobuf(message.SerializeToString())

    def protobuf(self, body: bytes) -> Answer:
        """forward_backward with this body."""
        return self.ask("POST", "/api/v1/forward_backward", {"content-type": "application/x-protobuf"}, body)

    def step(self, model: str, seq: int, **adam: object) -> Answer:
        """optim_step."""
        params = {"learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, **adam}
        return self.post("optim_step", model_id=model, seq_id=seq, adam_params=params, type="optim_step")

    def save(self, model: str, seq: int, name: str, **more: object) -> Answer:
        """save_state under a name."""
        return self.post("save_weights", model_id=model, seq_id=seq, path=name, type="save_weights", **more)

    def load(self, model: str, seq: int, path: str, optimizer: bool = True) -> Answer:
        """load_state into a model."""
        return self.post(
            "load_weights", model_id=model, seq_id=seq, path=path, optimizer=optimizer, type="load_weights"
        )

    def load_new(self, path: str) -> Answer:
        """A new model from a saved state."""
        fields = {"session_id": self.session, "model_seq_id": self._next(), "path": path, "optimizer": True}
        return self.post("load_weights", **fields, type="load_weights")

    def publish(self, model: str, seq: int, name: str) -> Answer:
        """save_weights_for_sampler under a name."""
        return self.post(
            "save_weights_for_sampler", model_id=model, seq_id=seq, path=name, type="save_weights_for_sampler"
        )

    # -- sampling ------------------------------------------------------------------------------------------------------

    def ask_sampler(self, base: str | None = None, path: str | None = None) -> Answer:
        """create_sampling_session as it is answered."""
        fields = {"session_id": self.session, "sampling_session_seq_id": self._next()}
        fields |= {"base_model": base} if base else {"model_path": path}
        return self.post("create_sampling_session", **fields, type="create_sampling_session")

    def sampler(self, base: str | None = None, path: str | None = None) -> str:
        """A sampling session of a base model or a published version."""
        answer = self.ask_sampler(base, path)
        assert answer.status == 200, answer.body
        return answer.json["sampling_session_id"]

    def sample(self, sampler: str, seq: int, prompt: list[int] | None = None, samples: int = 1, **params) -> Answer:
        """asample."""
        chunks = [{"tokens": prompt or [1, 2, 3], "type": "encoded_text"}]
        return self.post(
            "asample",
            sampling_session_id=sampler,
            seq_id=seq,
            num_samples=samples,
            prompt={"chunks": chunks},
            sampling_params={"max_tokens": 4, "temperature": 1.0, "top_k": -1, "top_p": 1.0, "stop": [], **params},
            type="sample",
        )


def datum_of(model: str, seq: int, tokens: list[int], rows: int = 1) -> pb.ForwardBackwardRequest:
    """A cross_entropy request of equal rows, weights 1."""
    import numpy

    message = pb.ForwardBackwardRequest(model_id=model, seq_id=seq, loss_fn="cross_entropy")
    for _ in range(rows):
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = numpy.asarray(tokens, "<i4").tobytes()
        targets, weights = datum.loss_fn_inputs["target_tokens"], datum.loss_fn_inputs["weights"]
        targets.dtype, weights.dtype = pb.DTYPE_INT64, pb.DTYPE_FLOAT32
        for tensor in (targets, weights):
            tensor.shape.append(len(tokens))
        targets.dense = numpy.asarray(tokens, "<i8").tobytes()
        weights.dense = numpy.ones(len(tokens), "<f4").tobytes()
    return message


class HttpClient(RawClient):
    """A job attached to a private pool, spoken to through its proxy. Its session is kept alive until `close`."""

    def __init__(self, pool: LocalPool):
        variables = "import json,os,sys; print(json.dumps(dict(os.environ))); sys.stdout.flush(); sys.stdin.read()"
        self._process = pool.attach([sys.executable, "-c", variables], stdin=True)
        line = self._process.stdout.readline()
        assert line, self._process.stderr.read()
        environment = json.loads(line)
        self.url, self.key = environment["TINKER_BASE_URL"], environment["TINKER_API_KEY"]
        self._where = urlsplit(self.url)
        self._over = threading.Event()
        self.open()
        self._beating = threading.Thread(target=self._beat, daemon=True)
        self._beating.start()

    def ask(self, method: str, path: str, headers: dict[str, str], body: bytes, key: str | None = None) -> Answer:
        """Send one request on a connection of its own."""
        connection = http.client.HTTPConnection(self._where.hostname, self._where.port, timeout=60)
        try:
            connection.request(method, path, body, {"X-API-Key": self.key if key is None else key, **headers})
            answer = connection.getresponse()
            return Answer(answer.status, answer.read())
        finally:
            connection.close()

    def close(self) -> None:
        """End the job."""
        self._over.set()
        self._beating.join()
        self._process.stdin.close()
        self._process.wait(timeout=30)
        self._process.stdout.close()
        self._process.stderr.close()

    def _beat(self) -> None:
        while not self._over.wait(3.0):
            self.post("session_heartbeat", session_id=self.session, type="session_heartbeat")
