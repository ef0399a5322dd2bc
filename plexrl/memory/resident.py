"""Resident state: one deployment's buckets between its place on the device and its slab in the host arena."""

from __future__ import annotations

import time
from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING

from plexrl.memory.manifest import Manifest, check_buffer
from plexrl.types import BadInput, Moved, PlexrlError, Residency

if TYPE_CHECKING:
    from torch import Tensor


class BucketState(StrEnum):
    """CLEAN: the host copy is current. DIRTY: only the device copy is. ZERO: all bytes are zero, no copy is needed."""

    CLEAN = "clean"
    DIRTY = "dirty"
    ZERO = "zero"


CLEAN, DIRTY, ZERO = BucketState.CLEAN, BucketState.DIRTY, BucketState.ZERO

LEGAL: Mapping[Residency, frozenset[Residency]] = {
    Residency.COLD: frozenset({Residency.LOADING, Residency.HOST}),
    Residency.LOADING: frozenset({Residency.DEVICE, Residency.LOST}),
    Residency.DEVICE: frozenset({Residency.OFFLOADING, Residency.LOADING, Residency.COLD, Residency.LOST}),
    Residency.OFFLOADING: frozenset({Residency.HOST, Residency.LOST}),
    Residency.HOST: frozenset({Residency.LOADING, Residency.SPILLING, Residency.COLD, Residency.LOST}),
    Residency.SPILLING: frozenset({Residency.NVME, Residency.LOST}),
    Residency.NVME: frozenset({Residency.LOADING, Residency.HOST, Residency.COLD, Residency.LOST}),
    Residency.LOST: frozenset({Residency.COLD}),
}
"""Which residency may follow which. device -> loading is a new version of one bucket under a resident state."""


class IllegalTransition(PlexrlError):
    """A state was asked to go where it cannot go from where it is."""


def advance(now: Residency, to: Residency) -> Residency:
    """Returns `to`. Raises IllegalTransition when it may not follow `now`."""
    if to not in LEGAL[now]:
        raise IllegalTransition(f"state that is {now} cannot become {to}", f"It may become {', '.join(LEGAL[now])}")
    return to


class _Piece:
    """One bucket's two places, sliced once, so that a switch makes no tensor."""

    __slots__ = ("device", "fixed", "home", "loaded", "name", "size", "state")

    def __init__(self, name: str, size: int, home: Tensor, fixed: bool) -> None:
        self.name = name
        self.size = size
        self.home = home
        self.fixed = fixed
        self.state = CLEAN if fixed else ZERO
        self.loaded = False
        self.device: Tensor


