"""What DeepSpeed takes for the model: a module whose call is a whole micro-batch, from its data to its loss."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from plexrl.engines.torch import batch, microbatch
from plexrl.engines.torch.model import head

# Holds a parameter of ZeRO 3 against release: no module has this number.
_HOLDER = -1


class Step(nn.Module):
    """Has the parameters that are trained, and no others."""

    def __init__(self, model: PreTrainedModel, trained: Mapping[str, nn.Parameter], whole: bool = False) -> None:
        """trained: all parameters of the model's own, or of adapters in it.

        whole: for ZeRO 3 over the model's own, which gathers parameters module by module. The head is not run as one:
        ranks take it in chunks of their own numbers, and each gathering is a collective. What it has is there from the
        begin of a forward pass to its end, whoever uses it how often.
        """
        super().__init__()
        self._throughout = tuple(p for p in (head(model).weight, head(model).bias) if p is not None) if whole else ()
        if whole:
            self.model = model
        else:
            for number, parameter in enumerate(trained.values()):
                self.register_parameter(f"trained{number}", parameter)
        self._model = (model,)  # in a tuple it is no submodule: what DeepSpeed does to those is not for a frozen base

    def forward(self, work: batch.Batch, data: list[batch.Datum], train: bool, graph: bool) -> tuple[Tensor, Tensor]:
        """See microbatch.forward."""
        logits = None
        if self._throughout:
            self._throughout[0].all_gather(param_list=list(self._throughout))
            for parameter in self._throughout:
                parameter.ds_active_sub_modules.add(_HOLDER)
            logits = self._logits
        value, logprobs = microbatch.forward(self._model[0], work, data, train, graph, logits)
        return value, logprobs.detach()

    def _logits(self, hidden: Tensor) -> Tensor:
        return nn.functional.linear(hidden, *self._throughout)


def gap(count: int, like: Tensor) -> nn.Parameter:
    """Elements between two parameters of a flat buffer: trained in name, without a gradient ever."""
    return nn.Parameter(torch.zeros(count, dtype=like.dtype, device=like.device))
