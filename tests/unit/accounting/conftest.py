"""A small pool: two jobs of two users on two GPUs, from the allocation's start to its end."""

import os

import msgspec
import pytest

from plexrl.accounting.store import Ledger, Publisher, reports_of
from plexrl.pool.layout import Layout
from plexrl.types import CallKind, Role
from plexrl.wire.registry import Declared, Registry
from tests.unit.accounting.scene import Scene

TRAIN = CallKind.FORWARD_BACKWARD


@pytest.fixture
def scene():
    """Startup 0 to 10 s; ada's job 11.0 and bob's 12.0 share 10 to 90 s; the head ends at 95 s, the agents at 96 s."""
    scene = Scene(start=4)
    for gpu in scene.gpus:
        scene.span(gpu, 4, 10, "startup")
    scene.attach(10, "11.0", 1001, "ada", "ml")
    scene.attach(10, "12.0", 1002, "bob", "bio")
    scene.place(10, "a", Role.TRAIN, gang_size=2, owner="11.0")
    scene.place(10, "b", Role.TRAIN, gang_size=2, owner="12.0")
    at = 10
    for turn in range(4):
        for job, group in (("11.0", "a"), ("12.0", "b")):
            scene.call(at, job, f"{group}:{turn}", group, TRAIN, after=f"{group}:{turn - 1}" if turn else "")
            for gpu in scene.gpus:
                scene.span(gpu, at, at + 1, "switch", f"{group}/0", **{f"j{job.replace('.', '_')}": 1})
                scene.span(gpu, at + 1, at + 9, "busy", f"{group}/0", **{f"j{job.replace('.', '_')}": 10})
                scene.switched(at + 1, f"{group}/0", gpu, bytes_in=50 if turn else 0, seconds=0.5)
                scene.span(gpu, at + 9, at + 10, "kept", f"{group}/0", **{f"j{job.replace('.', '_')}": 1})
            scene.end(at + 9, job, f"{group}:{turn}", cpu=8, gang=f"{group}/0")
            at += 10
    scene.job_ended(at, "11.0")
    scene.job_ended(at, "12.0")
    for gpu in scene.gpus:
        scene.span(gpu, at, at + 5, "idle")
    scene.stop(at + 5)
    return scene


@pytest.fixture
def registry(tmp_path, scene):
    """A declared pool that has run and ended."""
    directory = tmp_path / "registry"
    directory.mkdir(mode=0o755)
    layout = Layout(tmp_path / "state")
    layout.make()
    books = Registry(directory, frozenset((os.getuid(),)))
    books.declare(
        Declared(name="lab", kind="private", owner_uid=os.getuid(), config="/none.yaml", state_dir=str(layout.root))
    )
    ledger = Ledger(layout.ledger)
    for record in scene.records:
        ledger.take(record)
    ledger.close()
    for interval in scene.intervals(93):
        (layout.agents / f"{interval.node}.jsonl").write_bytes(msgspec.json.encode(interval) + b"\n")
    Publisher(layout, reports_of(directory, "lab"), 1000).write(scene.us(95))
    for interval in scene.intervals(96):  # the agents end after the head
        with (layout.agents / f"{interval.node}.jsonl").open("ab") as file:
            file.write(msgspec.json.encode(interval) + b"\n")
    return directory
