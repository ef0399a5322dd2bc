"""Which tensors a group, a deployment and a snapshot consist of: from config.json and safetensors headers only."""

from __future__ import annotations

import json
import math
import re
from functools import lru_cache
from pathlib import Path

from msgspec import Struct

from plexrl.types import BadInput

ALIGN = 64
ITEMSIZE = {"float32": 4, "bfloat16": 2, "int64": 8, "uint8": 1}
# torch's CPU generator (mt19937) has a state of this many bytes; a test holds the engine to it.
RNG_BYTES = 5056
# What a slab says of itself (torch.header); it never leaves the host.
HEADER_BYTES = 256
ATTENTION = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj"})
MLP = frozenset({"gate_proj", "up_proj", "down_proj", "gate_up_proj"})
HEAD = "lm_head"
# Where the adapted module's path stands in a peft checkpoint.
PEFT_PREFIX = "base_model.model."

Spec = tuple[str, tuple[int, ...], str]
Buckets = dict[str, list[Spec]]


class Architecture(Struct, frozen=True):
    """What sizes depend on. shapes: parameter name -> shape, without a tied head. config: config.json as it is.

    Parameters are in the order in which a forward pass needs them, so that a copy in this order can be overtaken.
    """

    config: dict
    shapes: dict[str, tuple[int, ...]]
    files: dict[str, str]
    tied: bool

    @property
    def kv_token_bytes(self) -> int:
        """Bytes per token of keys and values in elements of one byte, all layers; times the item size."""
        heads = self.config.get("num_key_value_heads") or self.config["num_attention_heads"]
        return 2 * self.config["num_hidden_layers"] * heads * self.head_dim

    @property
    def head_dim(self) -> int:
        """Length of one attention head."""
        return self.config.get("head_dim") or self.config["hidden_size"] // self.config["num_attention_heads"]


