"""Where the gangs of a worker group live: which GPUs, and which bytes of each.

Offsets are fixed for a gang's life. A free gap among all placed extents is taken if there is one; else the offset that
overlaps the fewest bytes of others. Gangs whose extents overlap on a GPU are never resident together.
"""

from collections.abc import Callable, Mapping

from msgspec import Struct

from plexrl.types import BadInput, DoesNotFit, Extent, Gang, GroupSpec, Placement

ALIGN = 64  # bytes; a tensor off this boundary gives other bits


class Placed(Struct, frozen=True):
    """An extent on a GPU and whose it is."""

    gang: str
    owner: str
    start: int
    end: int


class Floor:
    """All GPUs and what is placed on them. gpus: name -> bytes."""

    def __init__(self, gpus: Mapping[str, int]) -> None:
        self.gpus = dict(gpus)
        self._at = {gpu: i for i, gpu in enumerate(self.gpus)}
        self._placed: dict[str, list[Placed]] = {gpu: [] for gpu in self.gpus}

    def on(self, gpu: str) -> list[Placed]:
        """What is placed on a GPU, by offset."""
        return self._placed[gpu]

    def choose(self, spec: GroupSpec, placement: str) -> Placement:
        """Place every gang of the group and keep its extents. Raises DoesNotFit and then keeps nothing."""
        size = -(-spec.device_bytes // ALIGN) * ALIGN
        gangs: list[Gang] = []
        try:
            for replica in range(spec.replicas):
                gpus = self._gpus(spec, size, PLACEMENTS[placement], gangs)
                extents = tuple(Extent(self._offset(gpu, size, spec.owner), size) for gpu in gpus)
                gang = Gang(f"{spec.group}/{replica}", spec.group, gpus, extents)
                self._occupy(gang, spec.owner)
                gangs.append(gang)
        except DoesNotFit:
            self.vacate(spec.group, gangs)
            raise
        return Placement(spec.group, tuple(gangs))

    def occupy(self, placement: Placement, owner: str) -> None:
        """Keep the extents of a placement made earlier. Raises BadInput if a GPU or its size is not the same."""
        for gang in placement.gangs:
            for gpu, extent in zip(gang.gpus, gang.extents, strict=True):
                if extent.offset is None or extent.offset + extent.size > self.gpus.get(gpu, 0):
                    raise BadInput(
                        f"gang {gang.id} was placed on {gpu} at {extent.offset} with {extent.size} bytes, and that GPU "
                        f"has {self.gpus.get(gpu, 0)}",
                        "Start the pool with the GPUs and the device size that its journal was written with",
                    )
        for gang in placement.gangs:
            self._occupy(gang, owner)

    def vacate(self, group: str, gangs: tuple[Gang, ...] | list[Gang]) -> None:
        """Give the group's extents back."""
        gone = {gang.id for gang in gangs}
        for gang in gangs:
            for gpu in gang.gpus:
                self._placed[gpu] = [p for p in self._placed[gpu] if p.gang not in gone]

    def _occupy(self, gang: Gang, owner: str) -> None:
        for gpu, extent in zip(gang.gpus, gang.extents, strict=True):
            self._placed[gpu].append(Placed(gang.id, owner, extent.offset, extent.offset + extent.size))
            self._placed[gpu].sort(key=lambda p: (p.start, p.gang))

    def _gpus(self, spec: GroupSpec, size: int, rank: "Rank", siblings: list[Gang]) -> tuple[str, ...]:
        """The GPUs of one more gang: if possible not its siblings' and on one node; then by the placement's rank."""
        big_enough = [gpu for gpu, capacity in self.gpus.items() if capacity >= size]
        if len(big_enough) < spec.gang_size:
            raise DoesNotFit(
                f"worker group {spec.group} needs {spec.gang_size} GPUs with {size} bytes each, and the pool has "
                f"{len(big_enough)} such GPUs (the largest has {max(self.gpus.values(), default=0)} bytes)",
                "Use a smaller model or gang, fewer LoRA slots or KV bytes, or a pool with larger GPUs",
            )
        taken = [gpu for gang in siblings for gpu in gang.gpus]
        ranked = []
        for gpu in big_enough:
            key = rank(self, spec.owner, gpu)
            if key is not None:
                ranked.append(((taken.count(gpu), *key), self._at[gpu], gpu))
        if len(ranked) < spec.gang_size:
            raise DoesNotFit(
                f"worker group {spec.group} needs {spec.gang_size} GPUs that no other job uses, and {len(ranked)} are "
                f"left for job {spec.owner}",
                "Wait for a job to end, ask for fewer GPUs, or let the pool share them (scheduler.placement: pack)",
            )
        ranked.sort()
        nodes: dict[str, list] = {}
        for entry in ranked:
            nodes.setdefault(entry[2].rpartition(":")[0], []).append(entry)
        whole = [entries[: spec.gang_size] for entries in nodes.values() if len(entries) >= spec.gang_size]
        # The worst member decides between nodes: a gang is as good as its most loaded GPU.
        chosen = min(whole, key=lambda entries: entries[::-1]) if whole else ranked[: spec.gang_size]
        return tuple(gpu for _, _, gpu in sorted(chosen, key=lambda entry: entry[1]))

    def _offset(self, gpu: str, size: int, owner: str) -> int:
        placed, capacity = self._placed[gpu], self.gpus[gpu]
        # The overlap is piecewise linear in the offset, so its minimum lies at one of these.
        last = (capacity - size) // ALIGN * ALIGN
        edges = {0, last, *(p.end for p in placed), *(p.start - size for p in placed)}

        def cost(offset: int) -> tuple[int, int, int]:
            overlaps = [(min(p.end, offset + size) - max(p.start, offset), p.owner) for p in placed]
            overlaps = [(n, whose) for n, whose in overlaps if n > 0]
            # A job's own trainer and sampler alternate at every step: rather overlap with somebody else's.
            return sum(n for n, _ in overlaps), sum(n for n, whose in overlaps if whose == owner), offset

        return min((edge for edge in edges if 0 <= edge <= last), key=cost)


Rank = Callable[[Floor, str, str], tuple[int, ...] | None]


def pack(floor: Floor, owner: str, gpu: str) -> tuple[int, ...]:
    """The owner's GPUs first, then GPUs in use, then empty ones; the least filled among equals."""
    placed = floor.on(gpu)
    return (all(p.owner != owner for p in placed), not placed, sum(p.end - p.start for p in placed))


def isolated(floor: Floor, owner: str, gpu: str) -> tuple[int, ...] | None:
    """The owner's GPUs first, then empty ones; never another's."""
    if any(p.owner != owner for p in floor.on(gpu)):
        return None
    return pack(floor, owner, gpu)


PLACEMENTS: dict[str, Rank] = {"isolated": isolated, "pack": pack}
