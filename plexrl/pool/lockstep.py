"""How the ranks of a gang act as one: rank 0 (the leader) speaks to the head and tells the others every step it takes.

So all ranks run the same calls in the same order and stop at the same safe point, whatever head or network do.
Messages are bytes in gloo collectives; nothing is unpickled.
"""

from datetime import timedelta

import torch
import torch.distributed as dist

from plexrl.engines.torch.gang import meeting, process_group

# Followers wait for the leader's next step however long the pool is idle; a leader that dies closes its sockets.
_IDLE = timedelta(days=3650)


class Lockstep:
    """Broadcast from rank 0 and gather to rank 0, for a world of one or more ranks."""

    def __init__(self, rank: int, world: int, rendezvous: str, interface: str):
        """rendezvous: path of a file that all ranks see and nothing else uses."""
        self.rank = rank
        self.world = world
        self._group = process_group(rank, world, meeting(rendezvous, world), interface, _IDLE) if world > 1 else None

    def tell(self, payload: bytes | None = None) -> bytes:
        """Rank 0 gives payload; every rank returns it."""
        if self._group is None:
            return payload or b""
        size = torch.tensor([len(payload or b"")], dtype=torch.int64)
        self._broadcast(size)
        data = (
            torch.frombuffer(bytearray(payload), dtype=torch.uint8)
            if payload
            else torch.empty(int(size), dtype=torch.uint8)
        )
        self._broadcast(data)
        return payload if payload is not None else data.numpy().tobytes()

    def collect(self, payload: bytes) -> list[bytes]:
        """Every rank gives payload, not empty; rank 0 returns all of them in rank order, the others an empty list."""
        if self._group is None:
            return [payload]
        data = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        size = torch.tensor([len(data)], dtype=torch.int64)
        if self.rank:
            self._group.send([size], 0, 0).wait()
            self._group.send([data], 0, 0).wait()
            return []
        parts = [payload]
        for rank in range(1, self.world):
            self._group.recv([size], rank, 0).wait()
            part = torch.empty(int(size), dtype=torch.uint8)
            self._group.recv([part], rank, 0).wait()
            parts.append(part.numpy().tobytes())
        return parts

    def _broadcast(self, tensor: torch.Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._group.broadcast([tensor], options).wait()
