"""Tiny random models, device and arena for the engines' tests."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec import structs
from tinker.proto import tinker_public_pb2 as pb
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from plexrl.engines import footprint, sizing
from plexrl.engines.protocol import EngineSpec, build
from plexrl.memory.arena import Arena, ArenaMap
from plexrl.memory.device import CpuDevice, create_memfd
from plexrl.memory.gate import GATE_BYTES, Gate
from plexrl.types import Extent, Role

VOCABULARY = 512
EOS = 2


@pytest.fixture(scope="session", autouse=True)
def _one_core() -> None:
    torch.set_num_threads(1)


def _tiny(kind: str, tied: bool, folder: Path) -> str:
    torch.manual_seed(7)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": tied,
        "initializer_range": 0.2,
        "bos_token_id": 1,
        "eos_token_id": EOS,
    }
    model = LlamaForCausalLM(LlamaConfig(**sizes)) if kind == "llama" else Qwen2ForCausalLM(Qwen2Config(**sizes))
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer()))
    return str(folder)


def _tokenizer() -> dict:
    """Token i reads "i;" (so that stop strings can span tokens)."""
    return {
        "version": "1.0",
        "model": {"type": "WordLevel", "vocab": {f"{i};": i for i in range(VOCABULARY)}, "unk_token": "0;"},
        "decoder": {"type": "Fuse"},
    }


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Name -> folder: a tied Llama, an untied Llama, a Qwen2 (which has biases)."""
    root = tmp_path_factory.mktemp("models")
    return {
        "tied": _tiny("llama", True, root / "tied"),
        "untied": _tiny("llama", False, root / "untied"),
        "qwen": _tiny("qwen", False, root / "qwen"),
    }


class Node:
    """A pretend GPU and an arena in one process, and engines on them."""

    def __init__(self, size: int = 1 << 26) -> None:
        self.device_fd = create_memfd("device", size)
        self.arena_fd = create_memfd("arena", size)
        self.size = size
        self.device = CpuDevice(self.device_fd, size)
        self.arena = Arena(self.arena_fd, size)
        self.map = ArenaMap(self.arena_fd, size)
        self.gate_fd = create_memfd("gate", GATE_BYTES)
        self.gate = Gate(self.gate_fd)
        self._names = itertools.count()
        self._seats = itertools.count()

    def spec(self, model_dir: str, role: Role, kind: str, **more: object) -> EngineSpec:
        base, park = more.pop("base", None), more.pop("park", None)
        more = {"engine": "torch", "lora_slots": 2, "lora_max_rank": 8, "kv_bytes": 0, "max_context": 128} | more
        if role == Role.SAMPLE:
            more["kv_bytes"] = more["kv_bytes"] or 1 << 19
        spec = EngineSpec(
            role=role, kind=kind, model_dir=model_dir, device_bytes=self.size, **{"base_fill": True} | more
        )
        need = footprint.group(footprint.use_of(spec))
        number = next(self._names)
        base = base or self.arena.alloc(f"base{number}", need.base_bytes, -1)
        if role == Role.SAMPLE:
            park = park or self.arena.alloc(f"park{number}", need.park_bytes, 1)
        return structs.replace(spec, extent_size=need.device_bytes, base=base, park=park)

    def build(self, model_dir: str, role: Role, kind: str, **more: object):
        return build(self.spec(model_dir, role, kind, **more), self.device, self.map)

    def join(self, model_dir: str, role: Role, kind: str, **more: object):
        """An engine as a process of its own has it: its own mapping of the device, and a seat at the gate."""
        spec = self.spec(model_dir, role, kind, **more)
        number = next(self._seats)
        seat = Gate(self.gate_fd).seat(number, f"gang{number}", Extent(spec.extent_offset, spec.extent_size))
        return build(spec, CpuDevice(self.device_fd, self.size), self.map, seat)

    def state(self, model_dir: str, rank: int | None, unembed: bool = True, dtype: str = "float32"):
        """A slab for a deployment of the torch engine."""
        kind = "full" if rank is None else "lora"
        size = sizing.state_bytes(model_dir, dtype, kind, rank, True, True, unembed)
        return self.arena.alloc(f"state{next(self._names)}", size, 1)

    def state_of(self, spec: EngineSpec, rank: int | None, unembed: bool = True):
        """A slab for a deployment of this group, for each of its ranks one."""
        trained = footprint.Trained(lora_rank=rank, attn=True, mlp=True, unembed=unembed)
        return self.arena.alloc(f"state{next(self._names)}", footprint.state(footprint.use_of(spec), trained), 1)

    def snapshot(self, model_dir: str, rank: int | None, unembed: bool = True):
        """A slab for a version."""
        kind = "full" if rank is None else "lora"
        size = sizing.snapshot_bytes(model_dir, "float32", kind, rank, True, True, unembed)
        return self.arena.alloc(f"snapshot{next(self._names)}", size, 1)


@pytest.fixture
def node() -> Node:
    return Node()


def run(generator):
    """Drive a forward_backward to its result; also how often it yielded."""
    count = 0
    while True:
        try:
            next(generator)
            count += 1
        except StopIteration as stop:
            return stop.value, count


def tensor(array: np.ndarray) -> pb.Tensor:
    """As the SDK sends it: dense."""
    dtype = pb.DTYPE_FLOAT32 if array.dtype == np.float32 else pb.DTYPE_INT64
    return pb.Tensor(dtype=dtype, shape=array.shape, dense=array.tobytes())


def request(loss: str, data: list[dict[str, np.ndarray]]) -> bytes:
    """A ForwardBackwardRequest; each datum's tokens go in two chunks."""
    message = pb.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn=loss)
    for item in data:
        datum = message.data.add()
        tokens = item["tokens"].astype("<i4")
        for part in (tokens[:2], tokens[2:]):
            datum.model_input.add().encoded_text.tokens = part.tobytes()
        for name, array in item.items():
            if name != "tokens":
                datum.loss_fn_inputs[name].CopyFrom(tensor(array))
    return message.SerializeToString()


def sft(seed: int, lengths: tuple[int, ...] = (5, 12, 9, 17)) -> list[dict[str, np.ndarray]]:
    """Random sequences with weights 0 on the first third."""
    rng = np.random.default_rng(seed)
    data = []
    for length in lengths:
        tokens = rng.integers(3, VOCABULARY, length + 1)
        weights = rng.uniform(0.5, 1.5, length).astype(np.float32)
        weights[: length // 3] = 0
        data.append({"tokens": tokens[:-1], "target_tokens": tokens[1:].astype(np.int64), "weights": weights})
    return data


def logprobs(body: bytes) -> list[np.ndarray]:
    """The logprobs of a ForwardBackwardOutput, per datum."""
    found = []
    for record in pb.ForwardBackwardOutput.FromString(body).loss_fn_outputs:
        field = record.fields["logprobs"]
        offsets = np.frombuffer(field.offsets, "<i8")
        flat = np.frombuffer(field.data, "<f4")
        for start, end in itertools.pairwise(offsets // 4):
            found.append(flat[start:end].reshape(-1, *field.trailing_shape))
    return found


def loss(body: bytes) -> float:
    """Its loss:sum."""
    return pb.ForwardBackwardOutput.FromString(body).metrics["loss:sum"]
