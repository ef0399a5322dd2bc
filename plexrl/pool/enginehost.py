"""An engine host: the process of one rank, forked by its node's nursery.

The leader (rank 0) has a connection to the head and steps its gang; the other ranks follow. It outlives a head:
outcomes are kept until a head has them on disk. It ends with its agent (lifeline pipe), with its leader, or when told.
"""

import asyncio
import logging
import os
import sys
import threading
import time
from pathlib import Path

import msgspec
import uvloop

from plexrl.engines.protocol import Undone
from plexrl.pool import messages as m
from plexrl.pool.harden import harden
from plexrl.types import Moved, PlexrlError, Role, Slab

log = logging.getLogger("plexrl.enginehost")
_FILL_S = 600.0


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What the agent tells a new rank.

    ready: the slab of the base's ready mark. wait_for_base: another gang fills it. first_on_node: lowest rank there.
    gate_seat: its own, at the gate of its GPU. gpu: CUDA's name of that one; of a pretend GPU empty, and device_fd its
    memory.
    """

    gang: str
    build: str
    node: str
    first_on_node: bool
    engine: dict[str, object]
    ready: Slab | None
    wait_for_base: bool
    gpu: str
    device_fd: int
    arena_fd: int
    arena_bytes: int
    gate_fd: int
    gate_seat: int
    lifeline_fd: int
    control: str
    keys: str
    paranoid: bool


def serve(packed: bytes) -> int:
    """Build the engine, then serve. packed: Settings as msgpack. Exit code 0 in order, 3 when it could not be built."""
    settings = msgspec.msgpack.decode(packed, type=Settings)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    harden()
    threading.Thread(target=_end_with, args=(settings.lifeline_fd,), daemon=True).start()
    try:
        host, kept, follower = _build(settings)
    except PlexrlError as error:
        log.error("the engine was not built: %s", error)
        return 3
    if host is None:
        follower()
    else:
        uvloop.run(_Leader(settings, host, kept).serve())
    logging.shutdown()
    # The nursery ends us by _exit: torch's threads abort now and then in an ordinary one.
    return 0


def _end_with(lifeline: int) -> None:
    os.read(lifeline, 1)
    os._exit(0)


def _build(settings: Settings):
    """The leader's host and what the gang's processes keep of their devices, or the follower's loop."""
    from plexrl.engines.protocol import EngineSpec
    from plexrl.pool.lockstep import Lockstep
    from plexrl.pool.samplehost import SampleHost
    from plexrl.pool.trainhost import TrainHost, TrainRank, follow

    spec = msgspec.convert(settings.engine, EngineSpec)
    engine, arena, kept = _engine(settings, spec)
    if spec.role is Role.SAMPLE:
        return SampleHost(engine, settings.node, arena), kept, None
    rank = TrainRank(engine, spec.rank, settings.node, settings.first_on_node, arena)
    lockstep = Lockstep(spec.rank, spec.world, f"{spec.rendezvous}.steps", spec.interface)
    told = lockstep.collect(kept.to_bytes(8, "little"))
    if spec.rank == 0:
        return TrainHost(rank, lockstep), max(int.from_bytes(each, "little") for each in told), None
    return None, 0, lambda: follow(rank, lockstep)


def _engine(settings: Settings, spec):
    from plexrl.engines.protocol import build

    if spec.engine == "noop":
        return build(spec, None, None), None, 0
    import torch

    from plexrl.pool import rankplace

    torch.set_num_threads(1)
    place = rankplace.take(settings, spec)
    mark = place.arena.view(settings.ready) if settings.ready else None
    if mark is not None and settings.wait_for_base:
        _wait_filled(mark)
    engine = build(spec, *place)
    if mark is not None:
        mark[0] = 1
    return engine, place.arena, rankplace.kept(place, spec)


def _wait_filled(mark) -> None:
    deadline = time.monotonic() + _FILL_S
    while not int(mark[0]):
        if time.monotonic() > deadline:
            raise PlexrlError(f"the base weights were not filled within {_FILL_S:.0f} s by the rank that should")
        time.sleep(0.05)


class _Leader:
    """Serves the head: messages between two steps, steps while there is work."""

    def __init__(self, settings: Settings, host, kept: int):
        from plexrl.pool.peer import HeadLink, Replies

        self._settings = settings
        self._host = host
        self._kept = kept
        self._resident = True
        self._wake = asyncio.Event()
        self._exit = False
        self._replies = Replies()
        self._link = HeadLink(
            Path(settings.control), Path(settings.keys), f"gang:{settings.gang}", self._hello, self._take
        )

    async def serve(self) -> None:
        linking = asyncio.create_task(self._link.run())
        try:
            while not self._exit:
                if self._host.busy:
                    self._report(self._host.step())
                    for told in self._host.progress():
                        self._link.send(told, keep=False)
                    await asyncio.sleep(0)
                else:
                    self._wake.clear()
                    await self._wake.wait()
            self._host.exit()
        finally:
            linking.cancel()
            await asyncio.gather(linking, return_exceptions=True)

    def _hello(self) -> m.HostHello:
        return m.HostHello(
            gang=self._settings.gang,
            build=self._settings.build,
            resident=self._resident,
            deployments=tuple(sorted(self._host.deployments)),
            versions=tuple(sorted(self._host.versions)),
            outcomes=tuple(self._host.outcomes.values()),
            queue=self._host.held(),
            device_bytes=int(self._settings.engine["extent_size"]),
            kept=self._kept,
        )

    def _report(self, outcomes: list[m.Outcome]) -> None:
        for outcome in outcomes:
            self._link.send(m.Ended(outcome=outcome))

    def _take(self, message: m.Message) -> None:
        self._wake.set()
        match message:
            case m.Run():
                self._report(self._host.run(message.works))
            case m.Pause():
                self._link.send(m.Paused(build=self._settings.build, unfinished=self._host.pause()))
            case m.Order():
                new, reply = self._replies.take(message.id)
                if new:
                    reply = self._replies.give(self._obey(message))
                self._link.send(reply)
            case m.Ack():
                for call in message.ids:
                    self._host.outcomes.pop(call, None)
            case m.Cancel():
                self._report(self._host.cancel(message.call))
            case m.Exit():
                self._exit = True

    def _obey(self, order: m.Order) -> m.Reply:
        try:
            if order.verb in ("offload", "load") and self._resident == (order.verb == "load"):
                return m.Reply(id=order.id, ok=True, value={"moved": [Moved()]})
            value = self._host.order(order.verb, order.args)
        except PlexrlError as error:
            category = "undone" if isinstance(error, Undone) else "user" if error.exit_code == 2 else "server"
            category = getattr(error, "category", category)
            return m.Reply(id=order.id, ok=False, error=str(error), category=category)
        if order.verb in ("offload", "load"):
            self._resident = order.verb == "load"
        return m.Reply(id=order.id, ok=True, value=value)
