"""The part of `python -m bench.switch --device cuda` that needs a GPU: what an exchange between two processes costs.

Needs nothing but torch and one GPU; under three minutes. References of the same run: plain pinned copies in a process
of their own, and torch_memory_saver and cuda-checkpoint where they are installed.
"""

import contextlib
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence

import psutil
import torch

from bench.switch_rank import layout
from bench.switch_serve import rate
from plexrl.memory.arena import Arena
from plexrl.memory.gate import GATE_BYTES
from plexrl.memory.pages import PAGE, align_up, create_memfd
from plexrl.types import DoesNotFit, PlexrlError, Unavailable

GIB = 1 << 30
ROWS = ((GIB, 30), (4 * GIB, 300), (8 * GIB, 3000))
"""(bytes, tensors). What is measured once is measured with the first that fits."""
REPEATS = 5
LOOP_S = 2.0
RANK = (sys.executable, "-m", "bench.switch_gpurank")
ASLEEP = {
    "torch_memory_saver": lambda: importlib.util.find_spec("torch_memory_saver") is not None,
    "cuda-checkpoint": lambda: shutil.which("cuda-checkpoint") is not None,
}
"""References that bench.asleep measures, and whether each is installed."""

Say = Callable[[str], None]


class Peer:
    """One rank process."""

    def __init__(self, command: Sequence[str], settings: dict, fds: tuple[int, ...]) -> None:
        self._process = subprocess.Popen(
            [*command, json.dumps(settings)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=fds
        )

    def ask(self, do: str, **how: object) -> dict:
        """Have it done and read the answer."""
        self.tell(do, **how)
        return self.answer()

    def tell(self, do: str, **how: object) -> None:
        """Have it begun."""
        self._process.stdin.write(json.dumps({"do": do, **how}) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict:
        """Raises PlexrlError with what went wrong over there."""
        line = self._process.stdout.readline()
        if not line:
            raise PlexrlError(f"a rank of the benchmark ended with status {self._process.wait()}")
        said = json.loads(line)
        if "error" in said:
            raise PlexrlError(f"a rank of the benchmark: {said['error']}")
        return said

    def close(self) -> None:
        """It ends with its stdin."""
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def measure(say: Say) -> dict:
    """All figures, see `table`. Raises Unavailable without a GPU, DoesNotFit on a small one, PlexrlError otherwise."""
    if not torch.cuda.is_available():
        raise Unavailable("torch sees no GPU here", "Run it on a machine with one, with a torch that is built for CUDA")
    # In processes of their own: this one's context would lie on the GPU beside those that are measured.
    asked = "import torch; print(*torch.cuda.mem_get_info(0))"
    free = int(_run([sys.executable, "-c", asked], "mem_get_info").split()[0])
    rows, refused, once = [], [], {}
    for total, tensors in ROWS:
        needs = (3 * total, 5 * total)
        there = (free, psutil.virtual_memory().available)
        if any(need > have for need, have in zip(needs, there, strict=True)):
            why = f"takes {needs[0]} bytes of the GPU and {needs[1]} of the host; {there[0]} and {there[1]} are free"
            refused.append({"bytes": total, "tensors": tensors, "why": why})
            continue
        say(f"{total:,} bytes in {tensors} tensors: plain copies, per-tensor copies")
        plain = json.loads(_run([sys.executable, "-m", "bench.switch_plain", str(total), str(tensors)], "switch_plain"))
        row, alone = exchange(say, total, tensors, REPEATS, LOOP_S if not once else 0.0)
        once = once or {"gpu": plain.pop("gpu"), **alone}
        plain.pop("gpu", None)
        rows.append({**row, **plain, **_shares(row, plain)})
    if not rows:
        raise DoesNotFit(refused[0]["why"], "Free memory on the GPU and the host")
    for name, installed in ASLEEP.items():
        once[name] = None
        if installed():
            say(name)
            with contextlib.suppress(PlexrlError):
                once[name] = json.loads(_run([sys.executable, "-m", "bench.asleep", name, str(GIB)], name))
    return {"device": "cuda", "repeats": REPEATS, **once, "rows": rows, "refused": refused}


def exchange(
    say: Say, total: int, tensors: int, repeats: int, loop_s: float, command: Sequence[str] = RANK
) -> tuple[dict, dict]:
    """What needs the two processes: a row, and what is measured once (only with loop_s, in seconds; else empty).

    total: bytes of each state. Raises PlexrlError when other bytes arrived than were sent.
    """
    with _two(command, total, tensors) as (ranks, ready):
        one, other = ranks
        new = ready[1]["residual_bytes"]
        digests = [_first(rank, seed) for seed, rank in enumerate(ranks)]
        say("each direction alone")
        out, back, first = [], [], []
        one.ask("enter")
        for _ in range(repeats):
            out.append(rate(one.ask("leave")))
            came = one.ask("enter")
            back.append(rate(came))
            first.append(came["first_ms"])
        say("both directions, between the two processes")
        crossed = []
        for _ in range(repeats):
            crossed.append(_cross(one, other))
            one, other = other, one
        holder = ranks.index(one)
        _check(one, "device", digests[holder])
        _check(other, "host", digests[1 - holder])
        alone = _once(say, one, other, loop_s) if loop_s else {}
        _check(one, "device", digests[holder])
        say("allocations and bytes")
        made, step = one.ask("allocations")["count"], one.ask("step")
        clean = one.ask("clean")["bytes"]
        asleep = max(rank.ask("residual")["residual_bytes"] for rank in ranks)
        if alone:
            mapping = one.ask("mapping")
            gib = ready[0]["bytes"] / GIB
            alone |= {
                "register_s_per_gib": round(statistics.mean(said["register_s"] for said in ready) / gib, 3),
                "map_s_per_gib": round(mapping["map_s"], 4),
                "unmap_s_per_gib": round(mapping["unmap_s"], 4),
                "residual_bytes_new": new,
                "residual_bytes_asleep": asleep,
            }
    state, offload, load = ready[0]["bytes"], statistics.median(out), statistics.median(back)
    longer = state / min(offload, load) / 1e9
    row = {
        "bytes": state,
        "tensors": ready[0]["tensors"],
        "offload_gbs": round(offload, 2),
        "load_gbs": round(load, 2),
        "first_layer_ms": round(statistics.median(first), 2),
        "exchange_seconds": round(statistics.median(crossed), 4),
        "exchange_ratio": round(statistics.median(crossed) / longer, 3),
        "clean_bytes_out": clean,
        "hot_path_allocations": made,
        "bytes_moved": step["moved"],
        "bytes_minimum": step["minimum"],
        "ours_seconds": round(state / offload / 1e9 + state / load / 1e9, 4),
    }
    return row, alone


def table(figures: dict) -> str:
    """The figures for people."""

    def line(what: str, value: object, note: str = "") -> str:
        return f"  {what:<38} {value!s:>14}  {note}".rstrip()

    lines = [
        f"Switching between two processes on {figures['gpu']}; medians of {figures['repeats']}",
        "GB/s are 1e9 bytes a second; plain: pinned copies in one process, same run; digests equal on both sides",
        "        bytes tensors  plain out  in  both    out  share     in  share  first ms  exchange s  ratio  clean"
        "  allocs  moved/min  naive/ours",
    ]
    for row in figures["rows"]:
        lines.append(
            f"{row['bytes']:>13,} {row['tensors']:>7} {row['plain_out_gbs']:>6.1f} {row['plain_in_gbs']:>6.1f} "
            f"{row['plain_both_gbs']:>5.1f} {row['offload_gbs']:>6.1f} {row['offload_share']:>6.2f} "
            f"{row['load_gbs']:>6.1f} {row['load_share']:>6.2f} {row['first_layer_ms']:>9.1f} "
            f"{row['exchange_seconds']:>11.3f} {row['exchange_ratio']:>6.2f} {row['clean_bytes_out']:>6} "
            f"{row['hot_path_allocations']:>7} {row['bytes_moved'] / row['bytes_minimum']:>10.3f} "
            f"{row['naive_seconds'] / row['ours_seconds']:>11.1f}"
        )
    lines.append("aims: share 0.9 or more, ratio (exchange to its longer direction) 1.2 or less")
    lines += [f"not measured: {row['bytes']:,} bytes: {row['why']}" for row in figures["refused"]]
    mib = 1 << 20
    asleep, new = figures["residual_bytes_asleep"] // mib, figures["residual_bytes_new"] // mib
    lines += [
        line("kernels beside the other's copies", figures["kernels_beside_copies"], "of their rate alone"),
        line("offload beside the other's kernels", figures["offload_beside_kernels"], "of its rate alone"),
        line("load beside the other's kernels", figures["load_beside_kernels"], "of its rate alone"),
        line("registering host memory, s per GiB", figures["register_s_per_gib"]),
        line("mapping, unmapping, s per GiB", f"{figures['map_s_per_gib']}, {figures['unmap_s_per_gib']}"),
        line("a sleeping process holds, MiB", asleep, f"{new} before its first switch"),
    ]
    for name in ASLEEP:
        found = figures[name]
        said = f"{found['sleep_gbs']}, {found['wake_gbs']}" if found else "not measured"
        lines.append(line(f"{name} out, in, GB/s", said, "reference"))
    return "\n".join(lines)


def _shares(row: dict, plain: dict) -> dict:
    return {
        "offload_share": round(row["offload_gbs"] / plain["plain_out_gbs"], 3),
        "load_share": round(row["load_gbs"] / plain["plain_in_gbs"], 3),
    }


def _once(say: Say, here: Peer, away: Peer, seconds: float) -> dict:
    """Copies of the one that is on the device beside kernels of the other."""
    say("copies beside the other's kernels")
    alone = away.ask("work", seconds=seconds)["per_second"]
    quiet = here.ask("loop", seconds=seconds)
    away.tell("work", seconds=seconds)
    busy = here.ask("loop", seconds=seconds)
    beside = away.answer()["per_second"]
    return {
        "kernels_beside_copies": round(beside / alone, 3),
        "offload_beside_kernels": round(busy["offload_gbs"] / quiet["offload_gbs"], 3),
        "load_beside_kernels": round(busy["load_gbs"] / quiet["load_gbs"], 3),
    }


def _first(rank: Peer, seed: int) -> int:
    """Bring it in for the first time, write, and send it home; the digest of what it has."""
    rank.ask("enter")
    written = rank.ask("write", seed=seed)["digest"]
    rank.ask("leave")
    _check(rank, "host", written)
    return written


def _cross(goes: Peer, comes: Peer) -> float:
    """Seconds from the first order to the last byte, when both are told at once."""
    goes.tell("leave")
    comes.tell("enter")
    times = [goes.answer(), comes.answer()]
    return max(t["ended"] for t in times) - min(t["begun"] for t in times)


def _check(rank: Peer, where: str, wanted: int) -> None:
    found = rank.ask("digest", where=where)["digest"]
    if found != wanted:
        raise PlexrlError(f"other bytes than were sent are on the {where}: digest {found:#x} instead of {wanted:#x}")


@contextlib.contextmanager
def _two(command: Sequence[str], size: int, tensors: int) -> Iterator[tuple[list[Peer], list[dict]]]:
    """Two ranks over one gate and one arena, both asleep, and what each said when it was ready."""
    with contextlib.ExitStack() as stack:
        state = layout(size, tensors).size
        gate = create_memfd("bench-gate", GATE_BYTES)
        stack.callback(os.close, gate)
        arena_bytes = 2 * align_up(state, PAGE)
        memory = create_memfd("bench-arena", arena_bytes)
        stack.callback(os.close, memory)
        arena = Arena(memory, arena_bytes)
        stack.callback(arena.close)
        shared = {"bytes": size, "tensors": tensors, "arena": memory, "arena_bytes": arena_bytes, "gate": gate}
        ranks = []
        for seat in range(2):
            slab = arena.alloc(f"rank {seat}", state, 0)
            settings = {**shared, "seat": seat, "slab": slab.offset, "device_bytes": state}
            ranks.append(Peer(command, settings, (memory, gate)))
            stack.callback(ranks[-1].close)
        yield ranks, [rank.answer() for rank in ranks]


def _run(command: Sequence[str], what: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired as late:
        raise PlexrlError(f"{what} was not done after {late.timeout:g} s") from late
    if done.returncode:
        raise PlexrlError(f"{what} ended with status {done.returncode}: {done.stderr.strip()[-500:]}")
    return done.stdout.strip().splitlines()[-1]
