"""What one user leaves in a device, the arena or on NVMe the next one does not find, after an end as after a kill."""

import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from plexrl.engines import layout, sizing
from plexrl.engines.protocol import EngineSpec
from plexrl.engines.torch.asample import Limits, Request, parse
from plexrl.engines.torch.home import Home
from plexrl.engines.torch.kv import KvTable
from plexrl.memory.arena import Arena, ArenaMap
from plexrl.memory.device import CpuDevice, create_memfd
from plexrl.memory.nvme import Tier
from plexrl.types import Extent, Role

MIB = 1 << 20
MARK = 0xA5


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_a_new_group_finds_a_clear_device(tiny_model, kind):
    """Its memory was another's who was killed: nothing of that is left when the engine has it."""
    folder = str(tiny_model)
    need = sizing.sizes(folder, "float32", Role.TRAIN, kind, 1, 8, 0)
    fd, host = create_memfd("gpu", 32 * MIB), create_memfd("arena", 32 * MIB)
    device, arena = CpuDevice(fd, 32 * MIB), Arena(host, 32 * MIB)
    before = CpuDevice(fd, 32 * MIB)
    theirs = before.reserve(Extent(0, 32 * MIB))
    theirs.buffer.fill_(MARK)
    offset = 4 * MIB
    spec = EngineSpec(
        engine="torch",
        role=Role.TRAIN,
        kind=kind,
        model_dir=folder,
        dtype="float32",
        rank=0,
        world=1,
        rendezvous="",
        interface="127.0.0.1",
        extent_offset=offset,
        extent_size=need.device_bytes,
        device_bytes=32 * MIB,
        lora_slots=1,
        lora_max_rank=8,
        kv_bytes=0,
        max_batch=1,
        max_context=64,
        micro_batch_tokens=64,
        base=arena.alloc("base", need.base_bytes, -1),
        base_fill=True,
    )
    home = Home(spec, device, ArenaMap(host, 32 * MIB))
    assert not home.region.buffer.any()
    # It is a neighbour's all around.
    assert (theirs.buffer[:offset] == MARK).all()
    assert (theirs.buffer[offset + need.device_bytes :] == MARK).all()


def test_a_slab_comes_back_clear():
    fd = create_memfd("arena", 4 * MIB)
    arena, mapped = Arena(fd, 4 * MIB), ArenaMap(fd, 4 * MIB)
    slab = arena.alloc("state:theirs", 3 * MIB - 5, 1001)
    mapped.view(slab).fill_(MARK)
    arena.free("state:theirs")
    assert not mapped.view(arena.alloc("state:ours", 4 * MIB, 1002)).any()


HOST = """
import sys, time
from plexrl.memory.arena import ArenaMap
from plexrl.types import Slab
import torch
fd, size, offset, length, mark = (int(a) for a in sys.argv[1:])
view = ArenaMap(fd, size).view(Slab("state:mine:0", offset, length, 1002))
assert not view.any()
view.fill_(mark)
print("filled", flush=True)
while True:
    for piece in view.split(65536):
        piece.fill_(mark)
"""

SCAN = """
import sys
from plexrl.memory.arena import ArenaMap
from plexrl.types import Slab
fd, size, offset, length = (int(a) for a in sys.argv[1:5])
host = ArenaMap(fd, size)
view = host.view(Slab("state:ours:0", offset, length, 1002))
backwards, seen, shared = bytes.fromhex(sys.argv[5]), 0, 0
with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
    for line in list(maps):
        start, end = (int(n, 16) for n in line.split()[0].split("-"))
        library = "/" in line and "/memfd:" not in line
        if line.split()[1][0] != "r" or library or "[v" in line:
            continue
        shared += (end - start) * ("memfd:" in line)
        memory.seek(start)
        try:
            seen += memory.read(end - start)[::-1].count(backwards)
        except OSError:
            pass
print(seen, shared, flush=True)
"""


