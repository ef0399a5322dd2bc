"""A deployment's tensors on their way out of the gang: into a folder, and into the slab of a published version."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path

from plexrl.engines import layout
from plexrl.engines.torch import files
from plexrl.engines.torch.deployment import Deployment
from plexrl.engines.torch.form import Bound
from plexrl.engines.torch.gang import Gang
from plexrl.engines.torch.home import Home, check_size, manifest
from plexrl.engines.torch.pieces import assembled
from plexrl.types import Slab


def pack(home: Home, gang: Gang, target: Deployment, bound: Bound, name: str, slab: Slab | None) -> None:
    """The weights into a snapshot slab; without one, this rank's part of them to the ranks that have one.

    A collective where weights are shared out. Raises BadInput for a slab of another size.
    """
    specs = home.base_specs if target.shape is None else home.adapter_specs(target.shape)
    if slab is not None:
        check_size(f"a version of {name!r}", slab, layout.packed(specs))
    if bound.weights is not None:
        if slab is not None:
            home.arena.view(slab).copy_(bound.weights)
    else:
        views = {} if slab is None else manifest({"weights": specs}).views(home.arena.view(slab))["weights"]
        pieces = bound.pieces("weights")
        for each, tensor in zip(pieces, assembled(pieces, gang), strict=True):
            if views:
                views[each].copy_(tensor)
    if slab is not None:
        home.arena.drop(slab, readonly=False)


def writer(
    home: Home, gang: Gang, target: Deployment, bound: Bound, folder: Path, optimizer: bool
) -> Callable[[], None]:
    """What saves the state when all ranks call it: rank 0 writes, all or nothing; the others give their parts."""
    stored = target.stored(bound, optimizer)
    streams = [assembled(pieces, gang) for _, pieces in stored]

    def write() -> None:
        try:
            if gang.rank == 0:
                with files.replacing(folder) as work:
                    for (name, pieces), tensors in zip(stored, streams, strict=True):
                        files.write_tensors(work / name, pieces, tensors, {"format": "pt"})
                    target.complete(home, work)
        finally:
            for tensors in streams:
                deque(tensors, maxlen=0)  # whatever failed here, the other ranks give their parts

    return write
