"""A rank of test_exchange, in a process of its own, told by lines."""

import os
import signal
from typing import TextIO

import torch

from plexrl.memory.arena import ArenaMap
from plexrl.memory.device import CpuDevice
from plexrl.memory.gate import Gate, Withdrawn
from plexrl.memory.manifest import Manifest, TensorSpec
from plexrl.memory.resident import DIRTY, ResidentState
from plexrl.memory.transfer import Memcpy
from plexrl.types import Extent, Residency, Slab

CHUNK = 4096
MANIFEST = Manifest.build({name: [TensorSpec("t", (40_000,), "float32")] for name in ("weights", "moment1")})


class LinkDown(Exception):
    """A copy failed."""


class Doomed(Memcpy):
    """Ends its process, or raises, after so many copies more."""

    kills = fails = -1

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Half a chunk is copied before the end."""
        half = target.numel() // 2
        super().copy(target[:half], source[:half])
        if self.kills == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fails == 0:
            self.fails = -1
            raise LinkDown
        self.kills -= 1
        self.fails -= 1
        super().copy(target[half:], source[half:])


class Rank:
    """A state whose bytes it knows."""

    def __init__(self, settings: dict) -> None:
        seat = settings["seat"]
        self.device = CpuDevice(settings["device"], settings["device_bytes"])
        self.region = self.device.reserve(Extent(0, MANIFEST.size))
        self.slab = ArenaMap(settings["arena"], settings["arena_bytes"]).view(
            Slab(f"rank {seat}", settings["slab"], MANIFEST.size, 0)
        )
        self.seat = Gate(settings["gate"]).seat(seat, f"rank {seat}", self.region.extent)
        self.mover = Doomed()
        self.state = ResidentState(MANIFEST, self.region.buffer, self.slab, mover=self.mover, chunk=CHUNK)
        self.bytes = torch.zeros(MANIFEST.size, dtype=torch.uint8)

    def come(self) -> str:
        """Onto the device, or back to the host."""
        self.seat.come()
        try:
            self.state.load(seat=self.seat)
            self.seat.held()
        except Withdrawn:
            self.state.undo(self.seat)
            self.seat.gone()
            return "undone Withdrawn"
        self.device.map(self.region)
        return "came"

    def leave(self) -> str:
        """To the host, or back onto the device."""
        self.seat.leave()
        try:
            self.state.offload(self.seat)
        except LinkDown:
            self.state.undo(self.seat)
            self.seat.held()
            return "undone LinkDown"
        self.device.unmap(self.region)
        self.seat.gone()
        return "left"

    def write(self, seed: str) -> str:
        """Contents of its own."""
        self.bytes = torch.randint(
            0, 256, (MANIFEST.size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(int(seed))
        )
        self.region.buffer.copy_(self.bytes)
        for bucket in MANIFEST.buckets:
            self.state.mark(bucket.name, DIRTY)
        return "written"

    def check(self) -> str:
        """Whether all bytes are what was written, where the state is."""
        there = self.region.buffer if self.state.residency is Residency.DEVICE else self.slab
        return "right" if torch.equal(there, self.bytes) else "wrong"

    def die(self, copies: str) -> None:
        """Be killed in the copy after so many."""
        self.mover.kills = int(copies)

    def fail(self, copies: str) -> None:
        """Fail in the copy after so many."""
        self.mover.fails = int(copies)


def serve(settings: dict, orders: TextIO, answers: TextIO) -> None:
    """Do as told until there are no more orders."""
    rank = Rank(settings)
    print("ready", file=answers, flush=True)
    for line in orders:
        verb, *words = line.split()
        said = getattr(rank, verb)(*words)
        if said is not None:
            print(said, file=answers, flush=True)
