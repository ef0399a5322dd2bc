"""What of a trainer's state is on its device: the model, adapters in their slots, and how they come and go."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from plexrl.engines import layout
from plexrl.engines.protocol import EngineSpec
from plexrl.engines.torch import heap
from plexrl.engines.torch.crossing import Crossing, StatePart, Tally, insist
from plexrl.engines.torch.deployment import Deployment
from plexrl.engines.torch.form import OPTIMIZER, Bound, Form, weight_buckets
from plexrl.engines.torch.home import Home, Slots, check_size, manifest, slices
from plexrl.engines.torch.lora import Adapters, Shape, initialise
from plexrl.engines.torch.model import bind
from plexrl.engines.torch.stages import Stages, upto
from plexrl.memory.gate import Seat
from plexrl.memory.resident import CLEAN, ResidentState
from plexrl.types import BadInput, Moved, PlexrlError, Slab


class DeploymentPart(StatePart):
    """A deployment's state, whose slab says at all times whether it is whole there."""

    def __init__(self, deployment: Deployment, first: Collection[str]) -> None:
        super().__init__(deployment.state, first)
        self._deployment = deployment

    def leave(self, seat: Seat | None) -> Moved:
        """See Part."""
        moved = super().leave(seat)
        self._deployment.settled()
        return moved

    def come(self, seat: Seat | None) -> Moved:
        """See Part."""
        self._deployment.away()
        return super().come(seat)

    def back(self, seat: Seat | None) -> Moved:
        """See Part."""
        self._deployment.away()
        return super().back(seat)

    def away(self) -> None:
        """See Part."""
        super().away()
        self._deployment.settled()


