"""What one user leaves in a device or in the arena the next one does not find, after an end as after a kill."""

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
