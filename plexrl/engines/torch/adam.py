"""torch.optim.AdamW over a deployment's flat buckets."""

from __future__ import annotations

import json
import math

import msgspec
import torch
from msgspec import Struct
from torch import Tensor, nn

from plexrl.engines.protocol import UserError


class AdamParams(Struct, frozen=True, forbid_unknown_fields=True):
    """A step's settings, with the client's defaults. grad_clip_norm 0: no clipping."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


def parse(body: bytes) -> AdamParams:
    """The adam_params of an optim_step request. Raises UserError."""
    try:
        request = json.loads(body)
        if not isinstance(request, dict):
            raise UserError("the optim_step request is no JSON object")
        if request.get("optimizer_params") is not None:
            raise UserError("optimizers other than AdamW are not built yet", "Send adam_params")
        params = msgspec.convert(request.get("adam_params") or {}, AdamParams, strict=False)
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        raise UserError(f"malformed optim_step request: {error}") from error
    values = msgspec.structs.asdict(params)
    for name, value in values.items():
        if not math.isfinite(value) or value < 0:
            raise UserError(f"adam_params.{name} is {value}", "Use a finite number that is not negative")
        if name.startswith("beta") and value >= 1:
            raise UserError(f"adam_params.{name} is {value}", "Use a number below 1")
    if params.eps < 1e-30:
        # Zero in float32, or near it: 0 / 0 would make weights that never had a gradient NaN.
        raise UserError(f"adam_params.eps is {params.eps}", "Use 1e-30 or more")
    return params


class Adam:
    """AdamW (decoupled weight decay, arXiv 1711.05101) whose parameter, gradient and state are given memory.

    All tensors of the deployment are one flat parameter: the update is elementwise, so it is the same, and the padding
    between tensors stays zero.
    """

    def __init__(self, weights: Tensor, grads: Tensor, moment1: Tensor, moment2: Tensor, step: Tensor) -> None:
        """Flat tensors of one length and dtype; step: float32 scalar."""
        self._weights = nn.Parameter(weights)
        self._weights.grad = grads
        self._grads = grads
        self._adam = torch.optim.AdamW([self._weights], fused=True)
        self._adam.state[self._weights] = {"step": step, "exp_avg": moment1, "exp_avg_sq": moment2}

    def step(self, params: AdamParams) -> float:
        """Clip and step; gradients become zero. The norm before clipping; when it is not finite nothing is changed."""
        norm = float(torch.linalg.vector_norm(self._grads, dtype=torch.float32))
        if not math.isfinite(norm):
            return norm
        if params.grad_clip_norm and norm > params.grad_clip_norm:
            self._grads.mul_(params.grad_clip_norm / (norm + 1e-6))  # as torch.nn.utils.clip_grad_norm_
        self._adam.param_groups[0].update(
            lr=params.learning_rate,
            betas=(params.beta1, params.beta2),
            eps=params.eps,
            weight_decay=params.weight_decay,
        )
        self._adam.step()
        self._adam.zero_grad(set_to_none=False)
        return norm
