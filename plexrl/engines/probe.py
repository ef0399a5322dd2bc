"""An engine in a process of its own that answers one question at a time (engines.parity). Both sides stand here.

`python -m plexrl.engines.probe` is the process: JSON lines in, JSON lines out. What the engine prints goes to stderr.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
from typing import Any, Self

import msgspec
import numpy as np
from msgspec import structs

from plexrl.engines import footprint
from plexrl.engines.footprint import Trained, Use
from plexrl.engines.protocol import EngineSpec, UserError, build
from plexrl.memory.arena import Arena
from plexrl.memory.pages import create_memfd
from plexrl.memory.transfer import ENVIRON
from plexrl.types import PlexrlError, Slab

_TAIL = 2000
_ROOM = 1 << 22

Datum = dict[str, list]
"""tokens, and the inputs of the loss by name (target_tokens, weights, ...)."""


class Probe:
    """The asking side; a context manager that ends the process."""

    def __init__(self, spec: EngineSpec, arena_fd: int, arena_bytes: int) -> None:
        """Returns when the engine is built. Raises PlexrlError with its words when it is not."""
        self._engine = spec.engine
        self._log = tempfile.TemporaryFile()
        device = create_memfd("device", spec.device_bytes)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-m", "plexrl.engines.probe", str(device), str(arena_fd), str(arena_bytes)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                pass_fds=(device, arena_fd),
                env={**os.environ, **ENVIRON, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            )
        finally:
            os.close(device)
        try:
            self._put(msgspec.json.encode(spec))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, verb: str, **what: object) -> Any:
        """Raises PlexrlError with the engine's words."""
        return self._put(msgspec.json.encode({"verb": verb, **what}))

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()
        self._log.close()

    def _put(self, line: bytes) -> Any:
        try:
            self._process.stdin.write(line + b"\n")
            self._process.stdin.flush()
            told = self._process.stdout.readline()
        except BrokenPipeError:
            told = b""
        if not told:
            self._log.seek(max(self._log.seek(0, os.SEEK_END) - _TAIL, 0))
            tail = self._log.read().decode(errors="replace")
            raise PlexrlError(f"{self._engine} ended with {self._process.wait()}. Its output ends with:\n{tail}")
        found = json.loads(told)
        if "error" in found:
            raise PlexrlError(f"{self._engine}: {found['error']}")
        return found["value"]


