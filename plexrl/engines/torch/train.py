"""The train engine: one gang rank of a worker group, its deployments and their calls."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from plexrl.engines.protocol import EngineSpec, UserError
from plexrl.engines.torch import adam, batch, files
from plexrl.engines.torch.crossing import Tally
from plexrl.engines.torch.deployment import OPTIMIZER, Bound, Deployment
from plexrl.engines.torch.gang import Gang
from plexrl.engines.torch.home import Home, check_size
from plexrl.engines.torch.microbatch import forward, in_order
from plexrl.engines.torch.residence import Residence
from plexrl.memory.arena import ArenaMap
from plexrl.memory.device import Device
from plexrl.memory.gate import Seat
from plexrl.memory.resident import DIRTY, ZERO
from plexrl.types import Moved, PlexrlError, Residency, Result, Slab

PROTO = "application/x-protobuf"
JSON = "application/json"
T = TypeVar("T")


class Trainer:
    """protocol.TrainEngine. Training state lives in manifest buckets only; nothing but activations is allocated."""

    def __init__(self, spec: EngineSpec, device: Device, arena: ArenaMap, seat: Seat | None = None) -> None:
        """A collective of the gang. Raises BadInput for a model that this engine cannot run."""
        self._spec = spec
        self._gang = Gang(spec.rank, spec.world, spec.rendezvous, spec.interface)
        self._home = home = Home(spec, device, arena, seat)
        self._gang.barrier()  # the rank that fills the base has done so
        self._gang.use(home.where)
        self._residence = Residence(spec, home)
        self._deployments = self._residence.deployments

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
        adopt: bool = False,
    ) -> None:
        """See protocol.TrainEngine."""
        self._residence.create(deployment, slab, lora_rank, seed, attn, mlp, unembed, adopt)

    def drop(self, deployment: str) -> None:
        """See protocol.TrainEngine. What it left on the device is cleared."""
        self._residence.drop(deployment)

    # --- calls ----------------------------------------------------------------------------------------------------

    def forward_backward(self, deployment: str, body: bytes, forward_only: bool) -> Generator[None, None, Result]:
        """See protocol.TrainEngine. Raises PlexrlError, gradients as before, when a rank's state does not come in."""
        start, tally = time.process_time_ns(), Tally()
        target, use = self._residence.find(deployment), self._residence.use
        work = batch.parse(body, self._home.vocabulary, self._spec.max_context)
        plans = batch.plan([len(d.tokens) for d in work.data], self._spec.world, self._spec.micro_batch_tokens)
        mine = plans[self._spec.rank]
        loss, bad, used = 0.0, False, time.process_time_ns() - start
        parts = [torch.empty(sum(work.data[i].targets.size for b in p for i in b)) for p in plans]
        target.half_done = not forward_only
        failure: PlexrlError | None = None
        before: Tensor | None = None
        touched = False
        filled = 0
        for count, members in enumerate(mine):
            if count:
                yield
            start, self._residence.tally = time.process_time_ns(), tally
            try:
                if failure is None and not forward_only and not touched:
                    bound = use(target)
                    if target.state.state("grads") is not ZERO:
                        before = use(target, "grads").grads.clone()
                    touched = True
                if failure is None and members:
                    use(target)
                    data = [work.data[i] for i in members]
                    value, logprobs = forward(self._home.model, work, data, not forward_only)
                    parts[self._spec.rank][filled : filled + logprobs.numel()] = logprobs.detach().reshape(-1)
                    filled += logprobs.numel()
                    bad = bad or not math.isfinite(value.item())
                    if value.requires_grad and not bad:
                        use(target, "grads")
                        target.state.mark("grads", DIRTY)
                        value.backward()
                    loss += value.item()
            except PlexrlError as error:
                failure = error  # the other ranks are told when all are through
            used += time.process_time_ns() - start
        target.half_done = False
        start = time.process_time_ns()
        whole = torch.tensor([loss, bad, failure is not None], dtype=torch.float64)
        self._gang.sum(whole)
        if touched and whole[1:].any():
            self._restore(target, bound, before)
        if failure is not None:
            raise failure
        if whole[2]:
            raise PlexrlError("another rank could not bring its state onto its device", "Send the call again")
        if whole[1]:
            raise UserError("the loss is not finite", "Check the logprobs sent, or load an earlier state")
        self._gang.to_root(parts)
        answer = b"" if self._spec.rank else batch.output(work, in_order(work, plans, parts), float(whole[0]))
        used += time.process_time_ns() - start
        return Result(
            content_type=PROTO,
            body=answer,
            units=sum(len(work.data[i].tokens) for b in mine for i in b),
            cpu_us=used // 1000,
            moved_bytes=tally.bytes,
            moved_us=tally.us,
        )

    def optim_step(self, deployment: str, body: bytes) -> Result:
        """See protocol.TrainEngine. Raises UserError when gradients are not finite: they are dropped, weights stay."""
        start = time.process_time_ns()
        target = self._residence.find(deployment)
        params = adam.parse(body)
        bound, tally = self._use(target, "weights", "grads", *OPTIMIZER)
        self._gang.sum(bound.grads)
        norm = bound.adam.step(params)
        if not math.isfinite(norm):
            target.clear_grads(bound)
            raise UserError("the gradients are not finite; they are dropped and nothing was changed")
        for name in ("weights", *OPTIMIZER):
            target.mark(name, DIRTY)
        target.state.mark("grads", ZERO)
        answer = json.dumps({"metrics": {"grad_norm": norm}}).encode()
        return Result(
            content_type=JSON,
            body=b"" if self._spec.rank else answer,
            units=1,
            cpu_us=(time.process_time_ns() - start) // 1000,
            moved_bytes=tally.bytes,
            moved_us=tally.us,
        )

    def save(self, deployment: str, folder: Path, optimizer: bool) -> Moved:
        """See protocol.TrainEngine. Rank 0 writes: the replicas are equal. Gradients are not part of a saved state."""
        target = self._residence.find(deployment)
        bound, tally = self._use(target, "weights", *((*OPTIMIZER, "rng") if optimizer else ()))
        self._write(target, bound, folder, optimizer)
        return tally.moved

    def load(self, deployment: str, folder: Path, optimizer: bool) -> Moved:
        """See protocol.TrainEngine. Raises UserError, nothing changed, for a state of another shape."""
        target = self._residence.find(deployment)
        tally = Tally()
        if target.state.residency is Residency.HOST:
            # A deployment is made from a saved state whoever has the device just then.
            bound = target.at_home(self._home.dtype if target.shape is None else torch.float32)
        else:
            bound, tally = self._use(target, "weights", *((*OPTIMIZER, "rng") if optimizer else ()))
        stored = dict(target.stored(bound, folder, optimizer))

        def check() -> None:
            target.check(deployment)
            for path, tensors in stored.items():
                files.check_tensors(path, tensors)

        def read() -> None:
            for path, tensors in stored.items():
                files.read_tensors(path, tensors)

        self._together(check, f"load {folder}")
        target.away()
        self._together(read, f"load {folder}")
        target.loaded(bound, optimizer)
        if not target.on_device:
            target.settled()
        return tally.moved

    def publish(self, deployment: str, slab: Slab | None, folder: Path | None) -> Moved:
        """See protocol.TrainEngine. slab None: another rank of this node packs it."""
        target = self._residence.find(deployment)
        bound, tally = self._use(target, "weights")
        if slab is not None:
            check_size(f"a version of {deployment!r}", slab, bound.weights.numel())
            self._home.arena.view(slab).copy_(bound.weights)
            self._home.arena.drop(slab, readonly=False)
        if folder is not None:
            self._write(target, bound, folder, optimizer=False)
        return tally.moved

    # --- residency ------------------------------------------------------------------------------------------------

    def offload(self) -> Moved:
        """See protocol.TrainEngine."""
        return self._residence.offload()

    def load_device(self) -> Moved:
        """See protocol.TrainEngine."""
        return self._residence.load_device()

    def undo(self) -> Moved:
        """See protocol.TrainEngine."""
        return self._residence.undo()

    def spill(self, deployment: str) -> None:
        """See protocol.TrainEngine."""
        self._residence.spill(deployment)

    def rehome(self, deployment: str, slab: Slab) -> None:
        """See protocol.TrainEngine."""
        self._residence.rehome(deployment, slab)

    def any_rank(self, flag: bool) -> bool:
        """See protocol.TrainEngine."""
        return self._gang.any(flag)

    def close(self) -> None:
        """See protocol.TrainEngine."""
        self._gang.close()

    # --- inside ---------------------------------------------------------------------------------------------------

    def _use(self, target: Deployment, *parts: str) -> tuple[Bound, Tally]:
        """Residence.use by all ranks, none named: all parts. It fails on all or on none. And what was moved for it."""
        self._residence.tally = tally = Tally()
        wanted = parts or ("weights", "grads", *OPTIMIZER, "rng")
        return self._together(lambda: self._residence.use(target, *wanted), "bring its state onto its device"), tally

    def _restore(self, target: Deployment, bound: Bound, before: Tensor | None) -> None:
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

    def _together(self, action: Callable[[], T], what: str) -> T:
        """Do it on every rank; when it fails on one it fails on all."""
        failure: PlexrlError | None = None
        done = None
        try:
            done = action()
        except PlexrlError as error:
            failure = error
        failed = self._gang.any(failure is not None)
        if failure is not None:
            raise failure
        if failed:
            raise PlexrlError(f"another rank could not {what}")
        return done
