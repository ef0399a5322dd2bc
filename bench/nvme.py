"""`python -m bench.nvme [--json]`: spilling a slab to a file and back, beside plain direct writes and reads.

Plain: the same bytes from and to the same memory, chunks and requests under way; no checksums, budget or atomic name.
What is read is the spilled file itself; what is written goes where the last file has just been removed. Both matter:
disks have faster and slower places, and scattered pages make small requests. In every repeat each of the four runs
once, and who goes first changes. What came back is compared with what went.
"""

import argparse
import functools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from plexrl.memory.arena import Arena
from plexrl.memory.nvme import WORKERS, Tier
from plexrl.memory.nvmefile import CHUNK, header_bytes
from plexrl.memory.pages import PAGE, align_up, create_memfd
from plexrl.types import BadInput, PlexrlError

MIB = 1 << 20
SIZES = (256 * MIB, 1024 * MIB)
REPEATS = 8
KEYS = ("plain_write_gbs", "spill_gbs", "plain_read_gbs", "refill_gbs")


def measure(folder: Path, size: int, repeats: int, say: Callable[[str], None]) -> dict[str, Any]:
    """One row: medians over `repeats` turns in gigabytes (1e9) per second, and the ratios of those medians."""
    whole = align_up(size, PAGE)
    arena = Arena(create_memfd("bench", whole), whole)
    tier = Tier(arena, folder / "tier", 2 * (whole + header_bytes(whole)))
    (inside,) = (folder / "tier").iterdir()
    try:
        with arena.bytes_of(arena.alloc("state", size, os.getuid())) as data:
            # Noise: disks and what is below them have their ways with zeros and repeats.
            data[:size] = np.random.default_rng(1).bytes(size)
            expected = xxhash.xxh3_128_digest(data)
        turns = []
        for turn in range(repeats + 1):
            # The first one finds memory and disk cold and does not count.
            found = _turn(inside, arena, tier, size, ours_first=turn % 2 == 0)
            with arena.bytes_of(arena.get("state")) as data:
                if xxhash.xxh3_128_digest(data) != expected:
                    raise PlexrlError("what came back is not what went", "Report this")
            if turn:
                turns.append(found)
                rates = (f"{key} {size / seconds / 1e9:.2f}" for key, seconds in zip(KEYS, found, strict=True))
                say(f"{turn}/{repeats}: {', '.join(rates)}")
        rate = dict(zip(KEYS, (size / statistics.median(each) / 1e9 for each in zip(*turns, strict=True)), strict=True))
        ratios = {
            "spill_ratio": rate["spill_gbs"] / rate["plain_write_gbs"],
            "refill_ratio": rate["refill_gbs"] / rate["plain_read_gbs"],
        }
        measured = {key: round(value, 3) for key, value in (rate | ratios).items()}
        return {"bytes": size, "repeats": repeats, "direct": tier.direct, **measured}
    finally:
        tier.close()


def _turn(inside: Path, arena: Arena, tier: Tier, size: int, ours_first: bool) -> tuple[float, ...]:
    """Seconds of each of KEYS, once. inside: the tier's own folder, in which it keeps its files."""
    direct = os.O_DIRECT if tier.direct else 0
    kept = inside / "kept"
    step = -1 if ours_first else 1
    found: dict[str, float] = {}

    def write() -> None:
        with arena.bytes_of(arena.get("state")) as data:
            found["plain_write_gbs"] = _plain(kept, os.O_WRONLY | os.O_CREAT | direct, data, os.pwrite)
        _gone(inside, kept)

    def read() -> None:
        # Where the state lay, or lies: then its bytes are overwritten with themselves.
        place = arena.get("state") or arena.alloc("place", size, os.getuid())
        with arena.bytes_of(place) as data:
            start = header_bytes(len(data))
            move = functools.partial(_read, start=start)
            found["plain_read_gbs"] = _plain(kept, os.O_RDONLY | direct, data, move)
        arena.free("place")

    def refill() -> None:
        found["refill_gbs"] = tier.refill("state")[2]
        tier.free_bytes()  # returns when the file's first name is gone

    def spill() -> None:
        found["spill_gbs"] = tier.spill("state")[1]
        # A second name, so that it can be read after it was refilled.
        (file,) = inside.iterdir()
        os.link(file, kept)
        for move in (read, refill)[::step]:
            move()
        _gone(inside, kept)

    for move in (write, spill)[::step]:
        move()
    return tuple(found[key] for key in KEYS)


def _gone(folder: Path, path: Path) -> None:
    """Remove a file, and have the file system know that its place is free."""
    path.unlink()
    fd = os.open(folder, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def _read(fd: int, piece: memoryview, at: int, start: int) -> int:
    return os.preadv(fd, [piece], start + at)


def _plain(path: Path, flags: int, data: memoryview, move: Callable[[int, memoryview, int], int]) -> float:
    """Seconds of one file written and synced, or read, with as much under way as the tier has."""
    begun = time.perf_counter()
    fd = os.open(path, flags, 0o600)
    try:
        with ThreadPoolExecutor(WORKERS) as workers:

            def one(at: int) -> int:
                return move(fd, data[at : at + CHUNK], at)

            moved = sum(workers.map(one, range(0, len(data), CHUNK)))
        if moved != len(data):
            raise PlexrlError(f"{moved} of {len(data)} bytes of {path} were moved", "Look at the disk")
        if flags & os.O_WRONLY:
            os.fsync(fd)
    finally:
        os.close(fd)
    return time.perf_counter() - begun


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.nvme", description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, help="on the disk to measure (default: TMPDIR, else /var/tmp)")
    parser.add_argument("--mib", type=int, action="append", help="size of a slab; may be repeated")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    args = parser.parse_args(argv)
    where = args.dir or Path(os.environ.get("TMPDIR", "/var/tmp"))
    sizes = [mib * MIB for mib in args.mib] if args.mib else SIZES
    try:
        if min(*sizes, args.repeats) < 1:
            raise BadInput("sizes and repeats are positive", "Leave them out")
        if not where.is_dir():
            raise BadInput(f"{where} is no folder", "Give one with --dir")
        with tempfile.TemporaryDirectory(prefix="bench-nvme.", dir=where) as folder:
            rows = [
                measure(
                    Path(folder),
                    size,
                    args.repeats,
                    lambda line, size=size: print(f"bench.nvme: {size // MIB} MiB, {line} GB/s", file=sys.stderr),
                )
                for size in sizes
            ]
    except PlexrlError as error:
        print(f"bench.nvme: {error}", file=sys.stderr)
        return error.exit_code
    if args.json:
        print(json.dumps({"where": str(where), "chunk_bytes": CHUNK, "under_way": WORKERS, "rows": rows}))
        return 0
    print(f"Slabs to files in {where} and back, {'past the page cache' if rows[0]['direct'] else 'NOT direct'}; GB/s")
    print(f"{'bytes':>14} {'plain write':>12} {'spill':>7} {'ratio':>6} {'plain read':>11} {'refill':>7} {'ratio':>6}")
    for row in rows:
        print(
            f"{row['bytes']:>14,} {row['plain_write_gbs']:>12.2f} {row['spill_gbs']:>7.2f} {row['spill_ratio']:>6.2f} "
            f"{row['plain_read_gbs']:>11.2f} {row['refill_gbs']:>7.2f} {row['refill_ratio']:>6.2f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
