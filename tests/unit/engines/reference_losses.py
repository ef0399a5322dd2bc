"""The losses of the Tinker API as their definitions read: one position after the other, in float64, by plain branches.

Shares nothing with plexrl/engines. `float(...)` of a tensor is where a definition says stop-gradient.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def loss(name: str, datum: dict[str, np.ndarray], logp: Tensor, config: dict[str, float]) -> Tensor:
    """logp: float64 (n) or (n, k), log p of the targets. sampled: bool (n), what the provenance calls sampled."""
    if name == "cross_entropy":
        weights = datum.get("weights", np.ones(logp.shape))
        return -(logp * torch.from_numpy(weights.astype(np.float64))).sum()
    logq, advantages = datum["logprobs"].astype(np.float64), datum["advantages"].astype(np.float64)
    total = torch.zeros((), dtype=torch.float64)
    if name == "gspo":
        mask = datum.get("sequence_ratio_mask", advantages)
        marked = [t for t in range(len(logq)) if mask[t] != 0]
        mean = sum(float(logp[t]) - logq[t] for t in marked) / max(1, len(marked))
    for t in range(len(logq)):
        a, lo, hi = advantages[t], _threshold("low", datum, config, t), _threshold("high", datum, config, t)
        ratio = torch.exp(logp[t] - logq[t])
        if name == "importance_sampling":
            total = total - ratio * a
        elif name == "ppo":
            total = total - _least(ratio * a, _between(ratio, lo, hi) * a)
        elif name == "cispo":
            total = total - min(max(float(ratio), lo), hi) * a * logp[t]
        elif name == "dro":
            if a != 0 or logq[t] != 0:
                total = total - (a * logp[t] - 0.5 * config["beta"] * (logp[t] - logq[t]) ** 2)
        elif name == "gspo":
            token = torch.exp(mean + logp[t] - float(logp[t]))
            total = total - _least(token * a, _between(token, lo, hi) * a)
        elif name == "stable_reinforce":
            total = total - min(float(ratio), 1.0) * a * logp[t]
            if datum["sampled"][t]:
                total = total + 0.5 * config["kl_coeff"] * (logp[t] - logq[t]) ** 2
        else:
            raise AssertionError(name)
    return total


def _threshold(side: str, datum: dict[str, np.ndarray], config: dict[str, float], t: int) -> float:
    name = f"clip_{side}_threshold"
    return float(datum[name][t]) if name in datum else config.get(name, 0.0)


def _between(x: Tensor, lo: float, hi: float) -> Tensor:
    if float(x) < lo:
        return torch.tensor(lo, dtype=torch.float64)
    return torch.tensor(hi, dtype=torch.float64) if float(x) > hi else x


def _least(a: Tensor, b: Tensor) -> Tensor:
    return a if float(a) <= float(b) else b
