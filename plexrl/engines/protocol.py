"""What an engine host asks of an engine, whatever executes the calls. No torch here: the head imports this too."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from msgspec import Struct

from plexrl.types import BadInput, Moved, PlexrlError, Result, Role, Slab

if TYPE_CHECKING:
    from plexrl.memory.arena import ArenaMap
    from plexrl.memory.device import Device
    from plexrl.memory.gate import Seat


Engine = Literal["torch", "noop", "vllm", "deepspeed"]


class UserError(PlexrlError):
    """The call's own data is at fault (NaN loss, token out of range). The engine goes on; the text is the user's."""

    exit_code = 2


class Undone(PlexrlError):
    """A switch failed on a rank and was taken back on all of them: nothing is lost, and it may be tried again."""


class EngineSpec(Struct, frozen=True, kw_only=True):
    """One rank of a worker group, as its agent starts it.

    engine: what executes the calls; "vllm" samples only, "deepspeed" trains only, "noop" holds no model.
    kind: "lora" (any number of adapters on one frozen base) or "full" (one deployment).
    model_dir: folder with config.json, safetensors and tokenizer. dtype: "float32" or "bfloat16", of the base and of
    full parameters (adapters are always float32).
    rank, world, rendezvous: place in the gang; rendezvous is the path of the gang's gloo FileStore, "" if world is 1.
    interface: address that gloo binds to.
    extent_offset, extent_size: the group's place on its device, 64-byte aligned. device_bytes: the whole device.
    lora_slots, lora_max_rank: adapters that are on the device at once, and their largest rank (kind "lora").
    kv_bytes, max_batch, max_context: KV memory, sequences decoded at once, longest prompt plus answer (role sample).
    micro_batch_tokens: padded tokens per micro-batch (role train).
    base: the node's shared slab with the base weights (`Sizes.base_bytes`). base_fill: this rank fills it.
    park: host slab of `Sizes.park_bytes` for the KV of live sequences while the group is off the device (role sample).
    zero_stage: what DeepSpeed's ranks share out between them, 0 to 3 (engine deepspeed).
    cache_dir: folder of the service account for what an engine compiles for this machine, kept between processes.
    """

    engine: Engine
    role: Role
    kind: Literal["lora", "full"]
    model_dir: str
    dtype: Literal["float32", "bfloat16"] = "float32"
    rank: int = 0
    world: int = 1
    rendezvous: str = ""
    interface: str = "127.0.0.1"
    extent_offset: int | None = 0
    extent_size: int = 0
    device_bytes: int = 0
    lora_slots: int = 1
    lora_max_rank: int = 32
    kv_bytes: int = 0
    max_batch: int = 48
    max_context: int = 512
    micro_batch_tokens: int = 2048
    base: Slab | None = None
    base_fill: bool = False
    park: Slab | None = None
    zero_stage: int = 0
    cache_dir: str = ""


class TrainEngine(Protocol):
    """Executes the training calls of a worker group, one at a time. Every rank of a gang is called alike."""

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
        """A new deployment whose host home is `slab` (`sizing.state_bytes`). lora_rank None: full parameters.

        adopt: take the state that an engine which has ended left whole in the slab; PlexrlError if it did not.

        An adapter starts with A drawn from `seed` and B zero, full parameters as the base. Raises BadInput for a rank
        above the group's, a slab of another size, or a second deployment of kind full.
        """

    def drop(self, deployment: str) -> None:
        """Forget a deployment; its slab is free afterwards."""

    def forward_backward(self, deployment: str, body: bytes, forward_only: bool) -> Generator[None, None, Result]:
        """Run a protobuf ForwardBackwardRequest, yielding at each micro-batch boundary (equally often on every rank).

        Between two `next` the engine may be offloaded and loaded again. The value is the whole gang's
        ForwardBackwardOutput on rank 0 and an empty body elsewhere. Raises UserError with gradients as before the call.
        A generator must be run to its end: one that is thrown away leaves its micro-batches in the gradients.
        """

    def optim_step(self, deployment: str, body: bytes) -> Result:
        """Sum gradients over ranks, clip, AdamW with the body's adam_params (JSON), gradients to zero."""

    def save(self, deployment: str, folder: Path, optimizer: bool) -> Moved:
        """Write weights (and optimizer) as safetensors; all or nothing. Raises PlexrlError on every rank alike."""

    def load(self, deployment: str, folder: Path, optimizer: bool) -> Moved:
        """Take a saved state; without `optimizer` moments and step counter start at zero. Gradients become zero."""

    def publish(self, deployment: str, slab: Slab | None, folder: Path | None) -> Moved:
        """Pack the weights into a snapshot slab (`sizing.snapshot_bytes`), and as safetensors into folder (rank 0)."""

    def offload(self) -> Moved:
        """Leave the device: every dirty bucket goes home. What fails is mended by `undo`."""

    def load_device(self) -> Moved:
        """Be on the device again, bit for bit: what the first layers need is there, the calls bring in the rest.

        What fails is mended by `undo`. Raises BadInput, nothing moved, while a slab that it needs is spilled.
        """

    def undo(self) -> Moved:
        """Take the last offload or load_device back, whether it failed or not: where the state was, bit for bit."""

    def spill(self, deployment: str) -> None:
        """Let go of the deployment's slab, whose bytes go elsewhere. Raises BadInput unless it is on the host."""

    def rehome(self, deployment: str, slab: Slab) -> None:
        """The deployment's bytes are back, in this slab."""

    def any_rank(self, flag: bool) -> bool:
        """Whether any rank of the gang says True (a one-byte all-reduce): all ranks pause at the same boundary."""

    def close(self) -> None:
        """Leave the gang."""


