"""`python -m bench.switch --device cpu [--json]`: what a switch between two processes costs on the cpu device.

A regression guard: it holds the hot path near a plain copy, free of allocations and of clean bytes. It says nothing
about GPUs; `--device cuda` does. `--soak`: 1,000 switches, and what they left behind.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator

import psutil

from bench.switch_cuda import Peer
from bench.switch_rank import layout
from bench.switch_serve import rate
from plexrl.memory.arena import Arena
from plexrl.memory.gate import GATE_BYTES
from plexrl.memory.pages import PAGE, align_up, create_memfd
from plexrl.memory.transfer import ENVIRON
from plexrl.types import DoesNotFit, PlexrlError

GIB = 1 << 30
ROWS = ((GIB, 30), (GIB, 300), (GIB, 3000), (4 * GIB, 300), (8 * GIB, 3000))
"""(bytes, tensors)."""
REPEATS = 5
SWITCHES = 1000
SOAK_BYTES = 8 << 20
PROCESSES_BYTES = GIB
"""What two processes with torch, and the parent, take beside the states."""
_PROGRAM = (sys.executable, "-m", "bench.switch_rank")
RANK = ("env", *(f"{name}={value}" for name, value in ENVIRON.items()), *_PROGRAM)
NAIVE = ("env", "MALLOC_MMAP_THRESHOLD_=65536", *_PROGRAM)
"""Fresh memory is the kernel's; with its own idea of a threshold malloc hands out again what was freed just before."""

Say = Callable[[str], None]


@contextlib.contextmanager
def pair(total: int, tensors: int, slabs: int = 2, **more: object) -> Iterator[tuple[list[Peer], dict[str, int]]]:
    """Two ranks with a state each, both asleep, on the same bytes of one device; and the descriptors by name.

    slabs: 1 for one state that goes from rank to rank. Raises DoesNotFit without memory for the device and the slabs.
    """
    state = layout(total, tensors).size
    needed, free = (1 + slabs) * state + PROCESSES_BYTES, psutil.virtual_memory().available
    if needed > free:
        raise DoesNotFit(f"a device and {slabs} states of {state} bytes take {needed} bytes; {free} are free")
    slab = align_up(state, PAGE)
    sizes = {"device": slab, "arena": slabs * slab, "gate": GATE_BYTES}
    with contextlib.ExitStack() as stack:
        fds = {}
        for name, size in sizes.items():
            fds[name] = create_memfd(f"bench-{name}", size)
            stack.callback(os.close, fds[name])
        arena = Arena(fds["arena"], sizes["arena"])
        stack.callback(arena.close)
        shared = {**fds, **more, "bytes": total, "tensors": tensors, "device_bytes": slab, "arena_bytes": slabs * slab}
        ranks = []
        for seat in range(2):
            at = arena.alloc(f"rank {seat % slabs}", state, 0).offset
            ranks.append(Peer(RANK, {**shared, "seat": seat, "slab": at}, tuple(fds.values())))
            stack.callback(ranks[-1].close)
        for rank in ranks:
            rank.answer()
        yield ranks, fds


def exchange(goes: Peer, comes: Peer) -> dict:
    """Both are told at once. seconds: from the first order to the last byte; first_ms of who comes."""
    goes.tell("leave")
    comes.tell("enter")
    left, came = goes.answer(), comes.answer()
    seconds = max(left["ended"], came["ended"]) - min(left["begun"], came["begun"])
    return {"seconds": seconds, "first_ms": came["first_ms"], "waited_s": came["waited_s"]}


def measure(total: int, tensors: int, repeats: int, say: Say, slabs: int = 2, **more: object) -> dict:
    """One row. GB/s are 1e9 bytes copied per second, one thread, touched memory, the best of `repeats` for each.

    The best, because whatever else the machine does can only make a copy slower. Seconds are medians.
    slabs: with 1, for want of memory, one state goes out of one process and into the other, and nothing is exchanged.
    Raises DoesNotFit without the memory, PlexrlError when other bytes arrive than were sent.
    """
    with pair(total, tensors, slabs, **more) as (ranks, _):
        one, other = ranks
        digests = []
        for seed, rank in enumerate(ranks[:slabs]):
            rank.ask("enter")
            digests.append(rank.ask("write", seed=seed)["digest"])
            rank.ask("leave")
        one.ask("enter")
        plain, out, back, first_ms, crossed = [], [], [], [], []
        for _ in range(repeats):
            plain.append(rate(one.ask("plain")))
            out.append(rate(one.ask("leave")))
            if slabs == 1:
                one, other = other, one
                one.ask("adopt")
            came = one.ask("enter")
            back.append(rate(came))
            first_ms.append(came["first_ms"])
            say(f"{total:,} bytes: plain {plain[-1]:.1f}, out {out[-1]:.1f}, in {back[-1]:.1f} GB/s")
        if slabs == 2:
            for _ in range(repeats):
                crossed.append(exchange(one, other))
                one, other = other, one
                say(f"exchange {crossed[-1]['seconds']:.2f} s, first layer after {crossed[-1]['first_ms']:.1f} ms")
            first_ms = [seen["first_ms"] for seen in crossed]
        for rank, wanted in zip(ranks if slabs == 2 else [one], digests, strict=True):
            found = rank.ask("digest", where="device" if rank is one else "host")["digest"]
            if found != wanted:
                raise PlexrlError(f"other bytes than were sent: digest {found} instead of {wanted}")
        say("counting allocations and bytes")
        made = one.ask("allocations")["count"]
        step = one.ask("step")
        clean = one.ask("clean")["bytes"]
    say("per-tensor copies into fresh memory")
    naive = Peer(NAIVE, {"bytes": total, "tensors": tensors}, ())
    try:
        naive.answer()
        seconds = min(naive.ask("switch")["seconds"] for _ in range(2))
    finally:
        naive.close()
    gbs = {"plain_copy_gbs": plain, "offload_gbs": out, "load_gbs": back}
    size = layout(total, tensors).size
    ours = [size / 1e9 / a + size / 1e9 / b for a, b in zip(out, back, strict=True)]
    return {
        "bytes": size,
        "tensors": tensors,
        **{name: round(max(seen), 2) for name, seen in gbs.items()},
        "offload_share": round(max(out) / max(plain), 3),
        "load_share": round(max(back) / max(plain), 3),
        "first_layer_ms": round(statistics.median(first_ms), 2),
        "exchange_seconds": round(statistics.median(seen["seconds"] for seen in crossed), 3) if crossed else None,
        "clean_bytes_out": clean,
        "hot_path_allocations": made,
        "bytes_moved": step["moved"],
        "bytes_minimum": step["minimum"],
        "naive_seconds": round(seconds, 3),
        "ours_seconds": round(statistics.median(ours), 3),
        "repeats": repeats,
    }


