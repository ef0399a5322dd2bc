"""Which deployment leaves a node's memory for its NVMe. Pure."""

from collections.abc import Iterable

from msgspec import Struct


class Candidate(Struct, frozen=True, kw_only=True):
    """A deployment whose state is in memory and on no device.

    nodes: bytes of it in each node's memory. waiting: calls of it are open. next_use_us: when its gang is expected to
    be wanted again. used_us: when a call of it ended last.
    """

    deployment: str
    nodes: dict[str, int]
    waiting: bool
    next_use_us: int
    used_us: int


def coldest(candidates: Iterable[Candidate], node: str) -> str | None:
    """Who leaves the node's memory next; None when nobody there may.

    Nobody with open calls before all others have left; then whose next use is furthest, whose last use is longest ago,
    who frees most.
    """
    there = [candidate for candidate in candidates if candidate.nodes.get(node)]
    first = min(there, key=lambda c: (c.waiting, -c.next_use_us, c.used_us, -c.nodes[node], c.deployment), default=None)
    return first and first.deployment
