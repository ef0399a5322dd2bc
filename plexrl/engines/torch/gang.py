"""The ranks of one worker group: a gloo process group of their own, found through a file."""

from __future__ import annotations

import re
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

# A rank that died is noticed at once (its sockets close); this bounds a rank that hangs.
TIMEOUT = timedelta(minutes=30)


def process_group(
    rank: int, world: int, rendezvous: str, interface: str, timeout: timedelta = TIMEOUT
) -> dist.ProcessGroupGloo:
    """A gloo group of its own. rendezvous: path of a file that all ranks see, used by this group alone.

    interface: an address, host name or device name to listen on.
    """
    options = dist.ProcessGroupGloo._Options()
    where = (
        {"interface": interface} if re.fullmatch(r"(lo|en|eth|ib|bond|br)\w*", interface) else {"hostname": interface}
    )
    options._devices = [dist.ProcessGroupGloo.create_device(**where)]
    options._timeout = timeout
    store = dist.PrefixStore("gang", dist.FileStore(rendezvous, world))
    return dist.ProcessGroupGloo(store, rank, world, options)


class Gang:
    """Collectives of the gang. A gang of one needs no group and no file. Tensors only: nothing is pickled."""

    def __init__(self, rank: int, world: int, rendezvous: str, interface: str) -> None:
        """See process_group."""
        self.rank = rank
        self.world = world
        self._group = process_group(rank, world, rendezvous, interface) if world > 1 else None

    def sum(self, tensor: Tensor) -> None:
        """Add up over ranks, in place; the same bits on every rank."""
        if self._group is not None:
            self._group.allreduce([tensor]).wait()

    def any(self, flag: bool) -> bool:
        """Whether any rank says True."""
        if self._group is None:
            return flag
        byte = torch.tensor([flag], dtype=torch.uint8)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        self._group.allreduce([byte], options).wait()
        return bool(byte.item())

    def to_root(self, parts: list[Tensor]) -> None:
        """Fill parts[r] on rank 0 with what rank r holds there; every rank passes its own and rank 0 all shapes."""
        if self._group is None:
            return
        if self.rank:
            self._group.send([parts[self.rank]], 0, 0).wait()
            return
        for rank in range(1, self.world):
            self._group.recv([parts[rank]], rank, 0).wait()

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.any(False)

    def close(self) -> None:
        """Leave the group."""
        self._group = None
