"""Holds no model and answers at once: what is left is the cost of the path (bench.call, the head's tests)."""

from __future__ import annotations

import json
import time
from collections.abc import Generator
from pathlib import Path

from google.protobuf.message import DecodeError
from tinker.proto import tinker_public_pb2 as pb

from plexrl.engines.protocol import EngineSpec, UserError
from plexrl.engines.sizing import Sizes
from plexrl.types import Moved, Result, Role, Slab

# The least that the allocators of a device and of an arena give out; state_bytes and snapshot_bytes are the same.
BYTES = 64
SIZES = Sizes(device_bytes=BYTES, base_bytes=0, park_bytes=0, workspace=0)
PROTO = "application/x-protobuf"


def build(spec: EngineSpec) -> NoopTrainer | NoopSampler:
    """The engine of one rank."""
    return NoopTrainer(spec) if spec.role == Role.TRAIN else NoopSampler()


class NoopTrainer:
    """Zero logprobs and zero loss for whatever comes."""

    def __init__(self, spec: EngineSpec) -> None:
        self.rank = spec.rank
        self.deployments: set[str] = set()

    def create(
        self,
        deployment: str,
        slab: Slab,
        lora_rank: int | None,
        seed: int,
        attn: bool,
        mlp: bool,
        unembed: bool,
        adopt: bool = False,
    ) -> None:
        """Note the name."""
        self.deployments.add(deployment)

    def drop(self, deployment: str) -> None:
        """Forget the name."""
        self.deployments.discard(deployment)

    def forward_backward(self, deployment: str, body: bytes, forward_only: bool) -> Generator[None, None, Result]:
        """One micro-batch, without work. Raises UserError for a body that is no ForwardBackwardRequest."""
        start = time.thread_time_ns()
        try:
            request = pb.ForwardBackwardRequest.FromString(body)
        except DecodeError as error:
            raise UserError(f"malformed ForwardBackwardRequest: {error}") from error
        yield
        if self.rank:
            return Result(content_type=PROTO, body=b"")
        output = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics={"loss:sum": 0.0})
        lengths = [_length(datum) for datum in request.data]
        record = output.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(lengths))
        field = record.fields["logprobs"]
        offset, offsets = 0, [0]
        for length in lengths:
            offset += 4 * length
            offsets.append(offset)
        field.data = bytes(offset)
        field.offsets = b"".join(o.to_bytes(8, "little") for o in offsets)
        field.dtype = pb.DTYPE_FLOAT32
        return Result(content_type=PROTO, body=output.SerializeToString(), units=sum(lengths), cpu_us=_since(start))

    def optim_step(self, deployment: str, body: bytes) -> Result:
        """No step."""
        return Result(content_type="application/json", body=b'{"metrics":{}}' if self.rank == 0 else b"", units=1)

    def save(self, deployment: str, folder: Path, optimizer: bool) -> Moved:
        """An empty folder stands for the state."""
        folder.mkdir(parents=True, exist_ok=True)
        return Moved()

    def load(self, deployment: str, folder: Path, optimizer: bool) -> Moved:
        """Nothing to take."""
        return Moved()

    def publish(self, deployment: str, slab: Slab | None, folder: Path | None) -> Moved:
        """Nothing to pack."""
        return Moved()

    def spill(self, deployment: str) -> None:
        """Nothing is held."""

    def rehome(self, deployment: str, slab: Slab) -> None:
        """Nothing is held."""

    def offload(self) -> Moved:
        """Nothing moves."""
        return Moved()

    def load_device(self) -> Moved:
        """Nothing moves."""
        return Moved()

    def undo(self) -> Moved:
        """Nothing moved."""
        return Moved()

    def any_rank(self, flag: bool) -> bool:
        """The gang agrees by itself: a noop call has no boundary worth pausing at."""
        return flag

    def close(self) -> None:
        """Nothing to free."""


class NoopSampler:
    """max_tokens zeros for every sample asked for, all in one step."""

    def __init__(self) -> None:
        self.calls: dict[str, bytes] = {}

    def attach(
        self, version: str, slab: Slab | None, lora_rank: int | None, attn: bool, mlp: bool, unembed: bool
    ) -> None:
        """Any version will do."""

    def detach(self, version: str) -> None:
        """Nothing to forget."""

    def add(self, call_id: str, version: str | None, body: bytes, drawn: bytes = b"") -> None:
        """Keep the body for the next step."""
        self.calls[call_id] = body

    def take(self, call_id: str) -> bytes:
        """Nothing was drawn."""
        del self.calls[call_id]
        return b""

    def drawn(self, call_id: str) -> tuple[int, bytes]:
        """Nothing: it answers at once."""
        return 0, b""

    def step(self) -> list[tuple[str, Result | UserError]]:
        """Answer all."""
        calls, self.calls = self.calls, {}
        return [(call_id, _sampled(body)) for call_id, body in calls.items()]

    def live(self) -> int:
        """Calls not answered yet."""
        return len(self.calls)

    def cancel(self, call_id: str) -> None:
        """Drop a call."""
        self.calls.pop(call_id, None)

    def offload(self) -> Moved:
        """Nothing moves."""
        return Moved()

    def load_device(self) -> Moved:
        """Nothing moves."""
        return Moved()

    def undo(self) -> Moved:
        """Nothing moved."""
        return Moved()

    def close(self) -> None:
        """Nothing to free."""


def _sampled(body: bytes) -> Result | UserError:
    start = time.thread_time_ns()
    try:
        request = json.loads(body)
        count = int(request.get("num_samples", 1))
        tokens = int(request.get("sampling_params", {}).get("max_tokens") or 1)
    except (ValueError, TypeError, AttributeError) as error:
        return UserError(f"malformed asample request: {error}")
    response = pb.SampleResponse()
    for _ in range(count):
        zeros = bytes(4 * tokens)
        response.sequences.add(stop_reason=pb.STOP_REASON_LENGTH, tokens=zeros, logprobs=zeros)
    return Result(content_type=PROTO, body=response.SerializeToString(), units=count * tokens, cpu_us=_since(start))


def _length(datum: pb.Datum) -> int:
    """Targets of a datum; a datum without targets counts its input."""
    if "target_tokens" in datum.loss_fn_inputs:
        return datum.loss_fn_inputs["target_tokens"].shape[0]
    return sum(len(chunk.encoded_text.tokens) // 4 for chunk in datum.model_input)


def _since(start: int) -> int:
    return (time.thread_time_ns() - start) // 1000
