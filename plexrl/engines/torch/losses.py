"""Log-probabilities of given tokens, and the losses over them.

All losses are sums over positions and no means, so that calls and micro-batches add up. In the formulas p is the
model's probability of a target, q that of the policy which sampled it (exp of the input `logprobs`), A the advantage,
r = p / q, and sg(x) is x without a gradient. Inputs and configuration of each: engines/losses.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

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


def token_logprobs(hidden: Tensor, head: Callable[[Tensor], Tensor], targets: Tensor, need: Tensor | None) -> Tensor:
    """log p of targets (n, k) given hidden states (n, size): (n, k), float32. head: hidden states into logits.

    need: bool (n,), positions whose gradient is wanted; the others take no memory for logits. None: no gradient at all.
    """
    out = torch.empty(targets.shape, dtype=torch.float32, device=hidden.device)
    rest = torch.arange(len(hidden), device=hidden.device) if need is None else torch.nonzero(~need)[:, 0]
    with torch.no_grad():
        for rows in rest.split(CHUNK) if len(rest) else ():
            logits = head(hidden[rows]).float()
            out[rows] = logits.gather(1, targets[rows]) - torch.logsumexp(logits, -1, keepdim=True)
    if need is None or len(rest) == len(hidden):
        return out
    rows = torch.nonzero(need)[:, 0]
    return out.index_put((rows,), _Gather.apply(head(hidden[rows]), targets[rows]))


Inputs = Mapping[str, Tensor]
Settings = Mapping[str, float]


def counted(loss: str, inputs: Inputs, settings: Settings) -> Tensor:
    """bool (n): positions that the loss depends on; a gradient flows from no other. inputs: float32 (n, k) each."""
    if loss == "cross_entropy":
        cells = inputs["weights"] != 0
    elif loss == "dro":
        cells = (inputs["advantages"] != 0) | ((inputs["logprobs"] != 0) & (settings["beta"] != 0))
    elif loss == "stable_reinforce":
        cells = (inputs["advantages"] != 0) | ((inputs["sampled"] != 0) & (settings["kl_coeff"] != 0))
    else:
        cells = inputs["advantages"] != 0
    return cells.any(-1)


def value(loss: str, logprobs: Tensor, inputs: Inputs, settings: Settings, counts: Tensor, datum: Tensor) -> Tensor:
    """The loss, a scalar. logprobs: (n, k). counts: as from `counted`. datum: int64 (n), which sequence a row is of."""
    if loss == "gspo":
        inputs = {**inputs, "sequence_log_ratio": sequence_log_ratio(logprobs.detach(), inputs, datum)}
    return _LOSSES[loss](logprobs[counts], {name: rows[counts] for name, rows in inputs.items()}, settings)


def cross_entropy(logprobs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    """-sum w log p, w the input `weights` of any sign.

    Source: Tinker's documentation, "Cross-Entropy"; the SDK's forward_backward_custom sends w = -dC/dlog p, so that
    this has the gradient of any loss C of the logprobs.
    """
    return -(logprobs * inputs["weights"]).sum()


def importance_sampling(logprobs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    """-sum r A. Source: Tinker's documentation, "Importance Sampling"."""
    return -(torch.exp(logprobs - inputs["logprobs"]) * inputs["advantages"]).sum()


def ppo(logprobs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    """-sum min(r A, clip(r, low, high) A), token by token.

    Source: Schulman et al. 2017 (arXiv 1707.06347), equation 7; thresholds as in Tinker's documentation, "PPO".
    """
    return _clipped(logprobs - inputs["logprobs"], inputs)


def cispo(logprobs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    """-sum sg(clip(r, low, high)) A log p: clipping bounds a token's weight and never takes its gradient away.

    Source: MiniMax 2025 (arXiv 2506.13585); Tinker's documentation, "CISPO"; an upper bound alone: arXiv 2510.13786.
    """
    ratio = torch.exp(logprobs.detach() - inputs["logprobs"])
    clipped = ratio.clamp(inputs["clip_low_threshold"], inputs["clip_high_threshold"])
    return -(clipped * inputs["advantages"] * logprobs).sum()


def dro(logprobs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    """-sum (A log p - beta/2 (log p - log q)^2).

    Positions whose advantage and logprob are both 0 are padding and do not count: the expectation is over tokens drawn
    from q, and programs fill up prompts with zeros.
    Source: Richemond et al. 2024 (arXiv 2405.19107); Tinker's documentation, "DRO".
    """
    penalty = (logprobs - inputs["logprobs"]).square()
    return -(inputs["advantages"] * logprobs - 0.5 * settings["beta"] * penalty).sum()


def gspo(logprobs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    """-sum min(s_t A, clip(s_t, low, high) A), s_t = sg(s / p) p, s the ratio of the whole sequence.

    s_t has the value of s and the gradient of its own token, so advantages may differ within a sequence (GSPO-token).
    Source: Zheng et al. 2025 (arXiv 2507.18071), section 4.3; a sum in place of their mean, as in Tinker's
    documentation, "GSPO".
    """
    return _clipped(inputs["sequence_log_ratio"] + logprobs - logprobs.detach(), inputs)


def stable_reinforce(logprobs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    """-sum sg(min(r, 1)) A log p + kl_coeff/2 sum (log p - log q)^2, the second sum over all sampled tokens.

    The formula is PlexRL's. Of Tinker's (alpha) only the interface and the aim are known here: to stay stable where p
    and q differ. Results differ from Tinker's. Sources: REINFORCE with weights truncated at 1 (Espeholt et al. 2018,
    arXiv 1802.01561, rho-bar = 1), which fade where the policy has left a token, and the estimate k2 of KL(p, q)
    (J. Schulman, "Approximating KL Divergence", 2020), whose gradient on policy is that of the divergence.
    """
    log_ratio = logprobs - inputs["logprobs"]
    weights = torch.exp(log_ratio.detach().clamp(max=0))
    penalty = 0.5 * settings["kl_coeff"] * (inputs["sampled"] * log_ratio.square())
    return (penalty - weights * inputs["advantages"] * logprobs).sum()


def sequence_log_ratio(logprobs: Tensor, inputs: Inputs, datum: Tensor) -> Tensor:
    """log s of gspo for each row (n, 1): the mean of log p - log q over the marked rows of its sequence.

    0 for a sequence without a mark, none of whose rows counts.
    """
    marked = (inputs["sequence_ratio_mask"] != 0).double()
    sums = logprobs.new_zeros(int(datum[-1]) + 1, 2, dtype=torch.float64)
    differences = torch.where(marked != 0, logprobs - inputs["logprobs"], 0).double()
    sums.index_add_(0, datum, torch.cat([differences, marked], -1))
    return (sums[:, 0] / sums[:, 1].clamp(min=1))[datum, None].float()


def _clipped(log_ratio: Tensor, inputs: Inputs) -> Tensor:
    """-sum min(r A, clip(r) A). Where the clipped side counts there is no gradient, however large r is."""
    advantages = inputs["advantages"]
    ratio = torch.exp(log_ratio.detach())
    bounded = ratio.clamp(inputs["clip_low_threshold"], inputs["clip_high_threshold"]) * advantages
    cut = bounded < ratio * advantages
    free = torch.exp(torch.where(cut, 0, log_ratio)) * advantages
    return -torch.where(cut, bounded, free).sum()


_LOSSES: dict[str, Callable[[Tensor, Inputs, Settings], Tensor]] = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
    "dro": dro,
    "gspo": gspo,
    "stable_reinforce": stable_reinforce,
}
