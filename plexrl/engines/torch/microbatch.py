"""One micro-batch: forward pass, loss, log-probabilities."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from plexrl.engines.torch import batch, losses
from plexrl.engines.torch.model import backbone, head


def forward(
    model: PreTrainedModel,
    work: batch.Batch,
    data: list[batch.Datum],
    train: bool,
    graph: bool = False,
    logits: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """The loss of these data of a request (a scalar, with a graph if any gradient flows), and the logprobs of all their
    targets, in their order.

    graph: with train, there is a graph even where no gradient flows, the same one as ever.
    logits: called in place of the model's head, as often as is best for the cache.
    """
    where = model.device
    longest = max(len(d.tokens) for d in data)
    tokens = torch.zeros(len(data), longest, dtype=torch.int64)
    real = torch.zeros(len(data), longest, dtype=torch.bool)
    for row, datum in enumerate(data):
        tokens[row, : len(datum.tokens)] = torch.from_numpy(datum.tokens)
        real[row, : len(datum.tokens)] = True
    targets = torch.from_numpy(np.concatenate([_wide(d.targets, data) for d in data]))
    inputs = {
        name: torch.from_numpy(np.concatenate([_wide(d.inputs[name], data) for d in data])) for name in data[0].inputs
    }
    rows = torch.repeat_interleave(torch.arange(len(data)), torch.tensor([len(d.tokens) for d in data])).to(where)
    # Made on the host in one piece each, then moved: on a GPU every small step costs a launch.
    tokens, real, targets = tokens.to(where), real.to(where), targets.to(where)
    inputs = {name: tensor.to(where) for name, tensor in inputs.items()}
    need = losses.counted(work.loss, inputs, work.settings)
    rows_needed = need
    if graph and not need.any():
        rows_needed = torch.arange(len(need), device=where) == 0
    with torch.set_grad_enabled(train and bool(rows_needed.any())):
        hidden = backbone(model)(input_ids=tokens, use_cache=False).last_hidden_state[real]
        logprobs = losses.token_logprobs(hidden, logits or head(model), targets, rows_needed if train else None)
        value = losses.value(work.loss, logprobs, inputs, work.settings, need, rows)
    width = [d.targets.shape[1] for d in data for _ in d.tokens]
    if len(set(width)) > 1:
        keep = torch.arange(targets.shape[1])[None] < torch.tensor(width)[:, None]
        return value, logprobs.detach()[keep.to(where)]
    return value, logprobs


def _wide(array: np.ndarray, data: list[batch.Datum]) -> np.ndarray:
    """Pad the second dimension to the widest of the micro-batch; padded cells weigh nothing."""
    width = max(d.targets.shape[1] for d in data)
    return np.pad(array, ((0, 0), (0, width - array.shape[1]))) if array.shape[1] < width else array


def in_order(work: batch.Batch, plans: list[list[list[int]]], parts: list[Tensor]) -> list[np.ndarray]:
    """The ranks' flat logprobs, back per datum in request order."""
    found: dict[int, np.ndarray] = {}
    for plan, part in zip(plans, parts, strict=True):
        flat, at = part.numpy(), 0
        for index in (i for members in plan for i in members):
            size = work.data[index].targets.size
            found[index] = flat[at : at + size]
            at += size
    return [found[index] for index in range(len(work.data))]
