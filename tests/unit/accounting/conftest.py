"""A small pool: two jobs of two users on two GPUs, from the allocation's start to its end."""

import pytest

from plexrl.types import CallKind, Role
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
