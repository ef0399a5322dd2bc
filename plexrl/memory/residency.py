"""Which residency may follow which."""

from __future__ import annotations

from collections.abc import Mapping

from plexrl.types import PlexrlError, Residency

LEGAL: Mapping[Residency, frozenset[Residency]] = {
    Residency.COLD: frozenset({Residency.LOADING, Residency.HOST}),
    Residency.LOADING: frozenset({Residency.DEVICE, Residency.HOST, Residency.LOST}),
    Residency.DEVICE: frozenset({Residency.OFFLOADING, Residency.LOADING, Residency.COLD, Residency.LOST}),
    Residency.OFFLOADING: frozenset({Residency.HOST, Residency.DEVICE, Residency.LOST}),
    Residency.HOST: frozenset({Residency.LOADING, Residency.SPILLING, Residency.COLD, Residency.LOST}),
    Residency.SPILLING: frozenset({Residency.NVME, Residency.LOST}),
    Residency.NVME: frozenset({Residency.HOST, Residency.COLD, Residency.LOST}),
    Residency.LOST: frozenset({Residency.COLD}),
}
"""Of one process's state. device -> loading is a new version of one bucket under a resident state; loading -> host and
offloading -> device are switches that were taken back. What is on NVMe is refilled into a slab before it is loaded."""


class IllegalTransition(PlexrlError):
    """A state was asked to go where it cannot go from where it is."""


def advance(now: Residency, to: Residency) -> Residency:
    """Returns `to`. Raises IllegalTransition when it may not follow `now`."""
    if to not in LEGAL[now]:
        raise IllegalTransition(f"state that is {now} cannot become {to}", f"It may become {', '.join(LEGAL[now])}")
    return to