class Table:
    """An arena that processes of several engines share, as on a node. A context manager."""

    def __init__(self, size: int) -> None:
        """size: bytes of all slabs; some more are added for what lies between them."""
        self._size = -(-(size + _ROOM) // _ROOM) * _ROOM
        self._fd = create_memfd("arena", self._size)
        self._arena = Arena(self._fd, self._size)
        self._bases: dict[str, Slab] = {}
        self._names = itertools.count()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._arena.close()
        os.close(self._fd)

    def slab(self, size: int) -> Slab:
        """A new one."""
        return self._arena.alloc(str(next(self._names)), size, 0)

    def bytes_of(self, slab: Slab) -> bytes:
        """What lies in a slab now."""
        return bytes(self._arena.bytes_of(slab))

    def build(self, use: Use, **more: object) -> Probe:
        """An engine in a process of its own, on a device that is just large enough. more: of its EngineSpec."""
        sizes = footprint.group(use)
        fields = {name: value for name, value in structs.asdict(use).items() if name in EngineSpec.__struct_fields__}
        fill = sizes.base_form not in self._bases
        if fill and sizes.base_bytes:
            self._bases[sizes.base_form] = self.slab(sizes.base_bytes)
        spec = EngineSpec(
            **fields,
            extent_size=sizes.device_bytes,
            device_bytes=sizes.device_bytes,
            base=self._bases.get(sizes.base_form),
            base_fill=fill,
            park=self.slab(sizes.park_bytes) if sizes.park_bytes else None,
            **more,
        )
        return Probe(spec, self._fd, self._size)


class _Answers:
    """The answering side, on an engine."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def obey(self, order: dict[str, Any]) -> Any:
        """Do what a line asks for."""
        verb = getattr(self, order.pop("verb"))
        for name, kind in (("state", Slab), ("version", Slab), ("trained", Trained)):
            if name in order:
                order[name] = msgspec.convert(order[name], kind)
        return verb(**order)

    def create(self, state: Slab, trained: Trained) -> None:
        """The one deployment of a trainer."""
        self._engine.create("d", state, trained.lora_rank, 7, trained.attn, trained.mlp, trained.unembed)

    def run(self, loss: str, data: list[Datum], forward_only: bool) -> dict[str, Any]:
        """A forward pass, and backward: the loss, and the logprobs of each datum's targets."""
        from tinker.proto import tinker_public_pb2 as pb

        asked = pb.ForwardBackwardRequest(model_id="d", seq_id=1, loss_fn=loss)
        for item in data:
            datum = asked.data.add()
            datum.model_input.add().encoded_text.tokens = np.asarray(item["tokens"], "<i4").tobytes()
            for name in item.keys() - {"tokens"}:
                of_ids = name == "target_tokens"
                array = np.asarray(item[name], "<i8" if of_ids else "<f4")
                kind = pb.DTYPE_INT64 if of_ids else pb.DTYPE_FLOAT32
                datum.loss_fn_inputs[name].CopyFrom(pb.Tensor(dtype=kind, shape=array.shape, dense=array.tobytes()))
        call = self._engine.forward_backward("d", asked.SerializeToString(), forward_only)
        while True:
            try:
                next(call)
            except StopIteration as stop:
                output = pb.ForwardBackwardOutput.FromString(stop.value.body)
                return {"loss": output.metrics["loss:sum"], "logprobs": _logprobs(output)}

    def step(self, adam: dict[str, float]) -> None:
        """Apply the gradients."""
        self._engine.optim_step("d", json.dumps({"adam_params": adam}).encode())

    def publish(self, version: Slab) -> None:
        """Pack the weights."""
        self._engine.publish("d", version, None)

    def attach(self, name: str, version: Slab, trained: Trained) -> None:
        """Know a version."""
        self._engine.attach(name, version, trained.lora_rank, trained.attn, trained.mlp, trained.unembed)

    def sample(self, name: str, prompts: list[list[int]], samples: int, tokens: int) -> list[dict[str, Any]]:
        """Draw: whole rows, logprobs of what was drawn, and of the prompt but its first token."""
        from tinker.proto import tinker_public_pb2 as pb

        found: dict[str, Any] = {}
        for number, prompt in enumerate(prompts):
            body = {
                "prompt": {"chunks": [{"type": "encoded_text", "tokens": prompt}]},
                "num_samples": samples,
                "sampling_params": {"max_tokens": tokens, "temperature": 1.0, "seed": number},
                "prompt_logprobs": True,
            }
            self._engine.add(str(number), name, json.dumps(body).encode())
        while self._engine.live():
            for call, result in self._engine.step():
                if isinstance(result, UserError):
                    raise result
                found[call] = pb.SampleResponse.FromString(result.body)
        return [
            {
                "row": prompt + np.frombuffer(sequence.tokens, "<i4").tolist(),
                "logprobs": np.frombuffer(sequence.logprobs, "<f4").tolist(),
                "prompt": np.frombuffer(found[str(number)].prompt_logprobs, "<f4")[1:].tolist(),
            }
            for number, prompt in enumerate(prompts)
            for sequence in found[str(number)].sequences
        ]


def _logprobs(output: Any) -> list[list[float]]:
    found = []
    for record in output.loss_fn_outputs:
        field = record.fields["logprobs"]
        flat = np.frombuffer(field.data, "<f4")
        for start, end in itertools.pairwise(np.frombuffer(field.offsets, "<i8") // 4):
            found.append(flat[start:end].tolist())
    return found


def main() -> int:
    """argv: descriptors of the device and of the arena, the arena's size. First line: the spec; then one per order."""
    device_fd, arena_fd, arena_bytes = map(int, sys.argv[1:])
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # libraries may print

    import torch

    from plexrl.memory.arena import ArenaMap
    from plexrl.memory.device import CpuDevice

    torch.set_num_threads(1)
    served: _Answers | None = None
    for line in sys.stdin.buffer:
        try:
            value = None
            if served is None:
                spec = msgspec.json.decode(line, type=EngineSpec)
                device = CpuDevice(device_fd, spec.device_bytes)
                served = _Answers(build(spec, device, ArenaMap(arena_fd, arena_bytes)))
            else:
                value = served.obey(json.loads(line))
            told: dict[str, Any] = {"value": value}
        except PlexrlError as error:
            told = {"error": str(error)}
        answers.write(json.dumps(told).encode() + b"\n")
        answers.flush()
    return 0


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    # As the nursery ends ranks: threads of the libraries abort now and then in an ordinary exit.
    os._exit(code)
