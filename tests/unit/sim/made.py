"""Results made by hand, for tests of what is drawn from them."""

from plexrl.sim.result import Bar, JobResult, Result, TurnMark
from plexrl.types import JobClass

HOUR = 3_600_000_000


def job(name: str, arrival_us: int = 0, placed_us: int = 0, end_us: int = HOUR, alone_us: int = HOUR // 2) -> JobResult:
    """A job on two GPUs."""
    return JobResult(
        job=name,
        account="lab",
        user="ada",
        kind=JobClass.NORMAL,
        gpus_train=1,
        gpus_sample=1,
        arrival_us=arrival_us,
        placed_us=placed_us,
        start_us=placed_us,
        end_us=end_us,
        steps=10,
        alone_us=alone_us,
        busy_us=HOUR // 2,
        switch_us=0,
        kept_us=0,
        tokens=1000,
    )


def result(names: tuple[str, ...] = ("one", "two"), gpus: int = 4, policy: str = "plexrl", **changed: object) -> Result:
    """Jobs in turn on all GPUs; GPUs n1:0 and n1:1 do the same thing, the others are a little later."""
    bars, marks, slot = [], [], HOUR // 10
    for number in range(10):
        who = names[number % len(names)]
        for gpu in range(gpus):
            late = 0 if gpu < 2 else gpu * slot // 10
            begin = number * slot + late
            bars.append(Bar(f"n1:{gpu}", begin, begin + slot // 10, "switch", f"{who}/0", who))
            bars.append(Bar(f"n1:{gpu}", begin + slot // 10, begin + slot // 2, "busy", f"{who}/0", who))
            bars.append(Bar(f"n1:{gpu}", begin + slot // 2, min(HOUR, begin + slot), "kept", f"{who}/0", who))
        marks.append(TurnMark(number * slot, f"{who}/0", False, "switch"))
        marks.append(TurnMark(number * slot + slot // 2, f"{who}/0", True, "drained"))
    wall = gpus * HOUR
    fields: dict = {
        "policy": policy,
        "placement": "spread",
        "order": "hrrs",
        "workload": "made",
        "digest": "0" * 64,
        "seed": 1,
        "gpus": gpus,
        "wall_us": HOUR,
        "held_us": wall,
        "classes": {
            "busy": wall * 4 // 10,
            "switch": wall // 10,
            "kept": wall // 2,
            "idle": 0,
            "startup": 0,
            "drain": 0,
        },
        "jobs": tuple(job(name, placed_us=number * slot) for number, name in enumerate(names)),
        "switches": 10,
        "prefetches": 0,
        "builds": 2,
        "pauses": 0,
        "gathers": 0,
        "relocations": 0,
        "hidden_us": 0,
        "train_busy_us": wall * 2 // 10,
        "train_held_us": wall,
        "jobs_refused": {},
        "events": 100,
        "wall_s": 0.1,
        "timeline": tuple(bars),
        "marks": tuple(marks),
    }
    return Result(**(fields | changed))
