"""The agent: seats at the gates of its GPUs, whatever becomes of the ranks that have them."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from msgspec import structs

from plexrl.config import Device, Host, Model, PoolConfig
from plexrl.pool import messages as m
from plexrl.pool.agent import Agent
from plexrl.types import Extent

MIB = 1 << 20


@pytest.fixture
def run(tmp_path: Path):
    """Run a coroutine function on an agent with two pretend GPUs that no head has found yet."""

    def run(body: Callable[[Agent], Awaitable[None]], **sections: object) -> None:
        async def main() -> None:
            agent = Agent(config(tmp_path, **sections), "n1", 2, 1, 0)
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
        seat = agent._gates[0].seat(1, "b/0", Extent(0, MIB))
        seat.come()
        seat.held()
        os.kill(pids[1], signal.SIGKILL)
        await until(lambda: ("b/0", 0) not in agent._children)
        assert agent._gates[0].holders() == ()
        # The place is free for the next one, also for the same gang's next life.
        await agent._do(spawn("a/0", 0, "b2"))
        assert agent._children["a/0", 0].seat in (0, 1) and agent._children["a/0", 0].pid != pids[0]
        await agent._do(m.Kill(id=0, gang="a/0"))
        assert agent._seats == {(1, 0)}

    run(body)


def test_a_rank_that_never_lived_leaves_no_seat(run):
    async def body(agent: Agent) -> None:
        order = spawn("a/0", 0)
        await agent._do(structs.replace(order, engine={"engine": "none such"}))
        await until(lambda: not agent._children)
        assert agent._seats == set() and agent._early == {}
        assert (await agent._do(order))["pid"]

    run(body)


def test_the_end_of_a_rank_may_be_told_before_its_birth_is_taken_up(run):
    async def body(agent: Agent) -> None:
        start = agent._start

        async def late(*args: object) -> int:
            pid = await start(*args)
            os.kill(pid, signal.SIGKILL)
            await until(lambda: pid in agent._early)
            return pid

        agent._start = late
        await agent._do(spawn("a/0", 0))
        assert agent._children == {} and agent._seats == set() and agent._early == {}

    run(body)
