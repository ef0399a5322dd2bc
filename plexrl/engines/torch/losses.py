"""Log-probabilities of given tokens, and the losses over them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

# Rows whose logits are in the cache at once where no gradient is needed.
CHUNK = 128


class _Gather(torch.autograd.Function):
    """log softmax(logits)[targets], with the gradient written over the logits: they are large and needed no more."""

    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor) -> Tensor:
        norm = torch.cat([torch.logsumexp(rows.float(), -1) for rows in logits.split(CHUNK)])
        ctx.save_for_backward(logits, targets, norm)
        return logits.gather(1, targets).float() - norm[:, None]

    @staticmethod
    def backward(ctx, grad: Tensor):
        logits, targets, norm = ctx.saved_tensors
        total = grad.sum(-1).neg_()
        for rows, lse, scale in zip(logits.split(CHUNK), norm.split(CHUNK), total.split(CHUNK), strict=True):
            if rows.dtype == torch.float32:
                rows.sub_(lse[:, None]).exp_().mul_(scale[:, None])
            else:
                rows.copy_((rows.float() - lse[:, None]).exp_().mul_(scale[:, None]))
        logits.scatter_add_(1, targets, grad.to(logits.dtype))
        return logits, None


def token_logprobs(hidden: Tensor, head: nn.Module, targets: Tensor, need: Tensor | None) -> Tensor:
    """log p of targets (n, k) given hidden states (n, size): (n, k), float32.

    need: bool (n,), positions whose gradient is wanted; the others take no memory for logits. None: no gradient at all.
    """
    out = torch.empty(targets.shape, dtype=torch.float32)
    rest = torch.arange(len(hidden)) if need is None else torch.nonzero(~need)[:, 0]
    with torch.no_grad():
        for rows in rest.split(CHUNK) if len(rest) else ():
            logits = head(hidden[rows]).float()
            out[rows] = logits.gather(1, targets[rows]) - torch.logsumexp(logits, -1, keepdim=True)
    if need is None or len(rest) == len(hidden):
        return out
    rows = torch.nonzero(need)[:, 0]
    return out.index_put((rows,), _Gather.apply(head(hidden[rows]), targets[rows]))


def cross_entropy(logprobs: Tensor, weights: Tensor) -> Tensor:
    """sum(-logprob * weight): Tinker's definition, a sum and no mean."""
    return -(logprobs * weights).sum()


def importance_sampling(logprobs: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    """-sum(exp(logprob - old) * advantage): Tinker's definition; the ratio corrects for the sampler's policy."""
    return -(torch.exp(logprobs - old) * advantages).sum()
