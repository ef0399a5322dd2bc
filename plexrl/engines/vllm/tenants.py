"""Adapters of several tenants in one batch, on CPUs: rows of one adapter are multiplied together.

vLLM's own operations for CPUs copy an adapter for every token, give rows without an adapter the last slot's, and fail
where a prompt's logprobs are wanted beside adapters. On GPUs its kernels do none of that and stay.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from vllm.lora.layers import BaseLayerWithLoRA
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
    from vllm.v1.outputs import LogprobsTensors
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

# (slot, its rows); None: all rows.
_Groups = list[tuple[int, Tensor | None]]


class Tenants:
    """Takes the place of what multiplies adapters in a runner whose model is on the CPU."""

    def __init__(self, runner: GPUModelRunner) -> None:
        self._runner = runner
        self._manager = runner.lora_manager._adapter_manager
        self._tokens: _Groups = []
        self._draws: _Groups = []
        (self._wrapper,) = self._manager.punica_wrapper_mapping.values()
        wrapper: PunicaWrapperCPU = self._wrapper
        self._update = wrapper.update_metadata
        wrapper.update_metadata = self._note
        wrapper.add_lora_linear = self._add_linear
        wrapper.add_lora_logits = self._add_logits
        for module in self._manager.modules.values():
            if hasattr(module, "_apply_sync"):
                module.apply = self._apply(module)
        self._prompt_logprobs = runner._get_prompt_logprobs_dict
        runner._get_prompt_logprobs_dict = self._each_prompt

    def _note(self, *args: object, **kwargs: object) -> None:
        """Another batch: whose its rows are."""
        self._update(*args, **kwargs)
        self._tokens = _groups(self._wrapper.token_lora_indices)
        self._draws = _groups(self._wrapper.sampler_indices)

    def _apply(self, module: BaseLayerWithLoRA) -> Callable[..., Tensor]:
        """What an adapted module does; as little as the plain one while no row has an adapter."""
        plain, base = module._get_quant_method(), module.base_layer

        def apply(x: Tensor, bias: Tensor | None = None) -> Tensor:
            output = plain.apply(base, x, bias)
            return module._apply_lora_to_output(x, output) if self._tokens else output

        return apply

    def _add_linear(
        self,
        y: Tensor,
        x: Tensor,
        a: Sequence[Tensor],
        b: Sequence[Tensor],
        scale: float,
        output_slices: Sequence[int],
        **kwargs: object,
    ) -> None:
        """y += scale x A' B', the parts of a fused module side by side. x: (tokens, in). y: (tokens, out)."""
        _add(self._tokens, y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1]), a, b, scale, output_slices)

    def _add_logits(self, y: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float, **kwargs: object) -> None:
        """The same of the head, for rows that are drawn from."""
        _add(self._draws, y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1]), (a,), (b,), scale, (b.shape[-2],))

    def _each_prompt(self, hidden: Tensor, scheduled: dict[str, int]) -> dict[str, LogprobsTensors | None]:
        """vLLM asks the head for the logits of one prompt after the other: each belongs to one tenant."""
        runner, found = self._runner, {}
        wanted = runner.num_prompt_logprobs
        for name in list(wanted):
            adapter = runner.requests[name].lora_request
            slot = -1 if adapter is None else self._manager.lora_index_to_id.index(adapter.lora_int_id)
            runner.num_prompt_logprobs = {name: wanted[name]}
            try:
                with self._all_rows(slot):
                    found |= self._prompt_logprobs(hidden, scheduled)
                if name not in runner.num_prompt_logprobs:
                    del wanted[name]
            finally:
                runner.num_prompt_logprobs = wanted
        return found

    @contextlib.contextmanager
    def _all_rows(self, slot: int) -> Iterator[None]:
        draws, self._draws = self._draws, [(slot, None)] if slot >= 0 else []
        try:
            yield
        finally:
            self._draws = draws


def _groups(slots: Tensor) -> _Groups:
    """Rows by slot; rows without an adapter have none."""
    of = slots.tolist()
    found = sorted(set(of) - {-1})
    if len(found) == 1 and -1 not in of:
        return [(found[0], None)]
    return [(slot, torch.tensor([row for row, each in enumerate(of) if each == slot])) for slot in found]


def _add(
    groups: _Groups, y: Tensor, x: Tensor, a: Sequence[Tensor], b: Sequence[Tensor], scale: float, sizes: Sequence[int]
) -> None:
    """In the adapters' dtype, as they are trained."""
    for slot, rows in groups:
        mine = (x if rows is None else x[rows]).to(a[0].dtype)
        at = 0
        for down, up, size in zip(a, b, sizes, strict=True):
            extra = nn.functional.linear(nn.functional.linear(mine, down[slot, 0]), up[slot, 0]).to(y.dtype)
            if scale != 1:
                extra *= scale
            part = y[:, at : at + size]
            if rows is None:
                part += extra
            else:
                part.index_add_(0, rows, extra)
            at += size
