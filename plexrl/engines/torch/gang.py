"""The ranks of one worker group: process groups of their own, found through a file.

What ranks tell each other lies on the host and goes by gloo; sums of what lies on GPUs go by NCCL.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

# A rank that died is noticed at once (its sockets close); this bounds a rank that hangs.
TIMEOUT = timedelta(minutes=30)
_NAME_BYTES = 128


def process_group(
    rank: int, world: int, store: dist.Store, interface: str, timeout: timedelta = TIMEOUT
) -> dist.ProcessGroupGloo:
    """A gloo group of its own. store: see meeting; interface: an address, host name or device name to listen on."""
    options = dist.ProcessGroupGloo._Options()
    where = (
        {"interface": interface} if re.fullmatch(r"(lo|en|eth|ib|bond|br)\w*", interface) else {"hostname": interface}
    )
    options._devices = [dist.ProcessGroupGloo.create_device(**where)]
    options._timeout = timeout
    return dist.ProcessGroupGloo(dist.PrefixStore("gang", store), rank, world, options)


def meeting(rendezvous: str, world: int) -> dist.Store:
    """Where ranks find each other. rendezvous: path of a file that all of them see, and nobody else uses."""
    return dist.FileStore(rendezvous, world)


class Gang:
    """Collectives of the gang. A gang of one needs no group and no file. Tensors only: nothing is pickled."""

    def __init__(self, rank: int, world: int, rendezvous: str, interface: str) -> None:
        """See process_group, meeting. store: where the ranks meet; None for a gang of one."""
        self.rank = rank
        self.world = world
        self.store = meeting(rendezvous, world) if world > 1 else None
        self._group = process_group(rank, world, self.store, interface) if world > 1 else None
        self._fast: dist.ProcessGroup | None = None

    def use(self, where: torch.device) -> None:
        """From now on sums may lie on this device. A collective.

        NCCL wants a GPU for each rank: on slices of one card sums go through the host, as they do without a GPU.
        """
        if self._group is None or where.type != "cuda":
            return
        if self.apart(_gpu_name(where)):
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = TIMEOUT
            store = dist.PrefixStore("nccl", self.store)
            self._fast = dist.ProcessGroupNCCL(store, self.rank, self.world, options)
            # Connect now: what its buffers take belongs to what the process keeps, which is measured next.
            one = torch.ones(1, device=where)
            self.sum(one)
            one.item()

    def apart(self, name: str) -> bool:
        """Whether every rank tells another name, of at most 128 bytes. A collective."""
        mine = torch.zeros(_NAME_BYTES, dtype=torch.uint8)
        told = name.encode()[:_NAME_BYTES]
        mine[: len(told)] = torch.frombuffer(bytearray(told), dtype=torch.uint8)
        parts = [torch.zeros_like(mine) for _ in range(self.world)]
        self._group.allgather([parts], [mine]).wait()
        return len({part.numpy().tobytes() for part in parts}) == self.world

    def sum(self, tensor: Tensor) -> None:
        """Add up over ranks, in place; the same bits on every rank."""
        if self._group is None:
            return
        if self._fast is not None and tensor.is_cuda:
            self._fast.allreduce([tensor]).wait()
            return
        host = tensor.cpu()  # itself, where it is there
        self._group.allreduce([host]).wait()
        if host is not tensor:
            tensor.copy_(host)

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

    def gather(self, part: Tensor, counts: Sequence[int]) -> list[Tensor]:
        """Every rank's part, on every rank. counts: elements of each; 1-D, of one dtype."""
        if self._group is None:
            return [part]
        mine = torch.zeros(max(counts), dtype=part.dtype)
        mine[: part.numel()] = part.detach()
        parts = [torch.empty_like(mine) for _ in counts]
        self._group.allgather([parts], [mine]).wait()
        return [found[:count] for found, count in zip(parts, counts, strict=True)]

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.any(False)

    def close(self) -> None:
        """Leave the group."""
        self._group = self._fast = self.store = None


def _gpu_name(where: torch.device) -> str:
    """The card by node and bus; slices of one card have the same name."""
    card = torch.cuda.get_device_properties(where)
    return f"{card.pci_domain_id}:{card.pci_bus_id}:{card.pci_device_id}@{socket.gethostname()}"