def test_an_engine_host_has_nobody_elses_bytes_in_its_memory():
    """Searched from end to end, as it could search itself, backwards: what it looks for is not in its own memory."""
    fd = create_memfd("arena", 4 * MIB)
    arena, mark = Arena(fd, 4 * MIB), secrets.token_bytes(32)
    for name, owner in (("state:theirs:0", 1001), ("version:theirs/1", 1001)):
        with arena.bytes_of(arena.alloc(name, MIB, owner)) as data:
            data[:] = mark * (MIB // len(mark))
    ours = arena.alloc("state:ours:0", MIB, 1002)
    with arena.bytes_of(ours) as data:
        data[:32] = mark
    arguments = [*map(str, (fd, 4 * MIB, ours.offset, ours.size)), mark[::-1].hex()]
    done = subprocess.run(
        [sys.executable, "-c", SCAN, *arguments], pass_fds=[fd], capture_output=True, text=True, check=True
    )
    seen, shared = map(int, done.stdout.split())
    os.close(fd)
    # Once: its own copy, which shows that the search sees what is there.
    assert (seen, shared) == (1, MIB)


def test_a_host_that_is_killed_while_it_writes_leaves_nothing_to_the_next_user():
    fd = create_memfd("arena", 4 * MIB)
    arena = Arena(fd, 4 * MIB)
    theirs = arena.alloc("state:theirs:0", 3 * MIB, 1001)
    arguments = [str(n) for n in (fd, 4 * MIB, theirs.offset, theirs.size, MARK)]
    host = subprocess.Popen([sys.executable, "-c", HOST, *arguments], pass_fds=[fd], stdout=subprocess.PIPE, text=True)
    try:
        assert host.stdout.readline() == "filled\n"
        with arena.bytes_of(theirs) as data:
            assert data[0] == data[-1] == MARK
    finally:
        host.send_signal(signal.SIGKILL)
        host.wait()
        host.stdout.close()
    arena.free("state:theirs:0")
    with arena.bytes_of(arena.alloc("state:ours:0", 4 * MIB, 1002)) as data:
        assert not any(data)
    os.close(fd)


AGENT = """
import os, sys, time
from plexrl.memory.arena import Arena
from plexrl.memory.nvme import Tier
from plexrl.memory.pages import create_memfd
arena = Arena(create_memfd("plexrl-left", 4 << 20), 4 << 20)
tier = Tier(arena, sys.argv[1], 1 << 24)
mark = bytes.fromhex(sys.argv[2])[::-1]
for name in ("state:a:0", "state:b:0"):
    arena.bytes_of(arena.alloc(name, 1 << 20, 1001))[:] = mark * ((1 << 20) // 32)
tier.spill("state:b:0")
print("ready", flush=True)
time.sleep(60)
"""


def test_an_agent_that_is_killed_leaves_no_memory_and_no_file_that_others_can_read(tmp_path):
    mark = secrets.token_bytes(32)
    place = tmp_path / "nvme"
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)  # others may come as far as the folder that is the service account's
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT, str(place), mark[::-1].hex()], stdout=subprocess.PIPE, text=True
    )
    try:
        assert agent.stdout.readline() == "ready\n"
        (file,) = place.glob("*/*")
        assert mark in file.read_bytes()
    finally:
        agent.send_signal(signal.SIGKILL)
        agent.wait()
        agent.stdout.close()
    # The memory had no name; nobody else held it.
    assert not [path for path in Path("/dev/shm").iterdir() if "plexrl-left" in path.name]
    assert not any("plexrl-left" in target for target in open_files())
    if os.getuid() == 0:
        code = f"import os; os.setuid(65534); open({str(file)!r}, 'rb')"
        refused = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert "PermissionError" in refused.stderr
    fd = create_memfd("arena", MIB)
    tier = Tier(Arena(fd, MIB), place, 1 << 24)
    assert not list(place.glob("*/*")) and tier.names() == ()
    tier.close()
    os.close(fd)


def open_files() -> list[str]:
    """What the descriptors of all processes that can be seen point to."""
    found = []
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            found.append(os.readlink(link))
        except OSError:
            continue
    return found


def test_what_is_spilled_is_gone_from_the_arena_and_comes_back_to_its_owner_alone(tmp_path):
    fd = create_memfd("arena", 4 * MIB)
    arena = Arena(fd, 4 * MIB)
    tier = Tier(arena, tmp_path / "nvme", 1 << 24)
    with arena.bytes_of(arena.alloc("state:theirs:0", MIB, 1001)) as data:
        data[:] = bytes([MARK]) * MIB
    tier.spill("state:theirs:0")
    ours = arena.alloc("state:ours:0", 2 * MIB, 1002)
    with arena.bytes_of(ours) as data:
        assert not any(data)
        slab, _, _ = tier.refill("state:theirs:0")
        assert not any(data) and slab.owner == 1001
        assert slab.offset >= ours.offset + ours.size
    tier.close()
    os.close(fd)


def test_keys_and_values_are_cleared_when_a_sequence_ends(tiny_model):
    """Users of one base share a sampler's KV memory: rows are cleared, whichever ends first and wherever they moved."""
    arch = layout.architecture(str(tiny_model))
    specs = layout.kv_specs(arch, "float32", MIB)
    layers = [torch.zeros(spec[1]) for spec in specs]
    table = KvTable(layers, 8)
    limits = Limits(vocabulary=259, max_context=64, tokens=table.tokens, eos=frozenset())
    drawn = np.random.default_rng(1)
    living = []

    def newcomer(size: int) -> None:
        body = b'{"prompt": {"chunks": [{"tokens": [%s]}]}, "sampling_params": {"max_tokens": 8, "stop": []}}'
        request = Request(f"c{size}", None, parse(body % b",".join([b"1"] * size), limits))
        (sequence,) = request.sequences
        table.add(sequence, request.need)
        start = table.place(sequence.row)
        for layer in layers:
            layer[:, start : start + size] = MARK
        sequence.cached = size
        living.append(sequence)

    for size in (30, 7, 19, 3):
        newcomer(size)
    while living:
        table.remove(living.pop(int(drawn.integers(len(living)))))
        for layer in layers:
            used = torch.zeros(layer.shape[1], dtype=torch.bool)
            for sequence in living:
                start = table.place(sequence.row)
                used[start : start + sequence.cached] = True
                assert (layer[:, start : start + sequence.cached] == MARK).all()
            assert not layer[:, ~used].any()
