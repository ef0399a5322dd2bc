"""Resident state: one deployment's buckets between its place on the device and its slab in the host arena."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from plexrl.memory.carry import Carrier
from plexrl.memory.gate import LEAVING
from plexrl.memory.manifest import Manifest, check_buffer
from plexrl.memory.piece import CLEAN, DIRTY, ZERO, BucketState, Piece
from plexrl.memory.residency import LEGAL, IllegalTransition, advance
from plexrl.memory.transfer import CHUNK, Memcpy, Mover
from plexrl.types import BadInput, Moved, Residency

if TYPE_CHECKING:
    from torch import Tensor

    from plexrl.memory.gate import Seat

__all__ = ["CLEAN", "DIRTY", "LEGAL", "ZERO", "BucketState", "IllegalTransition", "ResidentState", "advance"]


class ResidentState:
    """A deployment's tensors, on the device or in the host arena. Starts on the host with every own bucket ZERO.

    manifest: the layout on the device, relative to region_slice.
    region_slice: uint8, 1-D, at least manifest.end bytes of a mapped region.
    slab_view: uint8, 1-D, the buckets that have no other source, laid out as `host` (= manifest.without(sources));
        None when every bucket has one.
    sources: bucket -> uint8 host tensor of exactly the bucket's bytes, elsewhere than in the own slab (a shared base, a
        published version). Such a bucket is always CLEAN: it is copied in and never out.
    at: where region_slice begins in the extent of the seat that the verbs are given, in bytes.
    mover: what copies. chunk: bytes, a multiple of 64; CHUNK is the measured choice.

    The seat is the caller's: it tells it `come` before a load and `held` when all its states are loaded (or later, when
    the last bucket was pulled), `leave` before an offload and `gone` after it, `gone` after an undone load and `held`
    after an undone offload. The verbs here wait for the bytes that they write and release those that they have left,
    in ascending device offset: with several states on one seat, call them in the order of their places, and `undo`
    in the reverse order.

    A copy that raises in `load` or `offload` leaves the state LOADING or OFFLOADING until `undo` mends it; only when
    that raises too the state is LOST. Raises BadInput when a buffer is too small or misaligned.
    """

    def __init__(
        self,
        manifest: Manifest,
        region_slice: Tensor,
        slab_view: Tensor | None,
        sources: Mapping[str, Tensor] | None = None,
        *,
        at: int = 0,
        mover: Mover | None = None,
        chunk: int = CHUNK,
    ) -> None:
        sources = dict(sources or {})
        self.manifest = manifest
        self.host = manifest.without(*sources)
        self.residency = Residency.HOST
        self._carrier = Carrier(mover or Memcpy())
        # What the last load or offload started from; None when that cannot be taken back any more.
        self._before: Residency | None = None
        unknown = sources.keys() - {bucket.name for bucket in manifest.buckets}
        if unknown:
            raise BadInput(
                f"sources for buckets that the manifest lacks: {', '.join(sorted(unknown))}", "Leave them out"
            )
        self._pieces = {
            b.name: Piece(b.name, b.offset, b.size, b.name in sources, chunk) for b in manifest.buckets if b.size
        }
        self._settle(slab_view)
        for name, source in sources.items():
            if name in self._pieces:
                self._pieces[name].settle(source)
        self._place(region_slice, at)

    def state(self, bucket: str) -> BucketState:
        """CLEAN, DIRTY or ZERO."""
        return self._piece(bucket).state

    def present(self, bucket: str) -> bool:
        """Whether all of the bucket's bytes are on the device."""
        return self._piece(bucket).present

    def mark(self, bucket: str, state: BucketState) -> None:
        """Tell what was done to a bucket's bytes.

        On the device: DIRTY (written) or ZERO (zeroed in place). On the host: CLEAN (its bytes were written into the
        slab) or ZERO. Anything else would lose bytes and raises BadInput, as does a bucket with another source, and
        DIRTY for a bucket that is not present: pull it before writing, even all of it, for its bytes of the device
        may still be another's. ZERO for one that is not present makes the next pull fill it with zeros.
        """
        piece = self._piece(bucket)
        allowed: tuple[BucketState, ...] = ()
        if self.residency is Residency.DEVICE:
            allowed = (DIRTY, ZERO) if piece.present else (ZERO,)
        elif self.residency is Residency.HOST:
            allowed = (CLEAN, ZERO)
        if piece.fixed or state not in allowed:
            what = "has a shared source" if piece.fixed else f"is {'not ' * (DIRTY not in allowed)}on the device"
            raise BadInput(
                f"bucket {bucket!r} {what} ({self.residency}) and cannot be marked {state}", "Mark what was written"
            )
        piece.state = state
        self._before = None

    def repoint(self, bucket: str, source: Tensor) -> None:
        """Give a bucket with another source a new one (the next published version); the next `load` copies it."""
        piece = self._piece(bucket)
        if not piece.fixed:
            raise BadInput(f"bucket {bucket!r} lives in the own slab", "Write to the slab instead")
        piece.settle(source)
        piece.ready = 0
        self._before = None

    def rebind(self, region_slice: Tensor, at: int = 0) -> None:
        """Choose another place on the device (another adapter slot) for the next `load`. Only while off the device."""
        if self.residency not in (Residency.HOST, Residency.NVME):
            raise IllegalTransition(f"state that is {self.residency} cannot get another place", "Offload it first")
        self._place(region_slice, at)
        self._before = None

    def rehome(self, slab_view: Tensor | None) -> None:
        """The own slab is elsewhere now (HOST again), or nowhere because it is spilled (None: NVME).

        Raises IllegalTransition unless HOST or NVME, BadInput for a slab that is too small or misaligned.
        """
        if self.residency not in (Residency.HOST, Residency.NVME):
            raise IllegalTransition(f"state that is {self.residency} keeps its slab", "Offload it first")
        if slab_view is None:
            if self.residency is Residency.HOST:
                self.residency = advance(self.residency, Residency.SPILLING)
                self.residency = advance(self.residency, Residency.NVME)
            for piece in self._pieces.values():
                if not piece.fixed:
                    piece.settle(None)
        else:
            self._settle(slab_view)
            self.residency = Residency.HOST
        self._before = None

    def load(self, upto: Collection[str] | None = None, seat: Seat | None = None) -> Moved:
        """Be on the device: have the buckets named there (None: all), zero ones zero-filled; `pull` brings the rest.

        seat: each chunk waits at the gate first. On the device already: brings only what is not there (what was
        repointed). bytes_in counts copied bytes. Raises what the gate and the copy raise; then `undo`.
        """
        start = time.perf_counter()
        pieces = self._pieces.values() if upto is None else self._named(upto)
        before, self.residency = self.residency, advance(self.residency, Residency.LOADING)
        self._before = before
        moved, waited = self._carrier.bring(pieces, seat)
        self.residency = Residency.DEVICE
        return Moved(bytes_in=moved, seconds=time.perf_counter() - start, waited_s=waited)

    def pull(self, *buckets: str, seat: Seat | None = None) -> Moved:
        """Have these buckets on the device now. No time for those that are; what fails leaves them as they were.

        Raises IllegalTransition unless DEVICE, and what the gate and the copy raise.
        """
        start = time.perf_counter()
        if self.residency is not Residency.DEVICE:
            raise IllegalTransition(f"nothing is pulled into state that is {self.residency}", "Load it first")
        pieces = [piece for piece in self._named(buckets) if not piece.present]
        if not pieces:
            return Moved()
        moved, waited = self._carrier.bring(pieces, seat)
        return Moved(bytes_in=moved, seconds=time.perf_counter() - start, waited_s=waited)

    def offload(self, seat: Seat | None = None) -> Moved:
        """Copy DIRTY buckets to the slab, forget the rest; after it the region's bytes are free for others.

        seat: told after each chunk what is free; told `fail` when a copy raises. CLEAN, ZERO and absent buckets are
        released without a copy. bytes_out counts copied bytes, bytes_clean those that the host had already.
        """
        start = time.perf_counter()
        before, self.residency = self.residency, advance(self.residency, Residency.OFFLOADING)
        self._before = before
        moved = clean = 0
        for piece in self._pieces.values():
            piece.stayed = piece.ready
        try:
            for piece in self._pieces.values():
                if piece.state is DIRTY:
                    self._carrier.send_home(piece, seat)
                    moved += piece.size
                else:
                    self._carrier.forget(piece, seat)
                    clean += piece.there if piece.state is CLEAN else 0
        except BaseException:
            if seat is not None:
                seat.fail()
            raise
        self._forget()
        self.residency = Residency.HOST
        return Moved(bytes_out=moved, bytes_clean=clean, seconds=time.perf_counter() - start)

    def undo(self, seat: Seat | None = None) -> Moved:
        """Take the last load or offload back, whether it failed or was done, bit for bit.

        After a load: where it started from, HOST with no copy. After an offload: DEVICE with the buckets that were
        there; what was released is waited for (a LEAVING seat is told `fail` first, so that who comes gives up) and
        copied in again, in descending order. Call it only for states that the switch in question has touched.
        Raises IllegalTransition when there is nothing to take back. After any other error the state is HOST when the
        offload was done (its home has all of it), else LOST.
        """
        start = time.perf_counter()
        if self._before is None:
            raise IllegalTransition(f"state that is {self.residency} has no switch to take back", "Load or offload it")
        before, self._before = self._before, None
        moved, waited = 0, 0.0
        try:
            if before is Residency.DEVICE and self.residency in (Residency.OFFLOADING, Residency.HOST):
                moved, waited = self._take_back(seat)
            elif before is not Residency.DEVICE:
                if self.residency is Residency.DEVICE:
                    self.residency = advance(self.residency, Residency.OFFLOADING)
                self._forget()
                self.residency = advance(self.residency, before)
            else:
                self.residency = Residency.DEVICE
        except BaseException:
            if self.residency is Residency.LOADING:
                self._forget()
                self.residency = Residency.HOST
            else:
                self.residency = Residency.LOST
            raise
        return Moved(bytes_in=moved, seconds=time.perf_counter() - start, waited_s=waited)

    def _take_back(self, seat: Seat | None) -> tuple[int, float]:
        """From OFFLOADING or HOST to DEVICE."""
        if self.residency is Residency.HOST:
            self.residency = advance(self.residency, Residency.LOADING)
            for piece in self._pieces.values():
                piece.ready = piece.left = piece.stayed
        if seat is not None and seat.state is LEAVING:
            seat.fail()
        back = self._carrier.take_back(reversed(self._pieces.values()), seat)
        self.residency = advance(self.residency, Residency.DEVICE)
        return back

    def _forget(self) -> None:
        """Nothing is on the device."""
        for piece in self._pieces.values():
            piece.ready = piece.left = 0

    def _settle(self, slab: Tensor | None) -> None:
        if self.host.size:
            if slab is None:
                raise BadInput("a state with buckets of its own has no slab", f"Allocate {self.host.size} bytes")
            check_buffer(slab, self.host.size, "the slab of a state")
        for bucket in self.host.buckets:
            if bucket.size:
                self._pieces[bucket.name].settle(slab[bucket.offset : bucket.offset + bucket.size])

    def _place(self, region_slice: Tensor, at: int) -> None:
        check_buffer(region_slice, self.manifest.end, "the device place of a state")
        self._carrier.at = at
        for piece in self._pieces.values():
            piece.place(region_slice)

    def _named(self, buckets: Collection[str]) -> list[Piece]:
        """In device order. Buckets without bytes are left out. Raises BadInput for an unknown one."""
        for name in buckets:
            if name not in self._pieces and all(name != bucket.name for bucket in self.manifest.buckets):
                self._piece(name)
        return [piece for name, piece in self._pieces.items() if name in buckets]

    def _piece(self, bucket: str) -> Piece:
        try:
            return self._pieces[bucket]
        except KeyError:
            raise BadInput(f"no bucket {bucket!r} with bytes", f"There are {', '.join(self._pieces)}") from None
