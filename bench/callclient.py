"""The program that bench.call attaches to its pool. Settings as JSON in argv; progress on stderr, JSON on stdout.

A call is submit plus retrieve, two requests. Everything is measured in rounds, the references beside it in each,
because the machine is hardly ever ours alone.
"""

import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path

import msgspec
import psutil
import tinker
import uvloop
import zmq
from tinker import types
from tinker.proto import tinker_public_pb2 as pb

from bench.rawhttp import Connection

PROTO = b"application/x-protobuf"
MODEL = "noop"
TOKENS = [1, 2, 3, 4]
API = "/api/v1/"
WARM = 50


class Settings(msgspec.Struct):
    """rounds; calls: one in flight, per round. flood: calls per round with `in_flight` at once. head: its pid.

    status: the pool's status.json, rewritten each second. folder: on the journal's disk.
    """

    rounds: int
    calls: int
    flood: int
    in_flight: int
    sdk_calls: int
    head: int
    status: str
    folder: str


def say(text: str) -> None:
    """Progress."""
    print(f"bench.call: {text}", file=sys.stderr, flush=True)


class Raw:
    """Calls by hand. One sampling session and one model, so that both kinds of deduplication keys are on the path."""

    async def open(self, in_flight: int) -> None:
        """Connect, open a session, a sampling session and a model."""
        self.url, self.key = os.environ["TINKER_BASE_URL"], os.environ["TINKER_API_KEY"]
        self.connections = [await Connection.open(self.url, self.key) for _ in range(in_flight)]
        session = (await self._json("create_session", tags=[], user_metadata={}, sdk_version="0.38.0"))["session_id"]
        self.sampler = (
            await self._json("create_sampling_session", session_id=session, sampling_session_seq_id=0, base_model=MODEL)
        )["sampling_session_id"]
        promise = await self._json(
            "create_model", session_id=session, model_seq_id=0, base_model=MODEL, lora_config={"rank": 8}
        )
        self.model = (await self._json("retrieve_future", request_id=promise["request_id"]))["model_id"]
        self.seq = self.training = 0

    async def config(self) -> str:
        """The pool's flags for the SDK."""
        return json.dumps(await self._json("client/config", sdk_version="0.38.0"))

    async def sample(self, connection: Connection) -> None:
        """One asample and its result."""
        seq, self.seq = self.seq, self.seq + 1
        body = {
            "num_samples": 1,
            "prompt": {"chunks": [{"tokens": TOKENS, "type": "encoded_text"}]},
            "sampling_params": {"max_tokens": 1, "seed": seq, "temperature": 1.0, "top_k": -1, "top_p": 1.0},
            "sampling_session_id": self.sampler,
            "seq_id": seq,
            "type": "sample",
        }
        await self._retrieve(connection, await connection.post(f"{API}asample", msgspec.json.encode(body)))

    async def forward(self, connection: Connection) -> None:
        """One forward of one datum and its result."""
        self.training += 1
        request = pb.ForwardBackwardRequest(
            model_id=self.model, seq_id=self.training, loss_fn="cross_entropy", forward_only=True
        )
        datum = request.data.add()
        numbers = b"".join(token.to_bytes(4, "little") for token in TOKENS)
        datum.model_input.add().encoded_text.tokens = numbers
        for name, kind, width in (("target_tokens", pb.DTYPE_INT64, 8), ("weights", pb.DTYPE_FLOAT32, 4)):
            tensor = datum.loss_fn_inputs[name]
            tensor.dtype, tensor.dense = kind, bytes(width * len(TOKENS))
            tensor.shape.append(len(TOKENS))
        body = request.SerializeToString()
        await self._retrieve(connection, await connection.post(f"{API}forward_backward", body, PROTO))

    async def _retrieve(self, connection: Connection, promise: bytes) -> None:
        ask = msgspec.json.encode({"request_id": msgspec.json.decode(promise)["request_id"]})
        answer = await connection.post(f"{API}retrieve_future", ask, accept=PROTO)
        if answer.startswith(b"{"):
            raise RuntimeError(f"a call failed: {answer.decode()}")

    async def _json(self, path: str, **body: object) -> dict:
        return msgspec.json.decode(await self.connections[0].post(API + path, msgspec.json.encode(body)))


async def latencies(call: Callable[[], Awaitable[None]], count: int) -> list[float]:
    """Milliseconds of each call, one in flight."""
    taken = []
    for _ in range(count):
        start = time.perf_counter()
        await call()
        taken.append((time.perf_counter() - start) * 1e3)
    return taken


async def flood(raw: Raw, call: Callable[[Connection], Awaitable[None]], count: int) -> float:
    """Calls per second, as many in flight as there are connections."""
    left = count

    async def work(connection: Connection) -> None:
        nonlocal left
        while left > 0:
            left -= 1
            await call(connection)

    start = time.perf_counter()
    await asyncio.gather(*(work(connection) for connection in raw.connections))
    return count / (time.perf_counter() - start)


