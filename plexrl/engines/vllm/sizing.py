"""Bytes of a replica on vLLM, and what it refuses, from config.json and safetensors headers. No torch, no vllm here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plexrl.engines import layout, sizing
from plexrl.types import BadInput, Role

if TYPE_CHECKING:
    from plexrl.engines.footprint import Use

BLOCK = 32
"""Tokens of a KV block: the least that vLLM's attention on CPUs takes."""

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Largest ranks that vLLM makes room for; ours is padded to the next one with zeros."""

HEAD_DIMS = frozenset({32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512})
"""Head lengths that vLLM's attention on CPUs is compiled for."""

ARCHITECTURES = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
"""`architectures` of config.json whose parameters are known to lie in vLLM as in the checkpoint, side by side."""

# vLLM pads the vocabulary to a multiple of this, and takes no adapter of a head beyond so many tokens.
_VOCABULARY_STEP = 64
_MOST_TOKENS = 258_048
_TORCH = "Write sample.engine: torch for this model"


def sizes(use: Use) -> sizing.Sizes:
    """Of one replica. Raises BadInput for a model or settings that it cannot serve."""
    arch = layout.architecture(use.model_dir)
    check(arch, use)
    # The base lies in the node's slab as a torch sampler has it there: both fill and share the same one.
    plain = sizing.sizes(
        use.model_dir, use.dtype, Role.SAMPLE, use.kind, use.lora_slots, use.lora_max_rank, use.kv_bytes
    )
    kv = blocks(arch, use.dtype, use.kv_bytes) * block_bytes(arch, use.dtype)
    return sizing.Sizes(
        device_bytes=layout.align(kv) + adapter_bytes(arch, use) + model_bytes(arch, use.dtype),
        base_bytes=plain.base_bytes,
        park_bytes=layout.align(kv),
        workspace=plain.workspace,
    )


def check(arch: layout.Architecture, use: Use) -> None:
    """Raise BadInput with a mend for what vLLM, or ours on it, does not serve."""
    if use.role != Role.SAMPLE:
        raise BadInput("engine vllm samples only", "Write train.engine: torch or deepspeed")
    names = arch.config.get("architectures") or []
    if not ARCHITECTURES.intersection(names):
        raise BadInput(f"engine vllm does not serve {', '.join(names) or 'a model without architectures'}", _TORCH)
    if arch.head_dim not in HEAD_DIMS:
        raise BadInput(f"vLLM's attention on CPUs has no kernel for heads of {arch.head_dim}", _TORCH)
    if use.kind == "lora":
        if not 1 <= use.lora_max_rank <= RANKS[-1]:
            raise BadInput(f"lora.max_rank {use.lora_max_rank} with engine vllm", f"Use 1 to {RANKS[-1]}")
        if arch.config["vocab_size"] > _MOST_TOKENS:
            raise BadInput(f"vLLM adapts no head of more than {_MOST_TOKENS} tokens", _TORCH)
    limit = arch.config.get("max_position_embeddings")
    if limit and use.max_context > limit:
        raise BadInput(f"max_context {use.max_context} is beyond the {limit} positions of {use.model_dir}", "Lower it")
    # One block more: vLLM keeps the first one for itself.
    need = -(-use.max_context // BLOCK) + 1
    if blocks(arch, use.dtype, use.kv_bytes) < need:
        raise BadInput(
            f"kv_bytes {use.kv_bytes} hold {blocks(arch, use.dtype, use.kv_bytes)} blocks of {BLOCK} tokens; one "
            f"sequence of max_context {use.max_context} takes {need}",
            f"Write sample.kv_bytes: {need * block_bytes(arch, use.dtype)} or more, or lower max_context",
        )


def block_bytes(arch: layout.Architecture, dtype: str) -> int:
    """Of one KV block, all layers."""
    return arch.kv_token_bytes * layout.ITEMSIZE[dtype] * BLOCK


def blocks(arch: layout.Architecture, dtype: str, kv_bytes: int) -> int:
    """KV blocks of a replica."""
    return kv_bytes // block_bytes(arch, dtype)


def rank_of(lora_max_rank: int) -> int:
    """The rank that vLLM makes room for."""
    return next(rank for rank in RANKS if rank >= lora_max_rank)


def adapter_bytes(arch: layout.Architecture, use: Use) -> int:
    """vLLM's stacks of adapters: for each module one of all slots' A and one of their B, in float32."""
    if use.kind != "lora":
        return 0
    rank, item = rank_of(use.lora_max_rank), layout.ITEMSIZE["float32"]
    return sum(
        layout.align(use.lora_slots * rank * inner * item) + layout.align(use.lora_slots * outer * rank * item)
        for outer, inner in layout.adapted(arch, True, True, True).values()
    )


def model_bytes(arch: layout.Architecture, dtype: str) -> int:
    """All parameters, the vocabulary padded as vLLM does, and its table of rotary positions."""
    item = layout.ITEMSIZE[dtype]
    padding = sum(
        layout.align(padding_rows(shape[0]) * shape[1] * item)
        for name, shape in arch.shapes.items()
        if is_vocabulary(name)
    )
    positions = layout.align(arch.config.get("max_position_embeddings", 0) * arch.head_dim * item)
    return layout.packed(layout.base_specs(arch, dtype)) + padding + positions


def is_vocabulary(name: str) -> bool:
    """Whether a parameter has a row per token."""
    return name.endswith(("embed_tokens.weight", f"{layout.HEAD}.weight"))


def padding_rows(rows: int) -> int:
    """Rows that vLLM adds to a vocabulary."""
    return -rows % _VOCABULARY_STEP
