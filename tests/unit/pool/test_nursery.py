"""The nursery: a rank that ends is told, and so is the end of the nursery itself."""

import asyncio
import os
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
