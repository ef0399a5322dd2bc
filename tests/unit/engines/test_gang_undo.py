"""A gang of two real trainers under their leader: what fails on one rank is undone on both, and they train on."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from plexrl.engines.protocol import EngineSpec, Undone, build
from plexrl.memory.device import CpuDevice
from plexrl.memory.gate import Gate
from plexrl.memory.transfer import Memcpy
from plexrl.pool.lockstep import Lockstep
from plexrl.pool.messages import Outcome, Work
from plexrl.pool.trainhost import TrainHost, TrainRank, follow
from plexrl.types import CallKind, Extent, Role
from tests.unit.engines.conftest import Node, loss, request, sft
from tests.unit.engines.test_exchange import KINDS, OPTIM


def fail_at(trigger: Path) -> None:
    """The copy of this process whose number stands in the file fails; then the file is gone."""
    real = Memcpy.copy

    def copy(self: Memcpy, target: torch.Tensor, source: torch.Tensor) -> None:
        if trigger.exists():
            left = int(trigger.read_text())
            if left == 1:
                trigger.unlink()
                raise RuntimeError("the copy failed")
            trigger.write_text(str(left - 1))
        real(self, target, source)

    Memcpy.copy = copy


def member(node: Node, spec: EngineSpec, rank: int):
    torch.set_num_threads(1)
    seat = Gate(node.gate_fd).seat(0, "gang", Extent(spec.extent_offset, spec.extent_size))
    spec = msgspec.structs.replace(spec, rank=rank, base_fill=rank == 0)
    engine = build(spec, CpuDevice(node.device_fd, node.size), node.map, seat)
    return TrainRank(engine, rank, "n", rank == 0), Lockstep(rank, 2, f"{spec.rendezvous}.steps", spec.interface)


def follower(node: Node, spec: EngineSpec, trigger: Path) -> None:
    fail_at(trigger)
    follow(*member(node, spec, 1))


class Leader:
    """The leader's host, and calls by number."""

    def __init__(self, host: TrainHost) -> None:
        self.host = host
        self.count = 0

    def call(self, kind: CallKind, body: bytes, between: Callable[[], None] = lambda: None) -> Outcome:
        """between: done after each step in which the call has not ended."""
        self.count += 1
        work = Work(id=f"c{self.count}", kind=kind, deployment="d", seq=self.count, args={}, body=body)
        self.host.run((work,))
        while True:
            for outcome in self.host.step():
                assert outcome.ok, outcome.error
                return outcome
            between()

    def steps(self, between: Callable[[], None] = lambda: None) -> list[object]:
        found: list[object] = []
        for seed in range(3):
            body = request("cross_entropy", sft(seed))
            found.append(loss(self.call(CallKind.FORWARD_BACKWARD, body, between).body))
            found.append(self.call(CallKind.OPTIM_STEP, OPTIM).body)
            between()
        return found


@pytest.fixture
def gang(models: dict[str, str], tmp_path: Path):
    """rank -> leader of a new gang whose rank 1 fails while the file `fail` of its folder exists."""
    context = multiprocessing.get_context("fork")
    leaders: list[tuple[Leader, multiprocessing.Process]] = []

    def make(rank: int | None) -> tuple[Leader, Path]:
        folder = tmp_path / str(len(leaders))
        folder.mkdir()
        first, second = Node(), Node()
        second.arena_fd, second.map = first.arena_fd, first.map
        kind = "full" if rank is None else "lora"
        more = {"world": 2, "rendezvous": str(folder / "store"), "micro_batch_tokens": 12}
        spec = first.spec(models["tied"], Role.TRAIN, kind, **more)
        process = context.Process(target=follower, args=(second, spec, folder / "fail"), daemon=True)
        process.start()
        host = TrainHost(*member(first, spec, 0))
        leader = Leader(host)
        leaders.append((leader, process))
        slabs = [msgspec.to_builtins(first.state(models["tied"], rank)) for _ in range(2)]
        args = {"deployment": "d", "slabs": slabs, "lora_rank": rank, "seed": 3, "attn": True, "mlp": True}
        host.order("create", args | {"unembed": True, "folder": "", "optimizer": False})
        return leader, folder / "fail"

    yield make
    for leader, process in leaders:
        leader.host.exit()
        process.join(20)
        assert process.exitcode == 0


@KINDS
def test_a_gang_trains_on_bit_for_bit_after_switches_that_failed_on_one_rank(gang, rank: int | None) -> None:
    want = gang(rank)[0].steps()
    leader, fail = gang(rank)
    undone = dict.fromkeys(("offload", "load"), 0)

    def switch() -> None:
        """Out and in; each fails once on rank 1, if it copies enough there."""
        for verb, copies in (("offload", 3), ("load", 2)):
            fail.write_text(str(copies))
            try:
                leader.host.order(verb, {})
            except Undone:
                undone[verb] += 1
                assert not fail.exists()
                leader.host.order(verb, {})
            fail.unlink(missing_ok=True)

    assert leader.steps(switch) == want
    assert undone["offload"] > 2
    assert undone["load"] > 2


@KINDS
def test_a_gang_says_what_it_moved_and_how_long_calls_waited_for_it(gang, rank: int | None) -> None:
    leader, _ = gang(rank)
    leader.steps()
    out = leader.host.order("offload", {})["moved"]
    assert len(out) == 2 and all(moved.bytes_out > 0 and moved.residual_bytes == 0 for moved in out)
    leader.host.order("load", {})
    outcome = leader.call(CallKind.FORWARD_BACKWARD, request("cross_entropy", sft(0)))
    assert outcome.moved_bytes > 0 and outcome.moved_us > 0
    outcome = leader.call(CallKind.FORWARD_BACKWARD, request("cross_entropy", sft(0)))
    assert (outcome.moved_bytes, outcome.moved_us) == (0, 0)