def align(size: int) -> int:
    """The next multiple of 64 bytes."""
    return -(-size // ALIGN) * ALIGN


def packed(specs: list[Spec]) -> int:
    """Bytes of a bucket: each tensor on a 64-byte boundary, as memory.manifest lays it out."""
    return sum(align(math.prod(shape) * ITEMSIZE[dtype]) for _, shape, dtype in specs)


def packed_all(buckets: Buckets) -> int:
    """Bytes of all buckets."""
    return sum(packed(specs) for specs in buckets.values())


def header(path: Path) -> dict[str, dict]:
    """The header of a safetensors file: 8 bytes little-endian length, then JSON (safetensors' format description)."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= 100_000_000:
                raise BadInput(f"{path} is not a safetensors file", "Save the model with save_pretrained")
            entries = json.loads(file.read(length))
    except (OSError, ValueError) as error:
        raise BadInput(f"cannot read {path}: {error}", "The model folder needs whole safetensors files") from error
    return {name: entry for name, entry in entries.items() if name != "__metadata__"}


@lru_cache(maxsize=64)
def architecture(model_dir: str) -> Architecture:
    """Read a model folder. Raises BadInput naming the file that is missing or wrong."""
    folder = Path(model_dir)
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise BadInput(f"cannot read {folder / 'config.json'}: {error}", "Give a transformers model folder") from error
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    if not names:
        raise BadInput(
            f"{folder} holds no safetensors file", "Save the model with save_pretrained; pickles are not read"
        )
    tied = bool(config.get("tie_word_embeddings", False))
    shapes: dict[str, tuple[int, ...]] = {}
    files: dict[str, str] = {}
    for name in names:
        for tensor, entry in header(folder / name).items():
            if tied and tensor == f"{HEAD}.weight":
                continue
            shapes[tensor] = tuple(entry["shape"])
            files[tensor] = name
    order = sorted(shapes, key=lambda name: (stage(name, config), name))
    return Architecture(config, {k: shapes[k] for k in order}, {k: files[k] for k in order}, tied)


def stage(name: str, config: dict) -> int:
    """When a forward pass needs a parameter: 0 before the layers (embeddings), 1 to n in a layer, n + 1 after them."""
    layer = re.search(r"\.(\d+)\.", name)
    if layer is not None:
        return 1 + int(layer.group(1))
    return 0 if re.search(r"embed|\bwte\b|\bwpe\b", name) else 1 + config["num_hidden_layers"]


def base_specs(arch: Architecture, dtype: str) -> list[Spec]:
    """All parameters of the model, in the order of a forward pass."""
    return [(name, shape, dtype) for name, shape in arch.shapes.items()]


def staged(arch: Architecture, specs: list[Spec], bucket: str) -> Buckets:
    """base_specs as one bucket per stage, `bucket`.0000 and so on: side by side they are laid out as in one bucket."""
    buckets: Buckets = {}
    for spec in specs:
        buckets.setdefault(f"{bucket}.{stage(spec[0], arch.config):04d}", []).append(spec)
    return buckets


def adapted(arch: Architecture, attn: bool, mlp: bool, unembed: bool) -> dict[str, tuple[int, int]]:
    """Linear modules that get an adapter: module path -> (out, in). A tied head counts with the embedding's shape."""
    wanted = (ATTENTION if attn else frozenset()) | (MLP if mlp else frozenset())
    found: dict[str, tuple[int, int]] = {}
    for name, shape in arch.shapes.items():
        module, _, leaf = name.rpartition(".")
        if leaf == "weight" and len(shape) == 2 and module.rpartition(".")[2] in wanted:
            found[module] = (shape[0], shape[1])
    if unembed:
        head = arch.shapes.get(f"{HEAD}.weight")
        if head is None and arch.tied:
            head = next((s for n, s in arch.shapes.items() if n.endswith("embed_tokens.weight")), None)
        if head is None:
            raise BadInput("the model has no lm_head to train", "Create the LoRA with train_unembed=False")
        found[HEAD] = (head[0], head[1])
    if not found:
        raise BadInput(
            "nothing to adapt: no known attention or MLP projection in this model",
            "Switch on one of train_attn, train_mlp, train_unembed, or use full parameters",
        )
    return dict(sorted(found.items()))


def adapter_specs(arch: Architecture, rank: int, attn: bool, mlp: bool, unembed: bool) -> list[Spec]:
    """The adapter's tensors under the names of a peft checkpoint: lora_A (rank, in), lora_B (out, rank), float32."""
    specs: list[Spec] = []
    for module, (out_features, in_features) in adapted(arch, attn, mlp, unembed).items():
        specs.append((f"{PEFT_PREFIX}{module}.lora_A.weight", (rank, in_features), "float32"))
        specs.append((f"{PEFT_PREFIX}{module}.lora_B.weight", (out_features, rank), "float32"))
    return specs


def state_buckets(weights: list[Spec], parts: Buckets | None = None) -> Buckets:
    """A deployment's whole training state. One AdamW step counter serves all: they are stepped together.

    parts: the weights in several buckets (`staged`) in place of one.
    """
    return {
        **(parts or {"weights": weights}),
        "grads": weights,
        "moment1": weights,
        "moment2": weights,
        **state_ends(),
    }


def state_ends() -> Buckets:
    """What every training state has beside tensors of the weights' kind, whatever engine it is of."""
    return {
        "steps": [("step", (), "float32")],
        "rng": [("generator", (RNG_BYTES,), "uint8")],
        "header": [("header", (HEADER_BYTES,), "uint8")],
    }


def weight_specs(
    arch: Architecture, dtype: str, lora_rank: int | None, attn: bool, mlp: bool, unembed: bool
) -> list[Spec]:
    """What a deployment trains and a snapshot holds: an adapter, or (lora_rank None) all parameters."""
    return base_specs(arch, dtype) if lora_rank is None else adapter_specs(arch, lora_rank, attn, mlp, unembed)


def kv_specs(arch: Architecture, dtype: str, kv_bytes: int) -> list[Spec]:
    """Keys and values, one tensor (2, tokens, kv heads, head length) per layer; kv_bytes fixes the number of tokens."""
    tokens = kv_bytes // (arch.kv_token_bytes * ITEMSIZE[dtype])
    heads = arch.config.get("num_key_value_heads") or arch.config["num_attention_heads"]
    if tokens < 1:
        raise BadInput(f"kv_bytes {kv_bytes} holds not one token", f"One token takes {arch.kv_token_bytes} elements")
    shape = (2, tokens, heads, arch.head_dim)
    return [(f"layer{index:04d}", shape, dtype) for index in range(arch.config["num_hidden_layers"])]
