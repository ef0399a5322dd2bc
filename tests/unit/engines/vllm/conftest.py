"""Tiny random models that vLLM's attention takes, and a replica on a pretend GPU. One engine serves many tests."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from plexrl.engines import footprint
from plexrl.engines.protocol import EngineSpec, build
from plexrl.engines.vllm.house import _use
from plexrl.memory.device import CpuDevice
from plexrl.memory.gate import Gate
from plexrl.types import Extent, Role
from tests.unit.engines.conftest import EOS, Node

pytest.importorskip("vllm")

VOCABULARY = 500  # no multiple of 64: vLLM pads it


def _tiny(kind: str, tied: bool, folder: Path) -> str:
    torch.manual_seed(7)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "tie_word_embeddings": tied,
        "initializer_range": 0.2,
        "bos_token_id": 1,
        "eos_token_id": EOS,
    }
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    else:
        del sizes["head_dim"]
        model = Qwen2ForCausalLM(Qwen2Config(**sizes))
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter)
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def vllm_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Name -> folder."""
    root = tmp_path_factory.mktemp("vllm-models")
    found = {
        "tied": _tiny("llama", True, root / "tied"),
        "untied": _tiny("llama", False, root / "untied"),
        "qwen": _tiny("qwen", False, root / "qwen"),
    }
    for folder in found.values():
        (Path(folder) / "tokenizer.json").write_text(TOKENIZER)
    return found


TOKENIZER = (
    '{"version": "1.0", "model": {"type": "WordLevel", "vocab": {'
    + ", ".join(f'"{i};": {i}' for i in range(VOCABULARY))
    + '}, "unk_token": "0;"}, "decoder": {"type": "Fuse"}}'
)


class Replica(Node):
    """A node, and replicas on it."""

    _numbers = itertools.count()

    def replica_spec(self, model_dir: str, kind: str = "lora", **more: object) -> EngineSpec:
        settings = {
            "lora_slots": 2,
            "lora_max_rank": 8,
            "kv_bytes": 1 << 20,
            "max_context": 128,
            "max_batch": 16,
            "dtype": "float32",
        } | more
        spec = EngineSpec(
            engine="vllm",
            role=Role.SAMPLE,
            kind=kind,
            model_dir=model_dir,
            device_bytes=self.size,
            base_fill=True,
            **settings,
        )
        need = footprint.group(_use(spec))
        number = next(self._numbers)
        return EngineSpec(
            **{f: getattr(spec, f) for f in EngineSpec.__struct_fields__}
            | {
                "extent_offset": 1 << 16,  # somebody else has what is before: offsets into the device are not ours
                "extent_size": need.device_bytes,
                "base": self.arena.alloc(f"vbase{number}", need.base_bytes, -1),
                "park": self.arena.alloc(f"vpark{number}", need.park_bytes, 1),
            }
        )

    def replica(self, model_dir: str, kind: str = "lora", **more: object):
        """With a seat at the gate, as a process of its own has it."""
        spec = self.replica_spec(model_dir, kind, **more)
        number = next(self._seats)
        seat = Gate(self.gate_fd).seat(number, f"gang{number}", Extent(spec.extent_offset, spec.extent_size))
        return build(spec, CpuDevice(self.device_fd, self.size), self.map, seat)


@pytest.fixture(scope="session")
def replicas(vllm_models: dict[str, str]):
    """(model, kind) -> its node and engine, made when first asked for; tests leave it without calls or versions."""
    made: dict[tuple[str, str], tuple[Replica, object]] = {}

    def get(name: str, kind: str = "lora"):
        if (name, kind) not in made:
            node = Replica()
            made[name, kind] = node, node.replica(vllm_models[name], kind)
        node, engine = made[name, kind]
        assert engine.live() == 0
        return node, engine

    return get
