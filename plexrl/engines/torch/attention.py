"""Attention as transformers' modules call it, over torch's scaled_dot_product_attention.

transformers' own sdpa path repeats the key heads whenever there is a mask; torch's CPU kernel reads them in place.
Rows are padded on the right, so causal attention needs no mask: no real token looks at a later one.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

NAME = "plexrl_sdpa"


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """query (rows, heads, length, size), key and value (rows, kv heads, keys, size); mask additive or None = causal."""
    output = torch.nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        is_causal=attention_mask is None and query.shape[2] > 1,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.transpose(1, 2), None


AttentionInterface.register(NAME, attend)