class ResidentState:
    """A deployment's tensors, on the device or in the host arena. Starts on the host with every own bucket ZERO.

    manifest: the layout on the device, relative to region_slice.
    region_slice: uint8, 1-D, at least manifest.end bytes of a mapped region.
    slab_view: uint8, 1-D, the buckets that have no other source, laid out as `host` (= manifest.without(sources));
        None when every bucket has one.
    sources: bucket -> uint8 host tensor of exactly the bucket's bytes, elsewhere than in the own slab (a shared base, a
        published version). Such a bucket is always CLEAN: it is copied in and never out.

    Raises BadInput when a buffer is too small or misaligned. After an error in a copy the state is LOST.
    """

    def __init__(
        self,
        manifest: Manifest,
        region_slice: Tensor,
        slab_view: Tensor | None,
        sources: Mapping[str, Tensor] | None = None,
    ) -> None:
        sources = dict(sources or {})
        self.manifest = manifest
        self.host = manifest.without(*sources)
        self.residency = Residency.HOST
        unknown = sources.keys() - {bucket.name for bucket in manifest.buckets}
        if unknown:
            raise BadInput(
                f"sources for buckets that the manifest lacks: {', '.join(sorted(unknown))}", "Leave them out"
            )
        if self.host.size:
            if slab_view is None:
                raise BadInput("a state with buckets of its own has no slab", f"Allocate {self.host.size} bytes")
            check_buffer(slab_view, self.host.size, "the slab of a state")
        homes = {b.name: slab_view[b.offset : b.offset + b.size] for b in self.host.buckets if b.size}
        self._pieces: dict[str, _Piece] = {}
        for bucket in manifest.buckets:
            if bucket.size:
                fixed = bucket.name in sources
                home = _checked(bucket.name, bucket.size, sources[bucket.name]) if fixed else homes[bucket.name]
                self._pieces[bucket.name] = _Piece(bucket.name, bucket.size, home, fixed)
        self._place(region_slice)

    def state(self, bucket: str) -> BucketState:
        """CLEAN, DIRTY or ZERO."""
        return self._piece(bucket).state

    def mark(self, bucket: str, state: BucketState) -> None:
        """Tell what was done to a bucket's bytes.

        On the device: DIRTY (written) or ZERO (zeroed in place). On the host: CLEAN (its bytes were written into the
        slab) or ZERO. Anything else would lose bytes and raises BadInput, as does a bucket with another source.
        """
        piece = self._piece(bucket)
        allowed = (DIRTY, ZERO) if self.residency is Residency.DEVICE else (CLEAN, ZERO)
        if piece.fixed or state not in allowed:
            what = "has a shared source" if piece.fixed else f"is {self.residency}"
            raise BadInput(f"bucket {bucket!r} {what} and cannot be marked {state}", "Mark what was really written")
        piece.state = state

    def repoint(self, bucket: str, source: Tensor) -> None:
        """Give a bucket with another source a new one (the next published version); the next `load` copies it."""
        piece = self._piece(bucket)
        if not piece.fixed:
            raise BadInput(f"bucket {bucket!r} lives in the own slab", "Write to the slab instead")
        piece.home = _checked(bucket, piece.size, source)
        piece.loaded = False

    def rebind(self, region_slice: Tensor) -> None:
        """Choose another place on the device (another adapter slot) for the next `load`. Only while on the host."""
        if self.residency is not Residency.HOST:
            raise IllegalTransition(f"state that is {self.residency} cannot get another place", "Offload it first")
        self._place(region_slice)

    def load(self) -> Moved:
        """Copy to the device what is not there; zero buckets are zero-filled, not copied. Writes every bucket's bytes.

        On the device already: copies only buckets that were repointed. bytes_in counts copied bytes.
        """
        start = time.perf_counter()
        self.residency = advance(self.residency, Residency.LOADING)
        moved = 0
        try:
            for piece in self._pieces.values():
                if piece.loaded:
                    continue
                if piece.state is ZERO:
                    piece.device.zero_()
                else:
                    piece.device.copy_(piece.home)
                    moved += piece.size
                piece.loaded = True
        except BaseException:
            self.residency = Residency.LOST
            raise
        self.residency = Residency.DEVICE
        return Moved(bytes_in=moved, seconds=time.perf_counter() - start)

    def offload(self) -> Moved:
        """Copy DIRTY buckets to the slab, forget the rest; after it the region's bytes are free for others.

        bytes_out counts copied bytes, bytes_clean those that needed no copy because the host has them.
        """
        start = time.perf_counter()
        self.residency = advance(self.residency, Residency.OFFLOADING)
        moved = clean = 0
        try:
            for piece in self._pieces.values():
                if piece.state is DIRTY:
                    piece.home.copy_(piece.device)
                    piece.state = CLEAN
                    moved += piece.size
                elif piece.state is CLEAN:
                    clean += piece.size
                piece.loaded = False
        except BaseException:
            self.residency = Residency.LOST
            raise
        self.residency = Residency.HOST
        return Moved(bytes_out=moved, bytes_clean=clean, seconds=time.perf_counter() - start)

    def _place(self, region_slice: Tensor) -> None:
        check_buffer(region_slice, self.manifest.end, "the device place of a state")
        for bucket in self.manifest.buckets:
            if bucket.size:
                self._pieces[bucket.name].device = region_slice[bucket.offset : bucket.offset + bucket.size]

    def _piece(self, bucket: str) -> _Piece:
        try:
            return self._pieces[bucket]
        except KeyError:
            raise BadInput(f"no bucket {bucket!r} with bytes", f"There are {', '.join(self._pieces)}") from None


def _checked(bucket: str, size: int, source: Tensor) -> Tensor:
    check_buffer(source, size, f"the source of bucket {bucket!r}")
    if source.numel() != size:
        raise BadInput(f"the source of bucket {bucket!r} has {source.numel()} bytes", f"Slice exactly {size}")
    return source
