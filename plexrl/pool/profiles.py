"""What worker groups turned out to need and how fast nodes move state: kept for the next, and for the next pool."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct, structs

from plexrl.memory.pages import align_up
from plexrl.pool.core import Core
from plexrl.scheduler import Scheduler
from plexrl.scheduler.bandwidth import Link
from plexrl.scheduler.load import ONE, share
from plexrl.types import GroupSpec, Role, records

log = logging.getLogger("plexrl.head")
EVERYBODY = "*"
_MEMORY = 100  # steps that an old profile weighs at most beside a new one (ours)
# Residual bytes of a process on a GPU, all ours: what is promised for a first group of its kind, and what is promised
# beside what the last ones were seen to keep. Libraries load kernels and make workspaces on first use, after a build.
_FIRST_RESIDUAL = 2 << 30
_RESIDUAL_MARGIN, _RESIDUAL_PART = 256 << 20, 4


class Key(Struct, frozen=True):
    """Whose group of what. user: of the job that owns it; `*` for groups that all jobs share."""

    user: str
    base: str
    role: Role
    kind: str


class Profile(Struct, frozen=True, kw_only=True):
    """duty: share of the time that a gang is busy when its job runs alone. service_us: of a turn. think_us: from the
    last result to the next call. steps: optim_steps or rollouts that it was learnt from. expected: the duty that the
    newest group was placed by.
    """

    duty: float
    service_us: int
    think_us: int
    steps: int
    expected: float

    @property
    def error(self) -> float:
        """How far the expectation was off, as a share of the time."""
        return abs(self.expected - self.duty)


class _Line(Struct, frozen=True):
    key: Key
    profile: Profile


class _Residual(Struct, frozen=True):
    key: Key
    bytes: int


class _Kept(Struct, frozen=True):
    """The file. links: by node. residuals: the most that a sleeping process of such a group was seen to keep."""

    groups: list[_Line] = []
    links: dict[str, Link] = {}
    residuals: list[_Residual] = []


def path_of(state_dir: str | Path) -> Path:
    """The file in a pool's state_dir."""
    return Path(state_dir) / "profiles.json"


def read(path: Path) -> _Kept:
    """Empty when there is no file yet, or it is none of ours, which is logged."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Kept)
    except FileNotFoundError:
        pass  # the first pool of this state_dir
    except msgspec.MsgspecError as error:
        log.error("%s is no table of profiles (%s): groups are placed by priors", path, error)
    return _Kept()


class Profiles:
    """The profiles of a pool, in state_dir. Live groups count on top of what is kept, until they end."""

    def __init__(self, core: Core):
        self._core = core
        self._path = path_of(core.layout.root)
        kept = read(self._path)
        self._kept = {line.key: line.profile for line in kept.groups}
        self._links = kept.links
        self._residuals = {line.key: line.bytes for line in kept.residuals}

    def teach(self, scheduler: Scheduler) -> None:
        """Tell a new scheduler what was known of the nodes' links when the last pool ended."""
        scheduler.bandwidth.restore(self._links)
        scheduler.floor.set_paces(scheduler.bandwidth.bands())

    def duty(self, key: Key) -> float | None:
        """The duty to expect of a new group; None when nothing of its kind was seen."""
        found = self._kept.get(key)
        return found.duty if found else None

    def residual(self, key: Key) -> int:
        """Residual bytes to promise of a new group, a multiple of 64: what was seen of its kind, and a margin.

        0 on cpu devices, where nothing stays.
        """
        if self._core.config.device.kind == "cpu":
            return 0
        seen = self._residuals.get(key)
        return _FIRST_RESIDUAL if seen is None else align_up(seen + seen // _RESIDUAL_PART + _RESIDUAL_MARGIN)

    def kept(self, group: str, size: int) -> None:
        """A process of this group was seen to keep so many bytes of its device beside its extent, or asleep."""
        placed = self._core.book.groups[group].placed
        key = self._key(placed)
        if size > self._residuals.get(key, 0):
            self._residuals[key] = size
        if size > placed.spec.residual_bytes:
            promised = placed.spec.residual_bytes
            log.warning("a process of %s keeps %d bytes of its device, and %d were promised", group, size, promised)

    def key(self, base: str, role: Role, kind: str, owner: str) -> Key:
        """The key of a group of this job's."""
        shared = kind == "lora" and self._core.config.scheduler.placement != "isolated"
        return Key(EVERYBODY if shared else self._core.book.jobs[owner].attached.user, base, role, kind)

    def live(self) -> Iterator[tuple[str, Key, Profile]]:
        """What groups that are there have shown so far."""
        for name, group in self._core.book.groups.items():
            seen = None if group.ended else self._seen(group.placed.spec)
            if seen is not None:
                yield name, self._key(group.placed), seen

    def end(self, group: str) -> None:
        """A group ends: what it has shown is kept. Called while the scheduler still knows it."""
        placed = self._core.book.groups[group].placed
        seen = self._seen(placed.spec)
        if seen is not None:
            key = self._key(placed)
            self._kept[key] = _merged(self._kept.get(key), seen)

    def save(self) -> None:
        """Write the file, with what live groups and links have shown so far. Placement goes by the latter from now."""
        found = dict(self._kept)
        for _, key, seen in self.live():
            found[key] = _merged(found.get(key), seen)
        scheduler = self._core.scheduler
        links = scheduler.bandwidth.links
        scheduler.floor.set_paces(scheduler.bandwidth.bands())
        if not found and not links and not self._residuals:
            return
        residuals = [_Residual(key, size) for key, size in self._residuals.items()]
        kept = _Kept([_Line(key, profile) for key, profile in found.items()], links, residuals)
        temporary = self._core.layout.run / f".profiles.{os.getpid()}"
        temporary.write_bytes(msgspec.json.encode(kept))
        os.replace(temporary, self._path)

    def _key(self, placed: records.GroupPlaced) -> Key:
        return self.key(placed.base, placed.spec.role, placed.kind, placed.spec.owner)

    def _seen(self, spec: GroupSpec) -> Profile | None:
        gangs = [gang for gang in self._core.scheduler.groups.get(spec.group, ()) if gang.duty is not None]
        if not gangs:
            return None
        thinks = [think.mean for gang in gangs for think in gang.think.values()]
        return Profile(
            duty=sum(gang.duty for gang in gangs) / len(gangs),
            service_us=sum(gang.service.mean for gang in gangs) // len(gangs),
            think_us=sum(thinks) // len(thinks) if thinks else 0,
            steps=sum(gang.steps for gang in gangs),
            expected=share(spec.duty, spec.role) / ONE,
        )


def _merged(old: Profile | None, new: Profile) -> Profile:
    """The mean by steps; of old ones only the newest count."""
    if old is None:
        return new
    weight = min(old.steps, _MEMORY) / (min(old.steps, _MEMORY) + new.steps)

    def mean(name: str) -> float:
        return weight * getattr(old, name) + (1 - weight) * getattr(new, name)

    return structs.replace(
        new,
        duty=mean("duty"),
        service_us=round(mean("service_us")),
        think_us=round(mean("think_us")),
        steps=old.steps + new.steps,
    )
