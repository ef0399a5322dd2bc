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

from bench.switch_cudarank import layout, rate
from plexrl.memory.arena import Arena
from plexrl.memory.cuda import CHUNK
from plexrl.memory.gate import GATE_BYTES
from plexrl.memory.pages import PAGE, align_up, create_memfd
from plexrl.types import DoesNotFit, PlexrlError, Unavailable

GIB = 1 << 30
TENSORS = 300
REPEATS = 7
LOOP_S = 2.0
RANK = (sys.executable, "-m", "bench.switch_cudarank")
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
    # In a process of its own: this one's context would lie on the GPU beside those that are measured.
    asked = [sys.executable, "-c", "import torch; print(*torch.cuda.mem_get_info(0))"]
    free = int(_run(asked, "mem_get_info").split()[0])
    size = min(4 * GIB, free // 4, psutil.virtual_memory().available // 6) // GIB * GIB
    if size < GIB:
        raise DoesNotFit(
            f"{free} bytes of the GPU and {psutil.virtual_memory().available} of the host are free",
            f"It takes {4 * GIB} and {6 * GIB} of them",
        )
    say("plain pinned copies in one process")
    figures = json.loads(_run([sys.executable, "-m", "bench.switch_plain", str(size)], "bench.switch_plain"))
    figures |= exchange(say, size, TENSORS, REPEATS, LOOP_S)
    figures["offload_share"] = round(figures["offload_gbs"] / figures["plain_out_gbs"], 3)
    figures["load_share"] = round(figures["load_gbs"] / figures["plain_in_gbs"], 3)
    for name, installed in ASLEEP.items():
        figures[name] = None
        if installed():
            say(name)
            with contextlib.suppress(PlexrlError):
                figures[name] = json.loads(_run([sys.executable, "-m", "bench.asleep", name, str(size)], name))
    return figures


def exchange(say: Say, size: int, tensors: int, repeats: int, loop_s: float, command: Sequence[str] = RANK) -> dict:
    """What needs the two processes. size: bytes of each state. Raises PlexrlError when other bytes arrived."""
    with _two(command, size, tensors) as (ranks, ready):
        one, other = ranks
        digests = [_first(rank, seed) for seed, rank in enumerate(ranks)]
        say("each direction alone")
        out, back, first = [], [], []
        other_asleep = other.ask("residual")["residual_bytes"]
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
        say("copies beside the other's kernels")
        alone = other.ask("work", seconds=loop_s)["per_second"]
        quiet = one.ask("loop", seconds=loop_s)
        other.tell("work", seconds=loop_s)
        busy = one.ask("loop", seconds=loop_s)
        beside = other.answer()["per_second"]
        _check(one, "device", digests[holder])
        one.ask("leave")
        asleep = [rank.ask("residual")["residual_bytes"] for rank in ranks]
        mapping = one.ask("mapping")
    state = ready[0]["bytes"]
    longer = state / min(statistics.median(out), statistics.median(back)) / 1e9
    gib = state / GIB
    return {
        "bytes": state,
        "tensors": ready[0]["tensors"],
        "repeats": repeats,
        "offload_gbs": round(statistics.median(out), 2),
        "load_gbs": round(statistics.median(back), 2),
        "exchange_s": round(statistics.median(crossed), 4),
        "longer_direction_s": round(longer, 4),
        "exchange_ratio": round(statistics.median(crossed) / longer, 3),
        "first_layer_ms": round(statistics.median(first), 2),
        "kernels_beside_copies": round(beside / alone, 3),
        "offload_beside_kernels": round(busy["offload_gbs"] / quiet["offload_gbs"], 3),
        "load_beside_kernels": round(busy["load_gbs"] / quiet["load_gbs"], 3),
        "register_s_per_gib": round(statistics.mean(said["register_s"] for said in ready) / gib, 3),
        "map_s_per_gib": round(mapping["map_s"], 4),
        "unmap_s_per_gib": round(mapping["unmap_s"], 4),
        "residual_bytes_new": other_asleep,
        "residual_bytes_asleep": max(asleep),
        "digests": "equal on both sides",
    }


def table(figures: dict) -> str:
    """The figures for people."""

    def line(what: str, value: object, note: str = "") -> str:
        return f"  {what:<38} {value!s:>12}  {note}".rstrip()

    mib = 1 << 20
    rows = [
        f"Switching {figures['bytes']:,} bytes in {figures['tensors']} tensors between two processes",
        f"on {figures['gpu']}; medians of {figures['repeats']}; GB/s are 1e9 bytes a second",
        line("plain pinned copy out, GB/s", figures["plain_out_gbs"], "reference, one process, same run"),
        line("plain pinned copy in, GB/s", figures["plain_in_gbs"], "reference"),
        line("plain copies both ways at once, each", figures["plain_both_gbs"], "reference"),
        line("offload, GB/s", figures["offload_gbs"], f"{figures['offload_share']} of the plain copy; aim 0.9"),
        line("load, GB/s", figures["load_gbs"], f"{figures['load_share']} of the plain copy; aim 0.9"),
        line("exchange, s", figures["exchange_s"], f"{figures['exchange_ratio']} of the longer direction; aim 1.2"),
        line("first layer usable after, ms", figures["first_layer_ms"]),
        line("kernels beside the other's copies", figures["kernels_beside_copies"], "of their rate alone"),
        line("offload beside the other's kernels", figures["offload_beside_kernels"], "of its rate alone"),
        line("load beside the other's kernels", figures["load_beside_kernels"], "of its rate alone"),
        line("registering host memory, s per GiB", figures["register_s_per_gib"]),
        line("mapping, unmapping, s per GiB", f"{figures['map_s_per_gib']}, {figures['unmap_s_per_gib']}"),
        line("a sleeping process holds, MiB", figures["residual_bytes_asleep"] // mib),
        line("what arrived", figures["digests"]),
    ]
    for name in ASLEEP:
        found = figures[name]
        said = f"{found['sleep_gbs']}, {found['wake_gbs']}" if found else "not measured"
        rows.append(line(f"{name} out, in, GB/s", said, "reference"))
    return "\n".join(rows)


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
            settings = {**shared, "seat": seat, "slab": slab.offset, "device_bytes": state, "chunk": CHUNK}
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
