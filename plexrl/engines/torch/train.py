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
from plexrl.engines.torch import adam, batch, files, saving
from plexrl.engines.torch.crossing import Tally
from plexrl.engines.torch.deployment import OPTIMIZER_FILE, Deployment
from plexrl.engines.torch.form import OPTIMIZER, Bound, Form, Whole
from plexrl.engines.torch.gang import Gang
from plexrl.engines.torch.home import Home
from plexrl.engines.torch.microbatch import in_order
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

    def __init__(
        self,
        spec: EngineSpec,
        device: Device,
        arena: ArenaMap,
        seat: Seat | None = None,
        form: Callable[[Home, Gang], Form] = Whole,
    ) -> None:
        """A collective of the gang. form: how states lie and are stepped.

        Raises BadInput for a model that this engine cannot run.
        """
        self._spec = spec
        self._gang = Gang(spec.rank, spec.world, spec.rendezvous, spec.interface)
        self._home = home = Home(spec, device, arena, seat)
        self._gang.barrier()  # the rank that fills the base has done so
        self._gang.use(home.where)
        self._form = form(home, self._gang)
        self._residence = Residence(spec, home, self._form)
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
        target, use, form = self._residence.find(deployment), self._residence.use, self._form
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
                if failure is None and form.together:
                    self._enter(target, not forward_only)
                if failure is None and not forward_only and not touched:
                    bound = use(target)
                    if target.state.state("grads") is not ZERO:
                        before = use(target, "grads").grads.clone()
                    touched = True
                if failure is None and (members or form.in_step):
                    bound = use(target)
                    data = [work.data[i] for i in members] or [batch.stub(work)]
                    value, logprobs = bound.forward(work, data, not forward_only)
                    if members:
                        parts[self._spec.rank][filled : filled + logprobs.numel()] = logprobs.detach().reshape(-1)
                        filled += logprobs.numel()
                        bad = bad or not math.isfinite(value.item())
                        loss += value.item()
                    if value.requires_grad and (form.in_step or not bad):
                        use(target, "grads")
                        target.state.mark("grads", DIRTY)
                        bound.backward(value)
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
        bound, tally = self._use(target, "weights", "grads", *self._form.optimizer)
        bound.ready()
        norm = bound.step(params, self._gang)
        if not math.isfinite(norm):
            target.clear_grads(bound)
            raise UserError("the gradients are not finite; they are dropped and nothing was changed")
        for name in ("weights", *self._form.optimizer):
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
        """See protocol.TrainEngine. Rank 0 writes. Gradients are not part of a saved state."""
        target = self._residence.find(deployment)
        bound, tally = self._use(target, "weights", *self._beside(optimizer))
        self._write(target, bound, folder, optimizer)
        return tally.moved

    def load(self, deployment: str, folder: Path, optimizer: bool) -> Moved:
        """See protocol.TrainEngine. Raises UserError, nothing changed, for a state of another shape."""
        target = self._residence.find(deployment)
        tally = Tally()
        if target.state.residency is Residency.HOST:
            # A deployment is made from a saved state whoever has the device just then.
            held = target.at_home()
        else:
            held, tally = self._use(target, "weights", *self._beside(optimizer, loading=True))
        stored = [(folder / name, pieces) for name, pieces in target.stored(held, optimizer)]
        read: set[str] = set()

        def check() -> None:
            target.check(deployment)
            for path, pieces in stored:
                spare, converts = (files.SPARE, True) if path.name == OPTIMIZER_FILE else ("", False)
                files.check_tensors(path, pieces, spare, converts)

        def fill() -> None:
            for path, pieces in stored:
                read.update(files.read_tensors(path, pieces))

        self._together(check, f"load {folder}")
        target.away()
        self._together(fill, f"load {folder}")
        target.loaded(held, optimizer, read)
        if not target.on_device:
            target.settled()
        return tally.moved

    def publish(self, deployment: str, slab: Slab | None, folder: Path | None) -> Moved:
        """See protocol.TrainEngine. slab None: another rank of this node packs it."""
        target = self._residence.find(deployment)
        bound, tally = self._use(target, "weights")
        saving.pack(self._home, self._gang, target, bound, deployment, slab)
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

    def _enter(self, target: Deployment, train: bool) -> None:
        """Have a deployment on the device of every rank, or raise on all, before they compute together."""
        parts = ("weights", "grads") if train else ("weights",)
        self._together(lambda: self._residence.use(target, *parts), "bring its state onto its device").ready()

    def _beside(self, optimizer: bool, loading: bool = False) -> tuple[str, ...]:
        """What is saved beside the weights; loading: or follows from them."""
        extra = tuple(name for name in self._form.optimizer if name not in OPTIMIZER) if loading else ()
        return (*self._form.optimizer, "rng") if optimizer else extra

    def _use(self, target: Deployment, *parts: str) -> tuple[Bound, Tally]:
        """Residence.use by all ranks, none named: all parts. It fails on all or on none. And what was moved for it."""
        self._residence.tally = tally = Tally()
        wanted = parts or ("weights", "grads", *self._form.optimizer, "rng")
        return self._together(lambda: self._residence.use(target, *wanted), "bring its state onto its device"), tally

    def _restore(self, target: Deployment, bound: Bound, before: Tensor | None) -> None:
        """Gradients as they were before the call."""
        if before is None:
            target.clear_grads(bound)
        else:
            bound.grads.copy_(before)
            target.state.mark("grads", DIRTY)

    def _write(self, target: Deployment, bound: Bound, folder: Path, optimizer: bool) -> None:
        write = saving.writer(self._home, self._gang, target, bound, folder, optimizer)
        self._together(write, f"save to {folder}")

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