class SampleEngine(Protocol):
    """Draws samples with continuous batching. One process per replica."""

    def attach(
        self, version: str, slab: Slab | None, lora_rank: int | None, attn: bool, mlp: bool, unembed: bool
    ) -> None:
        """A published version whose weights are in `slab`; slab None means the base model."""

    def detach(self, version: str) -> None:
        """Forget a version that no live call uses."""

    def add(self, call_id: str, version: str | None, body: bytes, drawn: bytes = b"") -> None:
        """Take in a JSON asample request; version None is the base model. Raises UserError for what can never run.

        drawn: what another replica's `take` gave; the request goes on from there, its prefix is computed again.
        """

    def take(self, call_id: str) -> bytes:
        """What was drawn of a call and the state of its generators; the call is dropped. Raises KeyError."""

    def drawn(self, call_id: str) -> tuple[int, bytes]:
        """What a live call has drawn so far: tokens of all its sequences, and a SampleResponse. Raises KeyError."""

    def step(self) -> list[tuple[str, Result | UserError]]:
        """Prefill newcomers that fit, then draw one token for every live sequence; the calls that ended."""

    def live(self) -> int:
        """Calls taken in and not ended."""

    def cancel(self, call_id: str) -> None:
        """Drop a call without result; unknown ids are ignored, because the call may just have ended."""

    def offload(self) -> Moved:
        """Leave the device; live sequences are parked in host memory or read again later, whichever costs less."""

    def load_device(self) -> Moved:
        """Be on the device again, as TrainEngine.load_device."""

    def undo(self) -> Moved:
        """Take the last offload or load_device back, as TrainEngine.undo."""

    def close(self) -> None:
        """Free what the process holds."""


def build(spec: EngineSpec, device: Device, arena: ArenaMap, seat: Seat | None = None) -> TrainEngine | SampleEngine:
    """The engine of one rank, resident on its device when this returns. seat: its place at the device's gate.

    A collective of the gang's ranks. Raises BadInput for a model that this engine cannot run.
    """
    match spec.engine, spec.role:
        case "noop", _:
            from plexrl.engines import noop

            return noop.build(spec)
        case "torch", _:
            from plexrl.engines.torch import build as build_torch

            return build_torch(spec, device, arena, seat)
        case "vllm", Role.SAMPLE:
            from plexrl.engines.vllm import build as build_vllm

            return build_vllm(spec, device, arena, seat)
        case "deepspeed", Role.TRAIN:
            from plexrl.engines.deepspeed import build as build_deepspeed

            return build_deepspeed(spec, device, arena, seat)
    raise BadInput(
        f"engine {spec.engine!r} does not {spec.role.value}", "vllm samples, deepspeed trains, torch and noop do both"
    )
