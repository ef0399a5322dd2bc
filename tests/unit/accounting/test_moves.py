"""What moved stands beside the sum of the GPUs' time, and changes nothing of it."""

import msgspec

from plexrl.accounting.charges import MINUTE_US
from plexrl.accounting.figures import figures
from plexrl.accounting.moves import Moves, moves
from plexrl.accounting.published import compute, for_reader
from plexrl.accounting.sweep import held, segments, spans
from plexrl.accounting.window import Window
from plexrl.accounting.words import Unit, moved_words, size
from plexrl.types import Moved, Role
from plexrl.types import records as r
from tests.unit.accounting.scene import S, Scene


def history() -> Scene:
    """Job 11.0 is busy 10 to 30 and 70 to 80, with an exposed switch before each; b comes in beside it."""
    made = Scene(gpus=("n1:0",))
    made.attach(3, "11.0")
    made.place(4, "a", Role.TRAIN)
    made.place(4, "b", Role.TRAIN)
    made.span("n1:0", 2, 8, "idle")
    made.span("n1:0", 8, 10, "switch", "a/0", j11_0=1)
    made.span("n1:0", 10, 30, "busy", "a/0", j11_0=10)
    made.span("n1:0", 30, 68, "idle")
    made.span("n1:0", 68, 70, "switch", "a/0", j11_0=1)
    made.span("n1:0", 70, 80, "busy", "a/0", j11_0=10)
    return made


def switched(made: Scene, at: float, gang: str, incoming: bool, **moved) -> None:
    made.add(r.Switched, at, gang=gang, gpu="n1:0", incoming=incoming, moved=Moved(**moved))


def found(made: Scene, until: float = 90) -> list[Moves]:
    holding = held(made.intervals(90), made.us(until))
    return moves(made.records, segments(spans(made.records, made.us(until)), holding), made.us(until))


def test_bytes_by_minute_and_only_copies_beside_work_are_hidden():
    made = history()
    switched(made, 10, "a/0", True, bytes_in=100, seconds=2.0)  # exposed
    switched(made, 20, "b/0", True, bytes_in=50, seconds=4.0, waited_s=3.0)  # one second beside a's work
    switched(made, 20, "c/0", False, bytes_out=30, bytes_clean=20, seconds=2.0)  # at the same time: counts once
    switched(made, 70, "a/0", True, bytes_in=7, seconds=2.0)
    switched(made, 71, "b/0", False, bytes_out=9, seconds=2.0)  # half of it beside work
    first, second = found(made)
    assert (first.bytes_in, first.bytes_out, first.bytes_clean, first.hidden_us) == (150, 30, 20, 2 * S)
    assert (second.bytes_in, second.bytes_out, second.hidden_us) == (7, 9, S)
    assert second.start_us == first.start_us + MINUTE_US
    assert [each.bytes_in for each in found(made, until=60)] == [150]


def test_a_copy_over_a_minutes_edge_is_hidden_in_both():
    made = history()
    made.span("n1:0", 50, 66, "busy", "a/0", j11_0=1)
    switched(made, 63, "b/0", True, bytes_in=1, seconds=5.0)
    assert [each.hidden_us for each in found(made)] == [2 * S, 3 * S]


def test_within_calls_all_gpus_of_the_gang_wait():
    made = Scene()
    made.place(4, "a", Role.TRAIN, gang_size=2)
    made.add(r.CallEnded, 12, id="x", ok=True, gang="a/0", moved_bytes=64, moved_us=S)
    made.add(r.CallEnded, 13, id="y", ok=True, gang="a/0")
    (only,) = found(made)
    assert (only.bytes_in_calls, only.in_calls_us) == (64, 2 * S)


def test_nothing_moved_is_no_minute_and_the_sums_stand_with_or_without():
    made = history()
    assert found(made) == []
    without = compute(made.records, made.intervals(90), made.us(90))
    switched(made, 20, "b/0", True, bytes_in=5 << 20, seconds=4.0)
    whole = compute(made.records, made.intervals(90), made.us(90))
    assert msgspec.structs.replace(whole, moves=[], switches=0) == msgspec.structs.replace(without, moves=[])
    told, before = figures(whole), figures(without)
    assert {k: v for k, v in told.items() if k != "moved"} == {k: v for k, v in before.items() if k != "moved"}
    assert told["moved"]["hidden_gpu_seconds"] == 4 and told["switch_gpu_seconds"] == 4
    parts = sum(told[name] for name in ("charged_gpu_seconds", "overhead_gpu_seconds", "unattributed_gpu_seconds"))
    assert parts == told["pool_gpu_seconds"]
    assert figures(for_reader(whole, 1001))["moved"] == told["moved"]
    later = figures(whole, Window(made.us(60)))
    assert later["moved"]["bytes_in"] == 0 and later["switch_gpu_seconds"] == 2
    words = moved_words(told, Unit(90))
    assert "4.0 GPU-s exposed, 5.0 % of the pool; 5 MiB in" in words and "4.0 GPU-s of copies" in words
    assert "Within calls" not in words


def test_sizes_are_readable():
    assert [size(n) for n in (0, 1 << 20, 3 << 30, 5 << 40, 5 << 50)] == [
        "0 KiB",
        "1 MiB",
        "3.0 GiB",
        "5.0 TiB",
        "5,120.0 TiB",
    ]
