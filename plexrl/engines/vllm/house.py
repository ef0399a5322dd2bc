"""A replica's place: its extent on the device, the node's base slab, and vLLM's engine with all its memory there."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import Tensor

from plexrl.engines import layout
from plexrl.engines.footprint import Use
from plexrl.engines.protocol import EngineSpec
from plexrl.engines.torch.home import check_size, manifest
from plexrl.engines.torch.model import read_weights
from plexrl.engines.vllm import sizing
from plexrl.engines.vllm.fusion import Fusion
from plexrl.engines.vllm.launch import launch
from plexrl.memory.arena import ArenaMap
from plexrl.memory.device import Device
from plexrl.memory.resident import ResidentState
from plexrl.types import BadInput, Extent

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core_client import InprocClient
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from plexrl.memory.gate import Seat


class House:
    """The region holds, in this order: KV blocks, the stacks of adapters, the model.

    client, scheduler, runner: vLLM's. blocks: uint8 (layers, blocks, bytes) on the device; parked: the same in host
    memory. state: of the model, whose home is the node's base slab and is never written. base: checkpoint name -> its
    bytes there.
    """

    def __init__(self, spec: EngineSpec, device: Device, arena: ArenaMap, seat: Seat | None) -> None:
        """Waits for the extent and holds it. Raises BadInput for a spec or model that does not fit together."""
        self.spec = spec
        self.device = device
        self.arena = arena
        self.seat = seat
        self.arch = arch = layout.architecture(spec.model_dir)
        need = sizing.sizes(_use(spec))
        if spec.base is None or spec.park is None:
            raise BadInput("the sampler got no slab for the base weights, or none to park its KV in", "Allocate both")
        check_size("the base", spec.base, need.base_bytes)
        check_size("the park", spec.park, need.park_bytes)
        if spec.extent_size < need.device_bytes:
            raise BadInput(
                f"an extent of {spec.extent_size} bytes is too small for the {need.device_bytes} of the replica",
                "Place it with Sizes.device_bytes",
            )
        self.form = manifest({"frozen": layout.base_specs(arch, spec.dtype)})
        if spec.base_fill:
            views = self.form.views(arena.view(spec.base))["frozen"]
            read_weights(spec.model_dir, arch, views)
            del views
            arena.drop(spec.base, readonly=False)  # from now on nobody here can write to what all tenants share
        self.region = device.reserve(Extent(spec.extent_offset, spec.extent_size))
        if seat is not None:
            seat.come()
            seat.held()
        device.map(self.region)
        # Whoever had this memory before may have been another user, and may have been killed without clearing it.
        self.region.buffer.zero_()
        self.client: InprocClient = launch(spec, arch)
        core = self.client.engine_core
        self.scheduler: Scheduler = core.scheduler
        self.runner: GPUModelRunner = core.model_executor.driver_worker.worker.model_runner
        self._move_in()

    def sources(self, slab: Tensor) -> dict[str, Tensor]:
        """Checkpoint name -> its bytes in a slab of all parameters (the base's, or a full version's)."""
        starts = {spec.name: at for spec, at in self.form.buckets[0].tensors}
        buckets = [bucket for bucket in self.fusion.plan.buckets if bucket.name in starts]
        return {bucket.name: slab[starts[bucket.name] : starts[bucket.name] + bucket.size] for bucket in buckets}

    def base(self) -> Tensor:
        """The base's slab, read-only."""
        return self.arena.view(self.spec.base, readonly=True)

    # --- inside ---------------------------------------------------------------------------------------------------

    def _move_in(self) -> None:
        """vLLM's memory becomes ours: its tensors are views of the region, what they held is freed."""
        spec, buffer = self.spec, self.region.buffer
        size = sizing.block_bytes(self.arch, spec.dtype)
        count = sizing.blocks(self.arch, spec.dtype, spec.kv_bytes)
        self.scratch_at = layout.align(count * size)
        kv = buffer[: count * size]
        shape = (self.arch.config["num_hidden_layers"], count, -1)
        self.parked = self.arena.view(spec.park)[: count * size].view(shape)
        self.blocks = kv.view(shape)
        self._move_blocks(kv)
        at = self.scratch_at
        for stack in self._stacks():
            stack.data = buffer[at : at + stack.nbytes].view(stack.dtype).view(stack.shape)
            at += layout.align(stack.nbytes)
        self.model_at = at
        base = self.base()
        self.fusion = fusion = Fusion(self.runner.model, self.arch, spec.dtype)
        fusion.verify(self.form.views(base)["frozen"])
        place = buffer[at:]
        if place.numel() < fusion.plan.end:
            raise BadInput(
                f"vLLM's tensors take {at + fusion.plan.end} bytes and the extent has {spec.extent_size}",
                "Tell the makers: the sizes of this model are wrong",
            )
        self.state = ResidentState(
            fusion.plan,
            place,
            None,
            self.sources(base) | fusion.own,
            at=at,
            mover=self.device.mover,
            chunk=self.device.chunk,
        )
        self.built = self.state.load(seat=self.seat)
        fusion.bind(place)
        gc.unfreeze()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)

    def _move_blocks(self, kv: Tensor) -> None:
        """All layers' KV are views of one storage, layer by layer."""
        contexts = self.runner.compilation_config.static_forward_context.values()
        held = [context.kv_cache for context in contexts if isinstance(getattr(context, "kv_cache", None), Tensor)]
        held += [each for each in self.runner.kv_caches if isinstance(each, Tensor)]
        storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in held}
        if len(storages) != 1 or set(storages.values()) != {kv.numel()}:
            raise BadInput(
                f"vLLM made {len(storages)} KV memories of {sorted(storages.values())} bytes, not one of {kv.numel()}",
                "Write sample.engine: torch for this model",
            )
        layers, count, size = self.blocks.shape
        for each in {id(each): each for each in held}.values():
            start = each.storage_offset() * each.itemsize
            if each.stride(0) * each.itemsize != size or start not in range(0, layers * count * size, count * size):
                raise BadInput("vLLM does not keep the KV blocks of a layer together", "Write sample.engine: torch")
            flat = kv.view(each.dtype)
            # An offset is one into the storage, which is the whole device's.
            each.data = flat.as_strided(each.shape, each.stride(), flat.storage_offset() + each.storage_offset())

    def _stacks(self) -> Iterator[Tensor]:
        """Where vLLM holds the adapters that are in use, all slots of a module in one."""
        if self.spec.kind != "lora":
            return
        for module in self.runner.lora_manager._adapter_manager.modules.values():
            for stacks in (module.lora_a_stacked, module.lora_b_stacked):
                yield from (stacks,) if isinstance(stacks, Tensor) else stacks


def _use(spec: EngineSpec) -> Use:
    return Use(**{name: getattr(spec, name) for name in Use.__struct_fields__})
