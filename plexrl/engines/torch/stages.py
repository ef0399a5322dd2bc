"""Layers that arrive while the first ones compute already: the forward pass asks for each when it gets there."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from transformers import PreTrainedModel

from plexrl.engines.layout import Architecture, stage
from plexrl.engines.torch.model import backbone


class Stages:
    """Hooks on a model: before a layer runs, `bring(n)` is called with the stage that it is, if that is not there yet.

    After the backbone all is there: head and backward pass need no hook.
    """

    def __init__(self, model: PreTrainedModel, arch: Architecture, bring: Callable[[int], None]) -> None:
        """bring(n): have the parameters of all stages up to n on the device."""
        self._bring = bring
        self.last = max(stage(name, arch.config) for name in arch.shapes)
        self._there = self.last
        places: dict[str, int] = {}
        for name in arch.shapes:
            layer = re.search(r"\.\d+(?=\.)", name)
            places[name[: layer.end()] if layer else name.rpartition(".")[0]] = stage(name, arch.config)
        for path, number in places.items():
            model.get_submodule(path).register_forward_pre_hook(lambda module, args, number=number: self.need(number))
        backbone(model).register_forward_hook(lambda module, args, output: self.rest())

    def expect(self, there: int = -1) -> None:
        """From now on only the stages up to `there` are on the device."""
        self._there = there

    def need(self, number: int) -> None:
        """Have this stage on the device. Raises what `bring` raises."""
        if number > self._there:
            self._bring(number)
            self._there = number

    def rest(self) -> None:
        """Have all of the model on the device."""
        self.need(self.last)


def upto(buckets: Sequence[str], number: int) -> list[str]:
    """Those of `layout.staged`'s buckets that belong to the stages up to this one."""
    return [name for name in buckets if int(name.rpartition(".")[2]) <= number]
