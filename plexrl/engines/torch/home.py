"""What both engines stand on: the region on the device, the node's base slab, and the model over them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from plexrl.engines import footprint, layout
from plexrl.engines.protocol import EngineSpec
from plexrl.engines.torch.lora import Shape
from plexrl.engines.torch.model import move_buffers, read_weights, skeleton
from plexrl.memory.arena import ArenaMap
from plexrl.memory.device import Device
from plexrl.memory.manifest import Manifest, TensorSpec
from plexrl.memory.resident import ResidentState
from plexrl.types import BadInput, Extent, Slab

if TYPE_CHECKING:
    from plexrl.memory.gate import Seat

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Home:
    """A rank's place: extent on the device (mapped), base weights in the arena, module tree without parameters yet.

    The region holds, in this order: keys and values of a sampler, adapter slots, the model. What the layers of the
    model need first of all is before them, so that they can begin while the last of them is still on its way.

    where: torch's name of the device: what a call computes with is there.
    """

    def __init__(self, spec: EngineSpec, device: Device, arena: ArenaMap, seat: Seat | None = None) -> None:
        """Waits for the extent and holds it. Fills the base slab when the spec says so.

        Raises BadInput for a spec or model that does not fit together.
        """
        self.spec = spec
        self.device = device
        self.arena = arena
        self.seat = seat
        self.arch = layout.architecture(spec.model_dir)
        self.dtype = DTYPES[spec.dtype]
        self.base_specs = layout.base_specs(self.arch, spec.dtype)
        if spec.base is None:
            raise BadInput("the engine got no slab for the base weights", "Allocate Sizes.base_bytes in the arena")
        check_size("the base", spec.base, layout.packed(self.base_specs))
        use = footprint.use_of(spec)
        need = footprint.group(use)
        if spec.extent_size < need.device_bytes:
            raise BadInput(
                f"an extent of {spec.extent_size} bytes is too small for the {need.device_bytes} of the group",
                "Place it with Sizes.device_bytes",
            )
        lora = spec.kind == "lora"
        self._slots_at = need.park_bytes
        self._slot = footprint.slot(use) if lora else 0
        self.model_at = self._slots_at + spec.lora_slots * self._slot
        self.model = skeleton(spec.model_dir, self.arch, self.dtype, spec.max_context)
        self.vocabulary = self.model.config.vocab_size
        if spec.base_fill:
            views = manifest({"frozen": self.base_specs}).views(arena.view(spec.base))["frozen"]
            read_weights(spec.model_dir, self.arch, views)
            del views
            arena.drop(spec.base, readonly=False)  # from now on nobody here can write to what all tenants share
        self.region = device.reserve(Extent(spec.extent_offset, spec.extent_size))
        if seat is not None:
            seat.come()
            seat.held()
        device.map(self.region)
        # Whoever had this memory before may have been another user, and may have been killed without clearing it.
        self.region.buffer.zero_()
        self.where = self.region.buffer.device
        move_buffers(self.model, self.where)

    def resident(
        self,
        plan: Manifest,
        place: Tensor,
        slab: Tensor | None,
        sources: Mapping[str, Tensor] | None = None,
        at: int = 0,
    ) -> ResidentState:
        """A state at a place of the region; see ResidentState."""
        return ResidentState(plan, place, slab, sources, at=at, mover=self.device.mover, chunk=self.device.chunk)

    def base(self) -> Tensor:
        """The base weights' bytes in the arena, read-only: laid out as a bucket of base_specs."""
        return self.arena.view(self.spec.base, readonly=True)

    def model_place(self) -> Tensor:
        """Where the region holds the model: to its end."""
        return self.region.buffer[self.model_at :]

    def slot(self, index: int) -> Tensor:
        """An adapter slot."""
        start = self.slot_at(index)
        return self.region.buffer[start : start + self._slot]

    def slot_at(self, index: int) -> int:
        """Where in the region it begins."""
        return self._slots_at + index * self._slot

    def adapter_specs(self, shape: Shape) -> list[layout.Spec]:
        """The tensors of an adapter. Raises BadInput for a rank above the group's."""
        if not 1 <= shape.rank <= self.spec.lora_max_rank:
            raise BadInput(
                f"LoRA rank {shape.rank} is outside 1 to {self.spec.lora_max_rank}", "Ask for a rank in this range"
            )
        return layout.adapter_specs(self.arch, shape.rank, shape.attn, shape.mlp, shape.unembed)


class Slots:
    """Which adapter lies in which device slot. The least recently used one gives way."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._held: dict[object, int] = {}  # least recently used first

    def find(self, owner: object) -> int | None:
        """The owner's slot, which becomes the most recently used one."""
        if owner not in self._held:
            return None
        slot = self._held[owner] = self._held.pop(owner)
        return slot

    def held(self) -> list[object]:
        """Owners by ascending slot."""
        return sorted(self._held, key=self._held.__getitem__)

    def claim(self, owner: object) -> tuple[int, object | None]:
        """A slot for an owner that has none, and who must leave it first."""
        free = set(range(self._count)) - set(self._held.values())
        evicted = None if free else next(iter(self._held))
        slot = min(free) if free else self._held.pop(evicted)
        self._held[owner] = slot
        return slot, evicted

    def release(self, owner: object) -> int | None:
        """Forget an owner; the slot it had."""
        return self._held.pop(owner, None)

    def clear(self) -> None:
        """Forget all."""
        self._held.clear()


def manifest(buckets: layout.Buckets) -> Manifest:
    """memory's manifest of layout's buckets."""
    return Manifest.build({name: [TensorSpec(*spec) for spec in specs] for name, specs in buckets.items()})


def check_size(what: str, slab: Slab, size: int) -> None:
    """Raises BadInput unless the slab has exactly `size` bytes."""
    if slab.size != size:
        raise BadInput(f"slab {slab.name!r} of {what} has {slab.size} bytes and needs {size}", "Allocate that much")


def slices(plan: Manifest, memory: Tensor) -> dict[str, Tensor]:
    """bucket -> its bytes, in memory that is laid out by the plan."""
    return {bucket.name: memory[bucket.offset : bucket.offset + bucket.size] for bucket in plan.buckets}
