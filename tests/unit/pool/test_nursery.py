"""The nursery: a rank that ends is told, and so is the end of the nursery itself."""

import asyncio
import os
import resource
import signal

import pytest

from plexrl.pool.nursery import Nursery


def test_births_and_ends_are_told(tmp_path):
    async def main() -> None:
        ends: list[tuple[int, int]] = []
        gone = asyncio.Event()
        nursery = Nursery([], lambda pid, code: ends.append((pid, code)), gone.set)
        read, write = os.pipe()
        with (tmp_path / "log").open("wb") as log:
            # No settings of a rank: it says so in its log and ends.
            pid = await nursery.bear(b"\xc1", 0, log.fileno(), [read])
            async with asyncio.timeout(60):
                while not ends:
                    await asyncio.sleep(0.02)
            assert ends == [(pid, 1)]
            assert "msgspec" in (tmp_path / "log").read_text()
            os.kill(nursery._process.pid, signal.SIGKILL)
            with pytest.raises(OSError):
                await nursery.bear(b"\xc1", 0, log.fileno(), [read])
            async with asyncio.timeout(10):
                await gone.wait()
        os.close(read)
        os.close(write)
        nursery.close()

    asyncio.run(main())


def test_an_agent_with_more_than_a_thousand_descriptors_has_a_nursery_too(tmp_path):
    async def main() -> None:
        ends: list[tuple[int, int]] = []
        nursery = Nursery([], lambda pid, code: ends.append((pid, code)), lambda: None)
        with (tmp_path / "log").open("wb") as log:
            await nursery.bear(b"\xc1", 0, log.fileno(), [log.fileno()])
            async with asyncio.timeout(60):
                while not ends:
                    await asyncio.sleep(0.02)
        nursery.close()

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, before[1]), before[1]))
    taken = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        asyncio.run(main())
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
