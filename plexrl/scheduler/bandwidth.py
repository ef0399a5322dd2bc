"""How fast state moves on each node, learned from what moved. Read for gangs that have not switched yet.

Times are microseconds, rates GB (1e9 bytes) per second and GPU.
"""

from collections.abc import Iterable, Mapping

from msgspec import Struct

from plexrl.scheduler.costs import ALPHA, Learned, SwitchModel
from plexrl.types import Moved

LEAST_BYTES = 1 << 20  # what moves less tells of overheads, not of the link (ours)
BAND = 10  # nodes are told apart by tenths of the fastest one's time (ours)


class Link(Struct, frozen=True, kw_only=True):
    """One node's, as far as it was seen; 0: never. in, out: between GPU and host; refill, spill: between NVMe and host.

    overhead_us: of a switch, beyond its copies. moves: how many were seen.
    """

    gbps_in: float = 0.0
    gbps_out: float = 0.0
    gbps_refill: float = 0.0
    gbps_spill: float = 0.0
    overhead_us: int = 0
    moves: int = 0


class Rate:
    """Bytes over time; of what came before, the newest weigh most (as `Learned`), by their bytes.

    gbps: from elsewhere, and weighs as little as the smallest move does; 0: nothing is known.
    """

    __slots__ = ("_bytes", "_us")

    def __init__(self, gbps: float) -> None:
        self._bytes = float(LEAST_BYTES) if gbps else 0.0
        self._us = LEAST_BYTES / (gbps * 1e3) if gbps else 0.0

    def observe(self, size: int, us: float) -> None:
        """So many bytes took so long."""
        if size >= LEAST_BYTES and us > 0:
            self._bytes = (1 - ALPHA) * self._bytes + size
            self._us = (1 - ALPHA) * self._us + us

    @property
    def gbps(self) -> float:
        """0.0 before anything was seen."""
        return self._bytes / self._us / 1e3 if self._us else 0.0


class Node:
    """What is learned of one node."""

    __slots__ = ("into", "moves", "out", "overhead", "refill", "spill")

    def __init__(self, link: Link) -> None:
        self.into, self.out = Rate(link.gbps_in), Rate(link.gbps_out)
        self.refill, self.spill = Rate(link.gbps_refill), Rate(link.gbps_spill)
        self.overhead = Learned()
        if link.moves:
            self.overhead.observe(link.overhead_us)
        self.moves = link.moves

    @property
    def link(self) -> Link:
        return Link(
            gbps_in=self.into.gbps,
            gbps_out=self.out.gbps,
            gbps_refill=self.refill.gbps,
            gbps_spill=self.spill.gbps,
            overhead_us=self.overhead.mean,
            moves=self.moves,
        )


class Bandwidth:
    """Of all nodes. bytes_per_us: what is expected of those that have not moved anything yet, each way.

    gbps_nvme: the same for NVMe (ours: the least that a node's own disk does).
    """

    def __init__(self, bytes_per_us: int, gbps_nvme: float = 1.0) -> None:
        self._prior = bytes_per_us
        self._nvme = gbps_nvme
        self._nodes: dict[str, Node] = {}

    def moved(self, node: str, moved: Moved) -> None:
        """One GPU's copy. What it waited for another's bytes is not the link's doing."""
        at = self._node(node)
        us = (moved.seconds - moved.waited_s) * 1e6
        at.moves += 1
        if not moved.bytes_out:
            at.into.observe(moved.bytes_in, us)
        elif not moved.bytes_in:
            at.out.observe(moved.bytes_out, us)

    def took(self, node: str, us: int, copies_us: int) -> None:
        """A whole switch, and of it the longest copy."""
        self._node(node).overhead.observe(max(0, us - copies_us))

    def refilled(self, node: str, size: int, seconds: float) -> None:
        """From NVMe."""
        self._node(node).refill.observe(size, seconds * 1e6)

    def spilled(self, node: str, size: int, seconds: float) -> None:
        """To NVMe."""
        self._node(node).spill.observe(size, seconds * 1e6)

    def switch_us(self, nodes: Iterable[str], size: int) -> int:
        """A gang's switch with so many bytes per GPU in and as many out: that of its slowest node."""
        return max(self._switch_us(node, size) for node in nodes)

    def _switch_us(self, node: str, size: int) -> int:
        at = self._nodes.get(node)
        if at is None or not at.moves:
            return size // self._prior
        prior = self._prior / 1e3
        link = SwitchModel(
            gbps_in=at.into.gbps or prior,
            gbps_out=at.out.gbps or prior,
            overhead_us=at.overhead.mean,
            exchange=True,
        )
        return link.switch_us(size, size)

    def refill_us(self, sizes: Iterable[tuple[str, int]]) -> int:
        """So many bytes from each node's NVMe, one after the other on a node, all nodes at once."""
        took: dict[str, float] = {}
        for node, size in sizes:
            at = self._nodes.get(node)
            gbps = (at.refill.gbps if at else 0.0) or self._nvme
            took[node] = took.get(node, 0.0) + size / (gbps * 1e3)
        return round(max(took.values(), default=0.0))

    def bands(self) -> dict[str, int]:
        """How much longer a switch takes on each node that was seen than on the fastest, in tenths, rounded down."""
        seen = [node for node, at in self._nodes.items() if at.into.gbps and at.out.gbps]
        times = {node: 1 / self._nodes[node].into.gbps + 1 / self._nodes[node].out.gbps for node in seen}
        least = min(times.values(), default=0.0)
        return {node: int(BAND * (time / least - 1) + 1e-9) for node, time in times.items()}

    @property
    def links(self) -> dict[str, Link]:
        """What is known of each node."""
        return {name: at.link for name, at in self._nodes.items()}

    def restore(self, links: Mapping[str, Link]) -> None:
        """What an earlier pool had learned."""
        self._nodes |= {name: Node(link) for name, link in links.items()}

    def _node(self, name: str) -> Node:
        at = self._nodes.get(name)
        if at is None:
            at = self._nodes[name] = Node(Link())
        return at


class SwitchCost(Learned):
    """What it takes to bring a gang in. refill_us: on top of that, while its state lies on NVMe; build_us: while it has
    no engine. spent_us: what refills took of the switch that is under way."""

    __slots__ = ("build_us", "refill_us", "spent_us")

    def __init__(self, prior_us: int = 0) -> None:
        super().__init__(prior_us)
        self.build_us = self.refill_us = self.spent_us = 0

    def observe(self, us: int) -> None:
        """It took this long, refills included."""
        super().observe(max(0, us - self.spent_us))
        self.spent_us = 0

    @property
    def mean(self) -> int:
        """What to expect now."""
        return super().mean + self.refill_us + self.build_us

    @property
    def upper(self) -> int:
        """What is rarely exceeded now."""
        return super().upper + self.refill_us + self.build_us
