"""The train engine: one gang rank of a worker group, its deployments and their calls."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Generator
from pathlib import Path

import torch
from torch import Tensor

from plexrl.engines import layout
from plexrl.engines.protocol import EngineSpec, UserError
from plexrl.engines.torch import adam, batch, files, heap
from plexrl.engines.torch.deployment import Bound, Deployment
from plexrl.engines.torch.gang import Gang
from plexrl.engines.torch.home import Home, Slots, check_size, manifest, total
from plexrl.engines.torch.lora import Adapters, Shape, initialise
from plexrl.engines.torch.microbatch import forward, in_order
from plexrl.engines.torch.model import bind
from plexrl.memory.arena import ArenaMap
from plexrl.memory.device import Device
from plexrl.memory.resident import CLEAN, DIRTY, ZERO, ResidentState
from plexrl.types import BadInput, Moved, PlexrlError, Residency, Result, Slab

PROTO = "application/x-protobuf"
JSON = "application/json"


class Trainer:
    """protocol.TrainEngine. Training state lives in manifest buckets only; nothing but activations is allocated."""

    def __init__(self, spec: EngineSpec, device: Device, arena: ArenaMap) -> None:
        """A collective of the gang. Raises BadInput for a model that this engine cannot run."""
        self._spec = spec
        self._gang = Gang(spec.rank, spec.world, spec.rendezvous, spec.interface)
        self._home = Home(spec, device, arena)
        self._gang.barrier()  # the rank that fills the base has done so
        self._deployments: dict[str, Deployment] = {}
        self._bounds: dict[tuple[int | None, Shape | None], Bound] = {}
        self._on_device = True
        self._slots = Slots(spec.lora_slots)
        self._base: ResidentState | None = None
        self._adapters: Adapters | None = None
        model, region = self._home.model, self._home.region.buffer
        if spec.kind == "lora":
            frozen = manifest({"frozen": self._home.base_specs})
            self._base = ResidentState(frozen, region, None, {"frozen": self._home.base()})
            self._base.load()
            bind(model, frozen.views(region)["frozen"])
            self._adapters = Adapters(model, self._home.arch)
        else:
            self._full = manifest(layout.state_buckets(self._home.base_specs))
            bound = Bound(self._full, region, self._home.dtype)
            bind(model, bound.views["weights"], bound.views["grads"])
            self._bounds[None, None] = bound

    # --- deployments ----------------------------------------------------------------------------------------------

    def create(
        self,
        deployment: str,
        slab: Slab,
        lora_rank: int | None,
        seed: int,
        attn: bool,
        mlp: bool,
        unembed: bool,
    ) -> None:
        """See protocol.TrainEngine."""
        if deployment in self._deployments:
            raise BadInput(f"deployment {deployment!r} exists already", "Drop it first")
        if (lora_rank is None) != (self._spec.kind == "full"):
            raise BadInput(f"LoRA rank {lora_rank} in a group of kind {self._spec.kind!r}", "Use the other kind")
        if lora_rank is None:
            if self._deployments:
                raise BadInput("a full-parameter group holds one deployment", "Give this one a group of its own")
            shape, plan, place = None, self._full, self._home.region.buffer
        else:
            shape = Shape(lora_rank, attn, mlp, unembed)
            plan, place = manifest(layout.state_buckets(self._home.adapter_specs(shape))), self._home.slot(0)
        check_size(f"deployment {deployment!r}", slab, plan.size)
        memory = self._home.arena.view(slab)
        state = ResidentState(plan, place, memory)
        host = state.host.views(memory)
        if shape is None:
            weights = plan.buckets[0]
            memory[weights.offset : weights.offset + weights.size].copy_(self._home.base())
            generator = torch.Generator().manual_seed(seed % 2**63)
        else:
            generator = initialise(host["weights"], seed)
        host["rng"]["generator"].copy_(generator.get_state())
        state.mark("weights", CLEAN)
        state.mark("rng", CLEAN)
        self._deployments[deployment] = Deployment(shape, state, memory)
        if shape is None and self._on_device:
            state.load()

    def drop(self, deployment: str) -> None:
        """See protocol.TrainEngine. What it left on the device is cleared."""
        gone = self._find(deployment)
        slot = self._slots.release(gone)
        if gone.state.residency is Residency.DEVICE:
            (self._home.region.buffer if slot is None else self._home.slot(slot)).zero_()
        del self._deployments[deployment]

    # --- calls ----------------------------------------------------------------------------------------------------

    def forward_backward(self, deployment: str, body: bytes, forward_only: bool) -> Generator[None, None, Result]:
        """See protocol.TrainEngine."""
        start, moved = time.process_time_ns(), 0
        target = self._find(deployment)
        work = batch.parse(body, self._home.vocabulary, self._spec.max_context)
        plans = batch.plan([len(d.tokens) for d in work.data], self._spec.world, self._spec.micro_batch_tokens)
        mine = plans[self._spec.rank]
        loss, bad, used = 0.0, False, time.process_time_ns() - start
        parts = [torch.empty(sum(work.data[i].targets.size for b in p for i in b)) for p in plans]
        before: Tensor | None = None
        filled = 0
        for count, members in enumerate(mine):
            if count:
                yield
            start = time.process_time_ns()
            bound, bytes_moved = self._use(target)
            moved += bytes_moved
            if count == 0 and not forward_only and target.state.state("grads") is not ZERO:
                before = bound.grads.clone()
            if members:
                data = [work.data[i] for i in members]
                value, logprobs = forward(self._home.model, work, data, not forward_only)
                parts[self._spec.rank][filled : filled + logprobs.numel()] = logprobs.detach().reshape(-1)
                filled += logprobs.numel()
                bad = bad or not math.isfinite(value.item())
                if value.requires_grad and not bad:
                    target.state.mark("grads", DIRTY)
                    value.backward()
                loss += value.item()
            used += time.process_time_ns() - start
        start = time.process_time_ns()
        if self._gang.any(bad):
            if not forward_only:
                self._undo(target, bound, before)
            raise UserError("the loss is not finite", "Check the logprobs sent, or load an earlier state")
        whole = torch.tensor([loss], dtype=torch.float64)
        self._gang.sum(whole)
        self._gang.to_root(parts)
        answer = b"" if self._spec.rank else batch.output(work, in_order(work, plans, parts), float(whole))
        used += time.process_time_ns() - start
        return Result(
            content_type=PROTO,
            body=answer,
            units=sum(len(work.data[i].tokens) for b in mine for i in b),
            cpu_us=used // 1000,
            moved_bytes=moved,
        )

    def optim_step(self, deployment: str, body: bytes) -> Result:
        """See protocol.TrainEngine. Raises UserError when gradients are not finite: they are dropped, weights stay."""
        start = time.process_time_ns()
        target = self._find(deployment)
        params = adam.parse(body)
        bound, moved = self._use(target)
        self._gang.sum(bound.grads)
        norm = bound.adam.step(params)
        if not math.isfinite(norm):
            target.clear_grads(bound)
            raise UserError("the gradients are not finite; they are dropped and nothing was changed")
        for name in ("weights", "moment1", "moment2", "steps"):
            target.state.mark(name, DIRTY)
        target.state.mark("grads", ZERO)
        answer = json.dumps({"metrics": {"grad_norm": norm}}).encode()
        return Result(
            content_type=JSON,
            body=b"" if self._spec.rank else answer,
            units=1,
            cpu_us=(time.process_time_ns() - start) // 1000,
            moved_bytes=moved,
        )

    def save(self, deployment: str, folder: Path, optimizer: bool) -> None:
        """See protocol.TrainEngine. Rank 0 writes: the replicas are equal. Gradients are not part of a saved state."""
        target = self._find(deployment)
        bound, _ = self._use(target)
        self._write(target, bound, folder, optimizer)

    def load(self, deployment: str, folder: Path, optimizer: bool) -> None:
        """See protocol.TrainEngine. Raises UserError, nothing changed, for a state of another shape."""
        target = self._find(deployment)
        if target.state.residency is Residency.HOST:
            # A deployment is made from a saved state whoever has the device just then.
            bound = target.at_home(self._home.dtype if target.shape is None else torch.float32)
        else:
            bound, _ = self._use(target)
        stored = dict(target.stored(bound, folder, optimizer))

        def check() -> None:
            for path, tensors in stored.items():
                files.check_tensors(path, tensors)

        def read() -> None:
            for path, tensors in stored.items():
                files.read_tensors(path, tensors)

        self._together(check, f"load {folder}")
        self._together(read, f"load {folder}")
        target.loaded(bound, optimizer)

    def publish(self, deployment: str, slab: Slab | None, folder: Path | None) -> None:
        """See protocol.TrainEngine. slab None: another rank of this node packs it."""
        target = self._find(deployment)
        bound, _ = self._use(target)
        if slab is not None:
            check_size(f"a version of {deployment!r}", slab, bound.weights.numel())
            self._home.arena.view(slab).copy_(bound.weights)
        if folder is not None:
            self._write(target, bound, folder, optimizer=False)

    # --- residency ------------------------------------------------------------------------------------------------

    def offload(self) -> Moved:
        """See protocol.TrainEngine."""
        states = [d.state for d in self._deployments.values() if d.state.residency is Residency.DEVICE]
        moved = [state.offload() for state in states + ([self._base] if self._base else [])]
        self._slots.clear()
        self._home.device.unmap(self._home.region)
        self._on_device = False
        heap.give_back_when_low()
        return total(moved)

    def load_device(self) -> Moved:
        """See protocol.TrainEngine. Adapters come in when they are used."""
        self._home.device.map(self._home.region)
        states = [self._base] if self._base else [d.state for d in self._deployments.values()]
        self._on_device = True
        return total(state.load() for state in states)

    def any_rank(self, flag: bool) -> bool:
        """See protocol.TrainEngine."""
        return self._gang.any(flag)

    def close(self) -> None:
        """See protocol.TrainEngine."""
        self._gang.close()

    # --- inside ---------------------------------------------------------------------------------------------------

    def _find(self, deployment: str) -> Deployment:
        if deployment not in self._deployments:
            raise BadInput(f"no deployment {deployment!r} in this worker group", "Create it first")
        return self._deployments[deployment]

    def _use(self, target: Deployment) -> tuple[Bound, int]:
        """Have the deployment on the device and the model wired to it: its tensors, and the bytes moved for that."""
        if not self._on_device:
            raise PlexrlError("the worker group is not on its device", "Load it first")
        if target.shape is None:
            return self._bounds[None, None], 0
        moved = 0
        slot = self._slots.find(target)
        if slot is None:
            slot, evicted = self._slots.claim(target)
            if evicted is not None:
                moved += evicted.state.offload().bytes_out
            target.state.rebind(self._home.slot(slot))
            moved += target.state.load().bytes_in
        key = (slot, target.shape)
        if key not in self._bounds:
            bound = self._bounds[key] = Bound(target.state.manifest, self._home.slot(slot), torch.float32)
            self._adapters.ensure(*key, bound.views["weights"], bound.views["grads"])
        self._adapters.use(*key)
        return self._bounds[key], moved

    def _undo(self, target: Deployment, bound: Bound, before: Tensor | None) -> None:
        """Gradients as they were before the call."""
        if before is None:
            target.clear_grads(bound)
        else:
            bound.grads.copy_(before)
            target.state.mark("grads", DIRTY)

    def _write(self, target: Deployment, bound: Bound, folder: Path, optimizer: bool) -> None:
        def write() -> None:
            with files.replacing(folder) as work:
                target.write(self._home, bound, work, optimizer)

        self._together(write if self._spec.rank == 0 else lambda: None, f"save to {folder}")

    def _together(self, action: Callable[[], None], what: str) -> None:
        """Do it on every rank; when it fails on one it fails on all."""
        failure: PlexrlError | None = None
        try:
            action()
        except PlexrlError as error:
            failure = error
        failed = self._gang.any(failure is not None)
        if failure is not None:
            raise failure
        if failed:
            raise PlexrlError(f"another rank could not {what}")