def echoes(address: str, count: int) -> list[float]:
    """Milliseconds per durable ZeroMQ echo of 300 bytes, one in flight."""
    taken = []
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(address)
        for _ in range(count + WARM):
            start = time.perf_counter()
            socket.send(bytes(300))
            socket.recv()
            taken.append((time.perf_counter() - start) * 1e3)
    return taken[WARM:]


class Sdk:
    """One sampling client of the tinker SDK."""

    def __init__(self, url: str, key: str):
        self._service = tinker.ServiceClient(base_url=url, api_key=key)
        self._sampler = self._service.create_sampling_client(base_model=MODEL)

    def latencies(self, count: int) -> list[float]:
        """Milliseconds of each sample, one in flight."""
        prompt, taken = types.ModelInput.from_ints(TOKENS), []
        for seed in range(count):
            start = time.perf_counter()
            params = types.SamplingParams(max_tokens=1, seed=seed)
            self._sampler.sample(prompt, 1, params).result()
            taken.append((time.perf_counter() - start) * 1e3)
        return taken


def cpu_ms(pid: int) -> float:
    """CPU time of all threads of a process."""
    times = psutil.Process(pid).cpu_times()
    return (times.user + times.system) * 1e3


def syncs(status: str) -> int:
    """The journal's fsyncs, once the file is younger than this question."""
    asked = time.time()
    while Path(status).stat().st_mtime < asked:
        time.sleep(0.05)
    return json.loads(Path(status).read_text())["syncs"]


def p99(taken: list[float]) -> float:
    """The 99th percentile."""
    return statistics.quantiles(taken, n=100)[98]


def reference(stack: ExitStack, *arguments: str) -> str:
    """Start a process of bench.references; what it prints."""
    process = stack.enter_context(
        subprocess.Popen(
            [sys.executable, "-m", "bench.references", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
    )
    stack.callback(process.stdin.close)
    return process.stdout.readline().strip()


def measure(settings: Settings, loop: asyncio.AbstractEventLoop, stack: ExitStack) -> dict[str, list[float]]:
    """Every figure, one value per round."""
    raw = Raw()
    loop.run_until_complete(raw.open(settings.in_flight))
    one = raw.connections[0]
    address = reference(stack, "echo", settings.folder)
    port = reference(stack, "canned", loop.run_until_complete(raw.config()))
    own = Sdk(f"http://127.0.0.1:{port}", raw.key)
    pool = Sdk(raw.url, raw.key)
    own.latencies(WARM)
    pool.latencies(WARM)
    loop.run_until_complete(latencies(lambda: raw.forward(one), WARM))
    loop.run_until_complete(flood(raw, raw.sample, settings.flood // 4))
    found: dict[str, list[float]] = {}

    def note(**values: float) -> None:
        for name, value in values.items():
            found.setdefault(name, []).append(value)
        say("  ".join(f"{name} {value:.2f}" for name, value in values.items()))

    for number in range(settings.rounds):
        say(f"round {number + 1} of {settings.rounds}")
        note(reference_p50_ms=statistics.median(echoes(address, settings.calls)))
        taken = loop.run_until_complete(latencies(lambda: raw.sample(one), settings.calls))
        note(p50_ms=statistics.median(taken), p99_ms=p99(taken))
        taken = loop.run_until_complete(latencies(lambda: raw.forward(one), settings.calls))
        note(train_p50_ms=statistics.median(taken))
        synced, cpu = syncs(settings.status), cpu_ms(settings.head)
        rate = loop.run_until_complete(flood(raw, raw.sample, settings.flood))
        cpu = (cpu_ms(settings.head) - cpu) / settings.flood
        note(calls_per_s=rate, head_cpu_ms_per_call=cpu, fsyncs=syncs(settings.status) - synced)
        # Alternating, so that both see the same neighbours.
        pairs = [(own.latencies(20), pool.latencies(20)) for _ in range(settings.sdk_calls // 20)]
        sdk_own, sdk = (statistics.median(x for part in parts for x in part) for parts in zip(*pairs, strict=True))
        note(sdk_p50_ms=sdk, sdk_own_ms=sdk_own, sdk_share_ms=sdk - sdk_own)
    return found


def main() -> None:
    """Measure and print."""
    settings = msgspec.json.decode(sys.argv[1], type=Settings)
    loop = uvloop.new_event_loop()
    with ExitStack() as stack:
        found = measure(settings, loop, stack)
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    # The SDK's own threads do not end; nothing of ours is left to do.
    os._exit(0)


if __name__ == "__main__":
    main()
