"""The search for the GPUs of one gang: on one node if it fits there, else on the fewest nodes, by a placement's rank.

Nodes are kept in order of load, so that a search looks at few of them: at most `LOOK` nodes that can take the gang are
compared (ours). What changed since the last search is put in order at the next one.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from plexrl.scheduler.load import ONE, Card
from plexrl.scheduler.want import FITS, Want, heap
from plexrl.types import GpuRole, Role

LOOK = 8


@dataclass(eq=False, slots=True)
class Node:
    """A node's GPUs. host: its budget for state off the device, bytes (None: unbounded), of which `used` are promised.
    pace: how much slower than the fastest node's its links are, in tenths; 0 also where that is not known.

    By the role of a group: cards, the GPUs that may take it; loads, theirs in ascending order; slack, the load that the
    members there still bear on top, in ascending order.
    """

    name: str
    at: int
    host: int | None
    used: int = 0
    pace: int = 0
    cards: dict[Role, list[Card]] = field(default_factory=lambda: {role: [] for role in Role})
    loads: dict[Role, list[int]] = field(default_factory=dict)
    slack: dict[Role, list[float]] = field(default_factory=dict)

    def weigh(self, bounds: tuple[float, ...]) -> None:
        """Say again how loaded the GPUs are."""
        for role, cards in self.cards.items():
            self.loads[role] = sorted([card.load for card in cards])
            self.slack[role] = sorted([bounds[card.mask] - card.load for card in cards])

    def hope(self, want: Want, room: float) -> int:
        """At most how many GPUs may take the gang where the job has nothing: load within `room`, its duty borne."""
        slack = self.slack[want.role]
        gpus = min(bisect_right(self.loads[want.role], room), len(slack) - bisect_left(slack, want.duty))
        if want.host and self.host is not None:
            gpus = min(gpus, max(0, self.host - self.used) // want.host)
        return gpus


Entry = tuple[tuple[int, ...], int, Card]  # a GPU's rank, its number, itself; the number decides among equals


def _fullest(entries: list[Entry]) -> int:
    """The largest load among these GPUs."""
    return max(card.load for _, _, card in entries)


class Order:
    """Nodes sorted by a figure that changes with their load; nodes without the figure are left out."""

    def __init__(self, figure: Callable[[Node], int | None], nodes: list[Node]) -> None:
        self._figure = figure
        self._values = {node.at: figure(node) for node in nodes}
        self.line = sorted((value, at) for at, value in self._values.items() if value is not None)

    def update(self, node: Node) -> None:
        old, new = self._values[node.at], self._figure(node)
        if old == new:
            return
        del self.line[bisect_left(self.line, (old, node.at))]
        insort(self.line, (new, node.at))
        self._values[node.at] = new


class Seats:
    """All nodes, in the orders that searches have asked for so far."""

    def __init__(self, nodes: list[Node], lazy: bool) -> None:
        """lazy: a search may stop at `LOOK` nodes; else it compares all of them."""
        self._nodes = nodes
        self._lazy = lazy
        self._orders: dict[tuple[Role, int], Order] = {}
        self._changed: dict[Node, None] = dict.fromkeys(nodes)
        self._bounds: tuple[float, ...] = ()
        self._failed: dict[tuple[Role, bool, bool], list[Want]] = {}
        self._sets: dict[tuple[Role, int], dict[tuple[Card, ...], int]] = {}
        self._widest = {role: max((len(node.cards[role]) for node in nodes), default=0) for role in Role}

    def changed(self, node: Node) -> None:
        """The load of a GPU of this node is another now."""
        self._changed[node] = None

    def joined(self, role: Role, cards: tuple[Card, ...]) -> None:
        """A gang of that role lives on these GPUs."""
        sets = self._sets.setdefault((role, len(cards)), {})
        sets[cards] = sets.get(cards, 0) + 1

    def left(self, role: Role, cards: tuple[Card, ...]) -> None:
        """A gang of that role that lived on these GPUs is gone."""
        sets = self._sets[role, len(cards)]
        sets[cards] -= 1
        if not sets[cards]:
            del sets[cards]

    def opened(self) -> None:
        """Something may fit that did not before."""
        self._failed.clear()

    def find(self, want: Want, alike: bool = False) -> list[Card] | None:
        """The GPUs of one gang, in the pool's order, or None. One node before several, fresh GPUs before siblings'.

        alike: rather GPUs that have time for all that is there and for this, the fullest first; and of those, or where
        none has time, rather all the GPUs of a gang as wide: the two wait for each other, and for nobody else. (Where
        GPUs take all roles only if they are less than half the gang's duty fuller than others.)
        """
        self._refresh(want.bounds)
        newcomer = not want.own and not want.avoid
        failed = self._failed.setdefault((want.role, want.isolated, want.over), []) if newcomer else []
        if any(map(want.asks_more, failed)):
            return None
        found = self._search(want, alike)
        if found is None and newcomer:
            failed.append(want)
        return found and [card for _, _, card in sorted(found, key=lambda entry: entry[1])]

    def _search(self, want: Want, alike: bool) -> list[Entry] | None:
        searches = (self._on_one, self._over_many) if want.count > 1 else (self._on_one,)
        timely = replace(want, rank=heap, near={}, timely=True)
        if alike:
            untouched = replace(want, near={}, untouched=True)
            for search, one in ((self._same, timely), *((search, untouched) for search in searches)):
                if found := search(one, True):
                    return found
        for search in searches:
            for fresh in (True, False) if want.taken else (True,):
                same = None
                if alike:
                    if found := search(timely, fresh):
                        return found
                    same = self._same(want, fresh)
                    if same and same[0][2].role is not GpuRole.ANY:
                        return same
                if found := search(want, fresh):
                    return same if same and _fullest(same) <= _fullest(found) + want.duty // 2 else found
        return None

    def entries(self, node: Node, want: Want, fresh: bool) -> list[Entry]:
        """The node's GPUs that may take the gang, the best first, no more than its host memory allows."""
        entries = sorted(e for card in node.cards[want.role] if (e := self._entry(card, want, fresh)) is not None)
        if want.host and node.host is not None:
            del entries[max(0, node.host - node.used) // want.host :]
        return entries

    def _entry(self, card: Card, want: Want, fresh: bool) -> Entry | None:
        """A GPU and how it compares; None if it may not take the gang."""
        taken = want.taken.get(card, 0)
        if card.role not in FITS[want.role]:
            return None  # a gang of this role may live there that was placed otherwise
        if (fresh and taken) or not card.holds(want) or card.name in want.avoid:
            return None
        if (taken + 1) * want.duty > want.bounds[want.mask]:
            return None  # replicas take turns there: so many times as long is every rollout
        if want.isolated and len(card.duties) > (want.job in card.duties):
            return None
        if want.timely and (want.job in card.duties or card.load + want.duty > ONE):
            return None
        if want.untouched and (card.placed or card.role is GpuRole.ANY):
            return None
        load = card.load_with(want)
        return None if load is None else ((taken, *want.rank(card, want, load)), card.at, card)

    def _same(self, want: Want, fresh: bool) -> list[Entry] | None:
        """All the GPUs of a gang of the same role and width, where the worst of them compares best."""
        best: list[Entry] | None = None
        for cards in self._sets.get((want.role, want.count), ()):
            entries: list[Entry] = []
            for card in cards:
                entry = self._entry(card, want, fresh)
                if entry is None:
                    break
                entries.append(entry)
            else:
                entries.sort(reverse=True)
                if (best is None or entries < best) and self._hosted(cards, want):
                    best = entries
        return best

    def _hosted(self, cards: Sequence[Card], want: Want) -> bool:
        """Whether the nodes have host memory for the gang."""
        gpus = Counter(card.node for card in cards)
        return all(node.host is None or node.used + n * want.host <= node.host for node, n in gpus.items())

    def _on_one(self, want: Want, fresh: bool) -> list[Entry] | None:
        best: tuple[list[Entry], list[Entry]] | None = None
        seen = 0
        if want.count > self._widest[want.role]:
            return None
        for node in self._walk(want, want.count):
            entries = self.entries(node, want, fresh)[: want.count]
            if len(entries) < want.count:
                continue
            # The worst member decides between nodes: a gang is as good as its most loaded GPU.
            key = entries[::-1]
            if best is None or key < best[0]:
                best = key, entries
            seen += 1
            if self._lazy and seen == LOOK:
                break
        return best and best[1]

    def _over_many(self, want: Want, fresh: bool) -> list[Entry] | None:
        # Enough whole nodes, the best of them; where they are too few, whatever there is.
        widest = self._widest[want.role]
        parts = self._parts(want, fresh, widest) if want.count > widest else []
        if sum(len(part) for part in parts if len(part) == widest) < want.count:
            room = self._room(want)
            if len(want.own) + sum([node.hope(want, room) for node in self._nodes]) < want.count:
                return None
            parts = self._parts(want, fresh, 1)
        if sum(map(len, parts)) < want.count:
            return None
        # The fullest first makes them the fewest; the last is the best one that has what is still missing.
        parts.sort(key=lambda part: (-len(part), part[::-1]))
        found: list[Entry] = []
        while len(found) < want.count:
            left = want.count - len(found)
            enough = [part for part in parts if len(part) >= left]
            part = min(enough, key=lambda part: part[left - 1 :: -1]) if enough else parts[0]
            parts.remove(part)
            found += part[:left]
        return found

    def _parts(self, want: Want, fresh: bool, count: int) -> list[list[Entry]]:
        """The entries of the nodes that have any; no more nodes than it takes whole ones."""
        parts: list[list[Entry]] = []
        missing = want.count
        for node in self._walk(want, count):
            entries = self.entries(node, want, fresh)
            if entries:
                parts.append(entries)
                if node not in want.near:  # those are looked at beside the likely best, not in their stead
                    missing -= len(entries) if len(entries) == self._widest[want.role] else 0
            if self._lazy and missing <= 0:
                break
        return parts

    def _walk(self, want: Want, count: int) -> Iterator[Node]:
        """Nodes that may have `count` GPUs for the gang, the likely best first.

        Where the job has nothing, its duty must fit on top of the load of the GPUs; where it is already, the load may
        not even grow, so that those nodes are looked at whatever their load.
        """
        if not self._lazy:
            yield from self._nodes
            return
        yield from want.near
        room = self._room(want)
        low = self._order(want.role, count).line
        if low and low[0][0] <= room:
            line = self._order(want.role, 0).line if want.rank is heap else low
            for _, at in line:
                node = self._nodes[at]
                if node.hope(want, room) >= count:
                    if node not in want.near:
                        yield node
                elif line is low and node.loads[want.role][count - 1] > room:
                    break
        for node in dict.fromkeys(card.node for card in want.own):
            if node not in want.near and node.hope(want, room) < count:
                yield node

    def _room(self, want: Want) -> float:
        """The load of a GPU on top of which the gang is within the bound of its own class."""
        if want.isolated:
            return 0
        bound = want.bounds[want.mask]
        return (min(bound, ONE) if want.timely else bound) - want.duty

    def _order(self, role: Role, count: int) -> Order:
        """Nodes by the load of their count-th least loaded GPU; count 0: by the load of all, the most loaded first."""
        order = self._orders.get((role, count))
        if order is None:

            def figure(node: Node) -> int | None:
                loads = node.loads[role]
                if not count:
                    return -sum(loads) if loads else None
                return loads[count - 1] if len(loads) >= count else None

            order = self._orders[role, count] = Order(figure, self._nodes)
        return order

    def _refresh(self, bounds: tuple[float, ...]) -> None:
        if bounds != self._bounds:
            self._bounds, self._changed = bounds, dict.fromkeys(self._nodes)
            self._failed.clear()
        for node in self._changed:
            node.weigh(bounds)
            for order in self._orders.values():
                order.update(node)
        self._changed.clear()
