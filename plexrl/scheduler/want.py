"""What is looked for: the GPUs of one gang, and how they compare."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from plexrl.scheduler.load import ONE, Card
from plexrl.types import DoesNotFit, GpuRole, GroupSpec, Role

if TYPE_CHECKING:
    from plexrl.scheduler.seats import Node

BAND = ONE // 10  # loads within one band are equal to `spread`
NEAR = 4  # so many nodes of the job and of its partners are looked at first by `spread`
FITS = {role: (GpuRole(role), GpuRole.ANY) for role in Role}


@dataclass(eq=False, slots=True, kw_only=True)
class Want:
    """What is looked for: GPUs for one gang. Sizes in bytes per GPU, duty in millionths.

    bounds, mask: see `load.bounds`; mask is the job's own class. rank: how a GPU compares, the least first. isolated:
    no GPU of another job. own: GPUs where the job is; near: nodes to look at first; partners: the job and those with
    whom it shares a GPU. taken: GPU -> how many gangs of this group are there. avoid: GPUs not to be used.
    untouched: only GPUs that take no other role and that nobody lives on.
    timely: only GPUs that have time for all work there, this included; none that the job has already, for a trainer and
    a sampler that are a step apart work at the same time. over: what others keep there while they sleep does not count,
    for their engines can be ended.
    """

    job: str
    role: Role
    count: int
    duty: int
    size: int
    residual: int
    host: int
    bounds: tuple[float, ...]
    mask: int
    rank: Rank
    isolated: bool
    own: Collection[Card]
    near: dict[Node, None]
    partners: dict[str, None]
    taken: dict[Card, int]
    avoid: Collection[str]
    timely: bool = False
    untouched: bool = False
    over: bool = False

    def asks_more(self, other: Want) -> bool:
        """Whether this fits nowhere if the other fits nowhere, both for jobs without a GPU, of one role and policy."""
        return (
            self.count >= other.count
            and self.duty >= other.duty
            and self.size >= other.size
            and self.residual >= other.residual
            and self.host >= other.host
            and self.bounds[self.mask] <= other.bounds[other.mask]
        )


Rank = Callable[[Card, Want, int], tuple[int, ...]]


def fill(card: Card, want: Want, load: int) -> tuple[int, ...]:
    """The job's own GPUs first, then GPUs in use, then empty ones; the least filled among equals, then faster links."""
    return (want.job not in card.duties, not card.placed, card.filled, card.node.pace)


def heap(card: Card, want: Want, load: int) -> tuple[int, ...]:
    """The job's own GPUs first, then GPUs in use, then empty ones; the most loaded among equals, then faster links."""
    return (want.job not in card.duties, not card.placed, -load, card.node.pace)


def spread(card: Card, want: Want, load: int) -> tuple[int, ...]:
    """The least predicted load first, in bands; then the fewest jobs that are no partners yet; then complementary load:
    where the members' duties are small, an arrival waits less (the sum of d*d). Faster links among equals."""
    strangers = 0
    for job in card.duties:
        if job not in want.partners:
            strangers += 1
    return (load // BAND, strangers, card.squares, load, card.node.pace)


def rank_of(placement: str, virtual: bool) -> Rank:
    """How GPUs compare under a placement. With fixed offsets `pack` takes the least filled of the GPUs in use."""
    if placement.startswith("spread") or placement == "fit":
        return spread
    return heap if placement == "pack" and virtual else fill


def refusal(want: Want, spec: GroupSpec, cards: Collection[Card], nodes: Collection[Node]) -> DoesNotFit:
    """Why no GPUs were found for a gang of the group, with figures."""
    usable = [card for card in cards if card.role in FITS[want.role] and card.bytes >= want.size]
    needs = f"worker group {spec.group} needs {want.count} GPUs"
    if len(usable) < want.count:
        role = "" if all(card.role is GpuRole.ANY for card in cards) else f" for role {want.role}"
        return DoesNotFit(
            f"{needs}{role} with {want.size} bytes each, and the pool has {len(usable)} such GPUs "
            f"(the largest has {max((card.bytes for card in cards), default=0)} bytes)",
            "Use a smaller model or gang, fewer LoRA slots or KV bytes, or a pool with larger GPUs",
        )
    left = [card for card in usable if card.duties.keys() <= {want.job}]
    if want.isolated and len(left) < want.count:
        return DoesNotFit(
            f"{needs} that no other job uses, and {len(left)} are left for job {want.job}",
            "Wait for a job to end, ask for fewer GPUs, or let the pool share them (scheduler.placement: pack)",
        )
    full = sum(not card.holds(want) for card in usable)
    slow = sum(card.holds(want) and card.load_with(want) is None for card in usable)
    short = 0
    for node in nodes:
        gpus = min(want.count, len(node.cards[want.role]))
        short += node.host is not None and node.used + gpus * want.host > node.host
    return DoesNotFit(
        f"{needs} for each of its {spec.replicas} gangs; of {len(usable)} GPUs {full} are full, on {slow} a job "
        "would be slowed down beyond what scheduler.max_stretch allows for its class, "
        f"and {short} nodes are short of host memory",
        "Wait for a job to end, ask for fewer GPUs or bytes, or have the admin raise scheduler.max_stretch"
        if slow
        else "Wait for a job to end, or ask for fewer GPUs or bytes",
    )
