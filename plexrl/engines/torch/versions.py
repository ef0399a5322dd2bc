"""The published versions that a sampler draws by, and which of them is on the device."""

from __future__ import annotations

from torch import Tensor

from plexrl.engines import layout
from plexrl.engines.torch.crossing import StatePart, Tally, insist
from plexrl.engines.torch.home import Home, Slots, check_size, manifest, slices
from plexrl.engines.torch.lora import Adapters, Shape
from plexrl.engines.torch.model import bind
from plexrl.engines.torch.stages import Stages, upto
from plexrl.memory.resident import ResidentState
from plexrl.types import BadInput, Slab


class _Version:
    """shape: of an adapter; None for full parameters or the base. source: the weights' bytes in the arena's slab."""

    def __init__(
        self, source: Tensor, shape: Shape | None = None, state: ResidentState | None = None, slab: Slab | None = None
    ) -> None:
        self.source = source
        self.slab = slab
        self.shape = shape
        self.state = state


class Versions:
    """Versions by name; None is the base. Adapters share the device slots, full versions the place of the model.

    tally: what is moved from now on beside whole switches. built: the first copy of the model to the device.
    """

    def __init__(self, home: Home) -> None:
        """The base is on the device afterwards, and the model's parameters are there."""
        self.tally = Tally()
        self._home = home
        self._full = home.spec.kind == "full"
        self._base = home.base()
        self._plan = manifest(layout.staged(home.arch, home.base_specs, "weights"))
        self._stages_of = tuple(bucket.name for bucket in self._plan.buckets)
        place = home.model_place()
        self._state = home.resident(self._plan, place, None, slices(self._plan, self._base), home.model_at)
        self.built = self._state.load(seat=home.seat)
        bind(home.model, {name: t for views in self._plan.views(place).values() for name, t in views.items()})
        self._stages = Stages(home.model, home.arch, self._bring)
        self._known: dict[str, _Version] = {}
        self._adapters = Adapters(home.model, home.arch)
        self._slots = Slots(home.spec.lora_slots)
        self._loaded: str | None = None  # kind full: whose weights are in the model's place

    def attach(self, version: str, slab: Slab | None, shape: Shape | None) -> None:
        """slab None: the base under another name. Raises BadInput for a slab or shape that is not this group's."""
        if version in self._known:
            return
        if slab is None:
            self._known[version] = _Version(self._base)
            return
        if (shape is None) != self._full:
            raise BadInput(
                f"version {version!r} is {'full parameters' if shape is None else 'an adapter'} in a group of kind "
                f"{self._home.spec.kind!r}",
                "Use a group of the other kind",
            )
        source = self._home.arena.view(slab, readonly=True)
        if shape is None:
            check_size(f"version {version!r}", slab, self._base.numel())
            self._known[version] = _Version(source, slab=slab)
            return
        plan = manifest({"weights": self._home.adapter_specs(shape)})
        check_size(f"version {version!r}", slab, plan.size)
        state = self._home.resident(plan, self._home.slot(0), None, {"weights": source})
        self._known[version] = _Version(source, shape, state, slab)

    def detach(self, version: str, on_device: bool) -> None:
        """Forget a version; what is left of it on the device is cleared."""
        gone = self._known.pop(version, None)
        if gone is None:
            return
        slot = self._slots.release(gone)
        if slot is not None and on_device:
            self._home.slot(slot).zero_()
        if self._loaded == version:
            self._point(self._base)
            self._loaded = None
        if gone.slab is not None:
            self._home.arena.drop(gone.slab, readonly=True)

    def check(self, version: str | None) -> None:
        """Raises BadInput for a version that is not attached."""
        if version is not None and version not in self._known:
            raise BadInput(f"version {version!r} is not attached", "Attach it first")

    def joins(self, version: str | None) -> bool:
        """Whether it can be drawn from beside what is drawn from now."""
        return not self._full or version == self._loaded

    def wire(self, version: str | None) -> None:
        """Have the version's weights on the device and the model on them."""
        known = None if version is None else self._known[version]
        if self._full:
            if version != self._loaded:
                self._point(self._base if known is None else known.source)
                self._loaded = version
            return
        if known is None or known.shape is None:
            self._adapters.use(None)
            return
        slot = self._slots.find(known)
        if slot is None:
            slot, evicted = self._slots.claim(known)
            if evicted is not None:
                evicted.state.offload()
            place = self._home.slot(slot)
            known.state.rebind(place, self._home.slot_at(slot))
            self.tally.add(known.state.load((), self._home.seat))
            self._adapters.ensure(slot, known.shape, known.state.manifest.views(place)["weights"])
        self._pull(known.state, ["weights"])
        self._adapters.use(slot, known.shape)

    def parts(self) -> list[StatePart]:
        """What leaves now, or comes: adapters in slots, then the model, whose first layer is what must come at once."""
        slots = [StatePart(version.state, ("weights",)) for version in self._slots.held()]
        return [*slots, StatePart(self._state, upto(self._stages_of, 1))]

    def left(self) -> None:
        """All has left the device: adapters come again when they are used."""
        self._slots.clear()

    def expect(self) -> None:
        """Whatever of the model is not on the device comes as its layers run."""
        self._stages.expect()

    def _point(self, source: Tensor) -> None:
        """The model's place is to hold other weights; they come as the layers run."""
        for bucket, memory in slices(self._plan, source).items():
            self._state.repoint(bucket, memory)
        self._stages.expect()

    def _bring(self, stage: int) -> None:
        self._pull(self._state, upto(self._stages_of, stage))

    def _pull(self, state: ResidentState, buckets: list[str]) -> None:
        self.tally.add(insist(lambda: state.pull(*buckets, seat=self._home.seat)))
