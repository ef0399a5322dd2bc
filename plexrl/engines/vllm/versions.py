"""The published versions that a replica draws by: adapters beside each other, full parameters one after another."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from plexrl.engines import layout
from plexrl.engines.torch.crossing import Tally, insist
from plexrl.engines.torch.home import check_size, manifest
from plexrl.engines.torch.lora import Shape
from plexrl.engines.vllm.house import House
from plexrl.engines.vllm.tenants import Tenants
from plexrl.memory.residency import Residency
from plexrl.types import BadInput, Moved, PlexrlError, Slab

if TYPE_CHECKING:
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.request import LoRARequest

# How many transfers come to one whose bytes are compared, device against slab.
CHECKED = int(os.environ.get("PLEXRL_CHECK_TRANSFERS", "16"))


class _Version:
    """source: bytes in the arena; None for the base. views: an adapter's tensors there. number: vLLM's name of it."""

    def __init__(
        self, number: int, slab: Slab | None, source: Tensor | None, shape: Shape | None, views: Mapping[str, Tensor]
    ) -> None:
        self.number = number
        self.slab = slab
        self.source = source
        self.shape = shape
        self.views = views


class Versions:
    """Versions by name; None is the base. tally: what is moved from now on beside whole switches."""

    def __init__(self, house: House) -> None:
        self.tally = Tally()
        self.loaded: str | None = None  # kind full: whose weights are the model's now, or come next
        self._house = house
        self._full = house.spec.kind == "full"
        self._known: dict[str, _Version] = {}
        self._numbers = itertools.count(1)
        self._transfers = itertools.count()
        if not self._full:
            # vLLM asks for an adapter when it is first used, and whenever it has no room for all: from the slab.
            house.runner.lora_manager._load_adapter = self._adapter
            if house.region.buffer.device.type == "cpu":
                Tenants(house.runner)

    def attach(self, version: str, slab: Slab | None, shape: Shape | None) -> None:
        """slab None: the base under another name. Raises BadInput for a slab or shape that is not this group's."""
        house = self._house
        if version in self._known:
            return
        if slab is None:
            self._known[version] = _Version(0, None, None, None, {})
            return
        if (shape is None) != self._full:
            raise BadInput(
                f"version {version!r} is {'full parameters' if shape is None else 'an adapter'} in a group of kind "
                f"{house.spec.kind!r}",
                "Use a group of the other kind",
            )
        if shape is None:
            check_size(f"version {version!r}", slab, house.form.size)
            source = house.arena.view(slab, readonly=True)
            self._known[version] = _Version(0, slab, source, None, {})
            return
        if not 1 <= shape.rank <= house.spec.lora_max_rank:
            raise BadInput(
                f"LoRA rank {shape.rank} is outside 1 to {house.spec.lora_max_rank}", "Ask for a rank in this range"
            )
        specs = layout.adapter_specs(house.arch, shape.rank, shape.attn, shape.mlp, shape.unembed)
        plan = manifest({"weights": specs})
        check_size(f"version {version!r}", slab, plan.size)
        source = house.arena.view(slab, readonly=True)
        self._known[version] = _Version(next(self._numbers), slab, source, shape, plan.views(source)["weights"])

    def detach(self, version: str) -> None:
        """Forget a version."""
        gone = self._known.pop(version, None)
        if gone is None:
            return
        if gone.shape is not None:
            self._house.runner.lora_manager.remove_adapter(gone.number)
        if self.loaded == version:
            self.point(None)
        if gone.slab is not None:
            self._house.arena.drop(gone.slab, readonly=True)

    def check(self, version: str | None) -> None:
        """Raises BadInput for a version that is not attached."""
        if version is not None and version not in self._known:
            raise BadInput(f"version {version!r} is not attached", "Attach it first")

    def joins(self, version: str | None) -> bool:
        """Whether it can be drawn from beside what is drawn from now."""
        return not self._full or version == self.loaded

    def request(self, version: str | None) -> LoRARequest | None:
        """How vLLM is told to draw by an adapter; None: the model as it is."""
        known = None if version is None else self._known[version]
        if known is None or known.shape is None:
            return None
        from vllm.lora.request import LoRARequest

        return LoRARequest(lora_name=version, lora_int_id=known.number, lora_path="in the arena")

    def point(self, version: str | None) -> None:
        """Kind full: the model is to be another. `bring` has it whole before the next step; nothing runs between."""
        house = self._house
        known = None if version is None else self._known[version]
        source = house.base() if known is None or known.source is None else known.source
        for bucket, memory in house.sources(source).items():
            house.state.repoint(bucket, memory)
        self.loaded = version
        if not house.client.reset_prefix_cache():
            raise PlexrlError("the model was to change under sequences that are being drawn", "Report this: it is ours")

    def bring(self) -> None:
        """Have all of the model on the device, each byte of it compared now and then with where it came from."""
        house = self._house
        if house.state.residency is not Residency.DEVICE:
            return
        names = [bucket.name for bucket in house.fusion.plan.buckets if not house.state.present(bucket.name)]
        if not names:
            return
        self.tally.add(insist(lambda: house.state.pull(*names, seat=house.seat)))
        if self._checks():
            known = self._known[self.loaded] if self.loaded is not None else None
            source = house.sources(house.base() if known is None or known.source is None else known.source)
            place = house.region.buffer[house.model_at :]
            for bucket in house.fusion.plan.buckets:
                if bucket.name in source:
                    there = place[bucket.offset : bucket.offset + bucket.size].cpu()
                    if not torch.equal(there, source[bucket.name]):
                        raise PlexrlError(
                            f"{bucket.name} of version {self.loaded!r} differs on the device from its slab",
                            "The replica serves nothing any more; it is built anew",
                        )

    def left(self) -> None:
        """All has left the device: adapters come again when they are used."""
        if not self._full:
            self._house.runner.lora_manager.remove_all_adapters()

    # --- inside ---------------------------------------------------------------------------------------------------

    def _checks(self) -> bool:
        return CHECKED > 0 and next(self._transfers) % CHECKED == 0

    def _adapter(self, request: LoRARequest) -> LoRAModel:
        """vLLM copies it into its stacks; B as it multiplies, already times alpha / rank."""
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.lora_weights import LoRALayerWeights

        begin = time.perf_counter()
        known = self._known[request.lora_name]
        rank, scaling = known.shape.rank, known.shape.scaling
        weights = {}
        for name, a in known.views.items():
            if name.endswith(".lora_A.weight"):
                module = name.removeprefix(layout.PEFT_PREFIX).removesuffix(".lora_A.weight")
                b = known.views[name.replace(".lora_A.", ".lora_B.")]
                weights[module] = LoRALayerWeights(module, rank, rank, a, b * scaling, 1.0)
        self.tally.add(Moved(bytes_in=known.source.numel(), seconds=time.perf_counter() - begin))
        return LoRAModel(known.number, rank, weights)
