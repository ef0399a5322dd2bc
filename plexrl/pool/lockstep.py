"""How the ranks of a gang act as one: rank 0 (the leader) speaks to the head and tells the others every step it takes.

So all ranks run the same calls in the same order and stop at the same safe point, whatever head or network do.
Messages are bytes in gloo collectives; nothing is unpickled.
"""

import torch
import torch.distributed as dist


class Lockstep:
    """Broadcast from rank 0 and gather to rank 0, for a world of one or more ranks."""

    def __init__(self, rank: int, world: int):
        self.rank = rank
        self.world = world

    def tell(self, payload: bytes | None = None) -> bytes:
        """Rank 0 gives payload; every rank returns it."""
        if self.world == 1:
            return payload or b""
        size = torch.tensor([len(payload or b"")], dtype=torch.int64)
        dist.broadcast(size, src=0)
        data = torch.empty(int(size), dtype=torch.uint8)
        if payload:
            data.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
        if len(data):
            dist.broadcast(data, src=0)
        return payload if payload is not None else data.numpy().tobytes()

    def collect(self, payload: bytes) -> list[bytes]:
        """Every rank gives payload; rank 0 returns all of them in rank order, the others an empty list."""
        if self.world == 1:
            return [payload]
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
        dist.all_gather(sizes, torch.tensor([len(payload)], dtype=torch.int64))
        longest = max(int(s) for s in sizes)
        data = torch.zeros(longest, dtype=torch.uint8)
        data[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        parts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.world)] if self.rank == 0 else None
        dist.gather(data, parts, dst=0)
        return [p[: int(s)].numpy().tobytes() for p, s in zip(parts, sizes, strict=True)] if parts else []