def measure_all(say: Say) -> dict:
    """Every row that fits, and why the others do not."""
    rows, refused = [], []
    for total, tensors in ROWS:
        for slabs in (2, 1):
            try:
                rows.append(measure(total, tensors, REPEATS, say, slabs))
                break
            except DoesNotFit as error:
                say(str(error))
                why = str(error)
        else:
            refused.append({"bytes": total, "tensors": tensors, "why": why})
    return {"device": "cpu", "says": "regression guard, says nothing about GPUs", "rows": rows, "refused": refused}


def soak(switches: int, say: Say) -> dict:
    """What `switches` exchanges left behind, all processes together: growth of bytes, descriptors and mappings."""
    with pair(SOAK_BYTES, 300) as (ranks, fds):
        one, other = ranks
        for seed, rank in enumerate(ranks):
            rank.ask("enter")
            rank.ask("write", seed=seed)
            rank.ask("leave")
        one.ask("enter")

        def held() -> dict[str, int]:
            seen = [rank.ask("usage") for rank in ranks]
            total = {name: sum(usage[name] for usage in seen) for name in seen[0]}
            shared = {name: os.fstat(fd).st_blocks * 512 for name, fd in fds.items()}
            return {"device_bytes": shared["device"], **total, "host_bytes": total["host_bytes"] + shared["arena"]}

        warm = max(switches // 10, 10)
        held()  # looking costs memory too, the first time
        for i in range(warm + switches):
            if i == warm:
                before = held()
            exchange(one, other)
            one, other = other, one
            if (i - warm) % 100 == 0:
                say(f"switch {max(i - warm, 0)} of {switches}")
        after = held()
    return {"switches": switches, "held": before, "growth": {name: after[name] - before[name] for name in before}}


def table(figures: dict) -> str:
    """The rows for people."""
    lines = ["Switching between two processes on the cpu device, one thread each", figures["says"]]
    lines.append(
        "        bytes tensors   plain     out      in GB/s first ms  exchange s  clean  allocs  moved/min  naive/ours"
    )
    for row in figures["rows"]:
        lines.append(
            f"{row['bytes']:>13,} {row['tensors']:>7} {row['plain_copy_gbs']:>7.2f} {row['offload_gbs']:>7.2f} "
            f"{row['load_gbs']:>7.2f} {row['first_layer_ms']:>13.1f} {row['exchange_seconds'] or '-':>11} "
            f"{row['clean_bytes_out']:>6} {row['hot_path_allocations']:>7} "
            f"{row['bytes_moved'] / row['bytes_minimum']:>10.3f} {row['naive_seconds'] / row['ours_seconds']:>11.1f}"
        )
    lines += [f"not measured: {row['bytes']:,} bytes: {row['why']}" for row in figures["refused"]]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.switch", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="whose memory (default: cpu)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument("--soak", action="store_true", help=f"{SWITCHES} switches on the cpu device instead")
    args = parser.parse_args(argv)

    def say(line: str) -> None:
        print(f"bench.switch: {line}", file=sys.stderr)

    try:
        if args.soak:
            figures = soak(SWITCHES, say)
            text = "\n".join(
                f"{name}: {grown:+d} after {SWITCHES} switches" for name, grown in figures["growth"].items()
            )
        elif args.device == "cuda":
            from bench import switch_cuda

            figures = switch_cuda.measure(say)
            text = switch_cuda.table(figures)
        else:
            figures = measure_all(say)
            text = table(figures)
    except PlexrlError as error:
        print(f"bench.switch: {error}", file=sys.stderr)
        return error.exit_code
    print(json.dumps(figures) if args.json else text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