class Residence:
    """One rank's deployments and the device. tally: what is moved from now on beside whole switches."""

    def __init__(self, spec: EngineSpec, home: Home, form: Form) -> None:
        """The frozen base, if there is one, is on the device afterwards."""
        self.deployments: dict[str, Deployment] = {}
        self.tally = Tally()
        self._spec = spec
        self._home = home
        self._form = form
        self._crossing = Crossing(home.device, home.region, home.seat)
        self._bounds: dict[tuple[int | None, Shape | None], Bound] = {}
        self._slots = Slots(spec.lora_slots)
        self._base: ResidentState | None = None
        self._adapters: Adapters | None = None
        place = home.model_place()
        if spec.kind == "lora":
            parts = layout.staged(home.arch, home.base_specs, "frozen")
            frozen = manifest(parts)
            self._base = home.resident(frozen, place, None, slices(frozen, home.base()), home.model_at)
            self._base.load(seat=home.seat)
            bind(home.model, {name: t for views in frozen.views(place).values() for name, t in views.items()})
            self._adapters = Adapters(home.model, home.arch)
        else:
            buckets = form.buckets(home.base_specs, layout.staged(home.arch, home.base_specs, "weights"))
            self._full = manifest(buckets)
            parts = weight_buckets(self._full)
            self._bounds[None, None] = form.on_device(self._full, place, None, None, None)
        self._parts = tuple(parts)
        self._stages = Stages(home.model, home.arch, self._bring)

    # --- deployments ----------------------------------------------------------------------------------------------

    def find(self, deployment: str) -> Deployment:
        """Raises BadInput for an unknown one."""
        if deployment not in self.deployments:
            raise BadInput(f"no deployment {deployment!r} in this worker group", "Create it first")
        return self.deployments[deployment]

    def create(
        self,
        deployment: str,
        slab: Slab,
        lora_rank: int | None,
        seed: int,
        attn: bool,
        mlp: bool,
        unembed: bool,
        adopt: bool,
    ) -> None:
        """See protocol.TrainEngine. Weights come onto the device when they are used."""
        home = self._home
        if deployment in self.deployments:
            raise BadInput(f"deployment {deployment!r} exists already", "Drop it first")
        if (lora_rank is None) != (self._spec.kind == "full"):
            raise BadInput(f"LoRA rank {lora_rank} in a group of kind {self._spec.kind!r}", "Use the other kind")
        if lora_rank is None:
            if self.deployments:
                raise BadInput("a full-parameter group holds one deployment", "Give this one a group of its own")
            shape, plan, place = None, self._full, home.model_place()
        else:
            shape = Shape(lora_rank, attn, mlp, unembed)
            plan, place = manifest(self._form.buckets(home.adapter_specs(shape), None)), home.slot(0)
        check_size(f"deployment {deployment!r}", slab, plan.size)
        memory = home.arena.view(slab)
        state = home.resident(plan, place, memory, at=home.model_at if shape is None else home.slot_at(0))
        made = Deployment(self._form, shape, state, memory, slab)
        if adopt:
            made.adopt()
        else:
            self._initialise(made, state.host.views(memory)["rng"]["generator"], seed)
            made.settled()
        self.deployments[deployment] = made
        if shape is None and self._crossing.on_device:
            made.away()
            state.load((), home.seat)
            self._stages.expect()

    def drop(self, deployment: str) -> None:
        """See protocol.TrainEngine. What it left on the device is cleared."""
        gone = self.find(deployment)
        home = self._home
        slot = self._slots.release(gone)
        if gone.on_device:
            place = home.model_place() if slot is None else home.slot(slot)
            for name, memory in slices(gone.state.manifest, place).items():
                if gone.state.present(name):
                    memory.zero_()
        del self.deployments[deployment]
        home.arena.drop(gone.slab)

    # --- residency ------------------------------------------------------------------------------------------------

    def use(self, target: Deployment, *parts: str) -> Bound:
        """Have these parts of the deployment on the device, and the model wired to it: its tensors.

        An adapter's weights always are; those of the model come by themselves as its layers run.
        """
        if not self._crossing.on_device:
            raise PlexrlError("the worker group is not on its device", "Load it first")
        if target.shape is None:
            if parts:
                # In ascending order through the gate: the weights are before the rest.
                self._stages.rest()
                self._pull(target.state, target.buckets(*parts))
            return self._bounds[None, None]
        slot = self._slots.find(target)
        if slot is None:
            target.check(self._name(target))
            slot, evicted = self._slots.claim(target)
            if evicted is not None:
                self.tally.add(evicted.state.offload())
                evicted.settled()
            target.away()
            target.state.rebind(self._home.slot(slot), self._home.slot_at(slot))
            self.tally.add(target.state.load((), self._home.seat))
        self._pull(target.state, target.buckets("weights", *parts))
        key = (slot, target.shape)
        if key not in self._bounds:
            place = self._home.slot(slot)
            self._bounds[key] = self._form.on_device(target.state.manifest, place, target.shape, slot, self._adapters)
        self._adapters.use(*key)
        return self._bounds[key]

    def offload(self) -> Moved:
        """See protocol.TrainEngine."""
        self._crossing.forget()
        moved = self._crossing.leave(self._moving())
        self._slots.clear()
        heap.give_back_when_low()
        return moved

    def load_device(self) -> Moved:
        """See protocol.TrainEngine. Adapters come in when they are used."""
        self._crossing.forget()
        if self._spec.kind == "full":
            for name, deployment in self.deployments.items():
                deployment.check(name)
        self._stages.expect()
        return self._crossing.come(self._moving())

    def undo(self) -> Moved:
        """See protocol.TrainEngine."""
        self._stages.expect()
        return self.load_device() if self._crossing.left else self._crossing.undo()

    def spill(self, deployment: str) -> None:
        """See protocol.TrainEngine."""
        target = self.find(deployment)
        target.spill(deployment)
        self._home.arena.drop(target.slab)

    def rehome(self, deployment: str, slab: Slab) -> None:
        """See protocol.TrainEngine."""
        target = self.find(deployment)
        check_size(f"deployment {deployment!r}", slab, target.slab.size)
        target.rehome(self._home.arena.view(slab), slab)

    # --- inside ---------------------------------------------------------------------------------------------------

    def _initialise(self, made: Deployment, rng: Tensor, seed: int) -> None:
        """An adapter as peft begins, full parameters as the base."""
        held = made.at_home()
        pieces = held.pieces("weights")
        if made.shape is None:
            generator = torch.Generator().manual_seed(seed % 2**63)
            base = manifest({"frozen": self._home.base_specs}).views(self._home.base())["frozen"]
            for name, piece in pieces.items():
                piece.take(base[name])
        else:
            generator = initialise(pieces, seed)
        rng.copy_(generator.get_state())
        held.renew(set())
        made.mark("weights", CLEAN)
        for name in made.form.optimizer:
            if name not in OPTIMIZER:
                made.mark(name, CLEAN)
        made.mark("rng", CLEAN)

    def _moving(self) -> list[StatePart]:
        """What leaves now, or comes: adapters in slots, then the model, whose first layer is what must come at once."""
        parts = [DeploymentPart(owner, owner.buckets("weights")) for owner in self._slots.held()]
        first = upto(self._parts, 1)
        if self._base is not None:
            return [*parts, StatePart(self._base, first)]
        return [DeploymentPart(deployment, first) for deployment in self.deployments.values()]

    def _bring(self, stage: int) -> None:
        """Have the model's parameters on the device up to this stage."""
        names = upto(self._parts, stage)
        states = [self._base] if self._base else [d.state for d in self.deployments.values()]
        for state in states:
            self._pull(state, names)

    def _pull(self, state: ResidentState, buckets: list[str]) -> None:
        self.tally.add(insist(lambda: state.pull(*buckets, seat=self._home.seat)))

    def _name(self, target: Deployment) -> str:
        return next(name for name, deployment in self.deployments.items() if deployment is target)
