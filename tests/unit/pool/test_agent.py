"""The agent: seats at the gates of its GPUs, whatever becomes of the ranks that have them."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec import structs

from plexrl.config import Device, Host, Model, Nvme, PoolConfig
from plexrl.memory.gate import SEATS
from plexrl.pool import messages as m
from plexrl.pool.agent import Agent
from plexrl.pool.nodememory import NodeMemory
from plexrl.types import DoesNotFit, Extent, Unavailable

MIB = 1 << 20


@pytest.fixture
def run(tmp_path: Path):
    """Run a coroutine function on an agent with two pretend GPUs that no head has found yet."""

    def run(body: Callable[[Agent], Awaitable[None]]) -> None:
        async def main() -> None:
            agent = Agent(config(tmp_path), "n1", 2, 1, 0)
            serving = asyncio.create_task(agent.run())
            await asyncio.sleep(0)
            try:
                async with asyncio.timeout(90):
                    await body(agent)
            finally:
                agent._stop.set()
                assert await serving == 0

        asyncio.run(main())

    return run


def config(folder: Path, **sections: object) -> PoolConfig:
    models = {"nothing": Model(path=str(folder), engine="noop")}
    sections = {"device": Device(bytes=MIB), "host": Host(bytes=MIB), **sections}
    return PoolConfig(state_dir=str(folder / "state"), models=models, **sections)


def spawn(gang: str, gpu: int, build: str = "b1") -> m.Spawn:
    engine = {"engine": "noop", "role": "train", "kind": "lora", "model_dir": ""}
    return m.Spawn(id=0, gang=gang, rank=0, build=build, gpu=gpu, engine=engine, nodes=("n1",), base=None, owner=1000)


async def until(true: Callable[[], object]) -> None:
    while not true():
        await asyncio.sleep(0.02)


def test_a_rank_that_is_killed_holds_no_byte_of_its_device(run):
    async def body(agent: Agent) -> None:
        pids = [(await agent._do(spawn(gang, gpu)))["pid"] for gang, gpu in (("a/0", 0), ("b/0", 0), ("c/0", 1))]
        seats = {gang: (child.gpu, child.seat) for (gang, _), child in agent._children.items()}
        assert seats == {"a/0": (0, 0), "b/0": (0, 1), "c/0": (1, 0)}
        # As the rank would, through the same file.
        seat = agent._memory._gates[0].seat(1, "b/0", Extent(0, MIB))
        seat.come()
        seat.held()
        os.kill(pids[1], signal.SIGKILL)
        await until(lambda: ("b/0", 0) not in agent._children)
        assert agent._memory._gates[0].holders() == ()
        # The place is free for the next one, also for the same gang's next life.
        await agent._do(spawn("a/0", 0, "b2"))
        assert agent._children["a/0", 0].seat in (0, 1) and agent._children["a/0", 0].pid != pids[0]
        await agent._do(m.Kill(id=0, gang="a/0"))
        assert agent._memory._seats == {(1, 0)}

    run(body)


def test_slabs_go_to_nvme_and_come_back(tmp_path):
    agent = Agent(config(tmp_path, nvme=Nvme(path=str(tmp_path / "nvme"), bytes=32768)), "n1", 1, 1, 0)
    told: list[m.Reply] = []
    agent._link = SimpleNamespace(send=told.append)

    async def order(message: m.Message) -> m.Reply:
        await agent._obey(message)
        return told[-1]

    async def body() -> None:

        slab = (await order(m.Allocate(id=1, name="state:a:0", size=5000, owner=1001, gpu=1))).value["slab"]
        kept = agent._memory.arena.bytes_of(slab)
        kept[:5000] = b"\xa5" * 5000
        spilled = await order(m.Spill(id=2, name="state:a:0"))
        assert spilled.ok and spilled.value["bytes"] == 5000 and spilled.value["seconds"] > 0
        assert not any(kept)
        hello = agent._hello()
        assert (hello.slabs, hello.spilled) == ((), ("state:a:0",))
        taken = await order(m.Allocate(id=3, name="state:a:0", size=5000, owner=1001))
        assert not taken.ok and "on NVMe" in taken.error
        other = (await order(m.Allocate(id=4, name="state:b:0", size=100, owner=1002))).value["slab"]
        assert other.offset == slab.offset
        refilled = await order(m.Refill(id=5, name="state:a:0", gpu=0))
        assert refilled.value["slab"].offset != slab.offset and refilled.value["bytes"] == 5000
        assert bytes(agent._memory.arena.bytes_of(refilled.value["slab"])[:5000]) == b"\xa5" * 5000
        # Too large for what is left of nvme.bytes; a file that is not what was written; and all is forgotten.
        await order(m.Allocate(id=6, name="state:c:0", size=65536, owner=1001))
        full = await order(m.Spill(id=7, name="state:c:0"))
        assert (full.ok, full.category) == (False, "user") and "nvme.bytes" in full.error
        await order(m.Spill(id=8, name="state:a:0"))
        (file,) = (tmp_path / "nvme").glob("*/*")
        file.write_bytes(file.read_bytes()[:-1] + b"\1")
        lost = await order(m.Refill(id=9, name="state:a:0"))
        assert (lost.ok, lost.category) == (False, "damaged") and str(file) in lost.error
        assert (await order(m.Free(id=10, name="state:a:0"))).ok and not file.exists()
        assert agent._hello().spilled == ()
        await order(m.Spill(id=11, name="state:b:0"))

    asyncio.run(body())
    agent._memory.close()
    assert list((tmp_path / "nvme").iterdir()) == []


def test_more_memory_than_the_node_has_is_refused_at_once(tmp_path):
    with pytest.raises(DoesNotFit, match=rf"n1 with 2 GPUs of .* {MIB} and host.bytes {1 << 60} takes .*--mem"):
        Agent(config(tmp_path, host=Host(bytes=1 << 60)), "n1", 2, 1, 0)


def test_ranks_that_hardly_lived_leave_no_seat(run):
    async def body(agent: Agent) -> None:
        seats = agent._memory._seats
        await agent._do(structs.replace(spawn("a/0", 0), engine={"engine": "none such"}))
        await until(lambda: not agent._children)
        assert seats == set() and agent._early == {}
        start = agent._start

        async def late(*args: object) -> int:
            # Its end is told before its birth was taken up.
            pid = await start(*args)
            os.kill(pid, signal.SIGKILL)
            await until(lambda: pid in agent._early)
            return pid

        agent._start = late
        await agent._do(spawn("a/0", 0))
        assert agent._children == {} and seats == set() and agent._early == {}

    run(body)


def test_a_gate_without_a_free_seat_is_said_to_be_that_and_not_lack_of_memory(tmp_path):
    """Nothing is spilled for it, and nobody waits for room."""
    node = NodeMemory(config(tmp_path), "n1", 1)
    for _ in range(SEATS):
        node.take_seat(0)
    with pytest.raises(Unavailable, match="the gate of GPU 0 of n1 has 64 seats.*not memory"):
        node.take_seat(0)
    node.leave_seat(0, 7)
    assert node.take_seat(0) == 7
    node.close()


def test_the_memory_of_real_gpus_is_not_the_node_s(tmp_path):
    pretend = NodeMemory(config(tmp_path), "n1", 2)
    real = NodeMemory(config(tmp_path, device=Device(kind="cuda", bytes=1 << 50)), "n1", 2)
    assert [len(pretend.device_fds(gpu)) for gpu in (0, 1)] == [2, 2]
    assert [len(real.device_fds(gpu)) for gpu in (0, 1)] == [1, 1], "a gate and no memory"
    assert (pretend.core(0), real.core(0)) == (0, None)
    assert real.take_seat(1) == 0
    pretend.close()
    real.close()
