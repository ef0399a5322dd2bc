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

from plexrl.engines.footprint import Trained
from plexrl.engines.protocol import EngineSpec, UserError, build
from plexrl.memory.pages import create_memfd
from plexrl.memory.transfer import ENVIRON
from plexrl.types import PlexrlError, Slab

_ADAM = {"learning_rate": 0.01, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0, "grad_clip_norm": 0.0}
_TAIL = 2000


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

    def train(self, state: Slab, version: Slab, trained: Trained, data: list[list[int]]) -> dict[str, Any]:
        """Create an adapter, make two steps on the data, publish it: logprobs before and after."""
        asked = (trained.lora_rank, 7, trained.attn, trained.mlp, trained.unembed)
        self._engine.create("d", state, *asked)
        fresh = self.force(data)
        for _ in range(2):
            self._forward_backward(data, False)
            self._engine.optim_step("d", json.dumps({"adam_params": _ADAM}).encode())
        self._engine.publish("d", version, None)
        return {"fresh": fresh, "stepped": self.force(data)}

    def force(self, rows: list[list[int]]) -> list[list[float]]:
        """Logprobs of each row's tokens but the first, given those before."""
        return self._forward_backward(rows, True)

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

    def _forward_backward(self, rows: list[list[int]], forward_only: bool) -> list[list[float]]:
        from tinker.proto import tinker_public_pb2 as pb

        asked = pb.ForwardBackwardRequest(model_id="d", seq_id=1, loss_fn="cross_entropy")
        for row in rows:
            datum = asked.data.add()
            datum.model_input.add().encoded_text.tokens = np.asarray(row[:-1], "<i4").tobytes()
            targets = np.asarray(row[1:], "<i8")
            datum.loss_fn_inputs["target_tokens"].CopyFrom(
                pb.Tensor(dtype=pb.DTYPE_INT64, shape=targets.shape, dense=targets.tobytes())
            )
        call = self._engine.forward_backward("d", asked.SerializeToString(), forward_only)
        while True:
            try:
                next(call)
            except StopIteration as stop:
                return _logprobs(stop.value.body)


def _logprobs(body: bytes) -> list[list[float]]:
    from tinker.proto import tinker_public_pb2 as pb

    found = []
    for record in pb.ForwardBackwardOutput.FromString(body).loss_fn_outputs:
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
