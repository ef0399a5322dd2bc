"""Head and peers over a real channel: hellos, orders that are carried out once, a connection that falls, a new head."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import zmq

from plexrl.pool import messages as m
from plexrl.pool.control import Control, write_control
from plexrl.pool.links import Links, OrderFailed
from plexrl.pool.peer import HeadLink, Replies
from plexrl.types import Epoch, Unavailable
from plexrl.wire.keys import Keys

GANG = "gang:g/0"


def host_hello(build: str = "one") -> m.HostHello:
    return m.HostHello(
        gang="g/0", build=build, resident=True, deployments=(), versions=(), outcomes=(), queue=(), device_bytes=0
    )


class Place:
    """A run folder with heads and peers in it."""

    def __init__(self, root: Path):
        self.control, self.keys = root / "control.json", root / "keys.json"
        self.client = Keys.generate()
        self.client.save(self.keys)
        self.server = Keys.generate()
        self.context = zmq.Context()
        self.heads: list[Links] = []
        self.hellos: list[str] = []
        self.heard: list[m.Message] = []

    def head(self, restart: int = 0, ours: Callable[[m.Message], bool] = lambda message: True) -> Links:
        def hello(name: str, message: m.Message) -> bool:
            self.hellos.append(f"{restart}:{name}")
            return ours(message)

        epoch = Epoch(1, 0, restart)
        links = Links(
            self.context,
            "tcp://127.0.0.1:0",
            self.server,
            self.client.public,
            epoch,
            hello,
            lambda name, message: self.heard.append(message),
        )
        self.heads.append(links)
        write_control(self.control, Control(address=links.address, server_key=self.server.public, epoch=epoch))
        return links

    @contextlib.asynccontextmanager
    async def peer(self, receive: Callable[[m.Message], None], build: str = "one") -> AsyncIterator[HeadLink]:
        link = HeadLink(self.control, self.keys, GANG, lambda: host_hello(build), receive)
        task = asyncio.create_task(link.run())
        try:
            yield link
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def close(self) -> None:
        for head in self.heads:
            head.close()
        self.context.destroy(linger=0)


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path)


def run(place: Place, main) -> None:
    async def whole() -> None:
        try:
            await asyncio.wait_for(main(), 30)
        finally:
            place.close()

    asyncio.run(whole())


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.01)


def fall(link: HeadLink) -> None:
    """The connection ends; the peer will look for its head again."""
    link._client.close()
    link._client = link._control = None
    link._welcomed = False


def test_orders_and_their_replies(place):
    async def main() -> None:
        head = place.head()
        with pytest.raises(Unavailable, match="is not connected"):
            await head.order(GANG, m.Order(id=0, verb="load", args={}))

        def obey(order: m.Message) -> None:
            ok = order.verb == "load"
            link.send(m.Reply(id=order.id, ok=ok, value={"moved": 3}, error="no such verb", category="user"))

        async with place.peer(obey) as link:
            await until(lambda: place.hellos)
            assert await head.order(GANG, m.Order(id=0, verb="load", args={})) == {"moved": 3}
            with pytest.raises(OrderFailed, match="no such verb") as failed:
                await head.order(GANG, m.Order(id=0, verb="fly", args={}))
            assert failed.value.category == "user"
            link.send(m.Paused(build="one", unfinished=("c1",)))
            await until(lambda: place.heard)
            assert place.heard == [m.Paused(build="one", unfinished=("c1",))]

    run(place, main)


def test_an_order_outlives_its_connection_and_is_carried_out_once(place):
    async def main() -> None:
        head = place.head()
        taken: list[int] = []
        replies, done = Replies(), []

        def obey(order: m.Message) -> None:
            taken.append(order.id)
            new, reply = replies.take(order.id)
            if new:
                done.append(order.id)
                reply = replies.give(m.Reply(id=order.id, ok=True))
            if len(taken) > 1:
                link.send(reply)

        async with place.peer(obey) as link:
            await until(lambda: place.hellos)
            order = asyncio.create_task(head.order(GANG, m.Order(id=0, verb="load", args={})))
            await until(lambda: taken)
            fall(link)  # its first reply is lost
            await order
            assert taken[0] == taken[1] and done == taken[:1]
            # An order given while the connection is down waits for it.
            fall(link)
            await asyncio.sleep(0.05)
            await head.order(GANG, m.Order(id=0, verb="load", args={}))
            assert len(done) == 2

    run(place, main)


def test_orders_to_who_is_gone_fail_at_once(place):
    async def main() -> None:
        head = place.head()
        async with place.peer(lambda message: None):
            await until(lambda: place.hellos)
            order = asyncio.create_task(head.order(GANG, m.Order(id=0, verb="load", args={})))
            await asyncio.sleep(0.05)
            head.forget(GANG)
            with pytest.raises(Unavailable, match="has gone"):
                await order

    run(place, main)


def test_who_is_not_ours_is_told_to_end(place):
    async def main() -> None:
        head = place.head(ours=lambda message: message.build == "two")
        told: list[m.Message] = []
        async with place.peer(told.append):
            await until(lambda: told)
            assert told[0] == m.Exit()
            with pytest.raises(Unavailable, match="is not connected"):
                await head.order(GANG, m.Order(id=0, verb="load", args={}))

    run(place, main)


def test_a_new_head_is_found_and_gets_what_the_old_one_missed(place):
    async def main() -> None:
        old = place.head()
        async with place.peer(lambda message: None) as link:
            await until(lambda: place.hellos)
            await asyncio.sleep(0.05)
            old.close()
            place.heads.remove(old)
            await until(lambda: not link._client.up)
            link.send(m.Paused(build="one", unfinished=()))
            place.head(restart=1)
            await until(lambda: place.heard)
            assert f"1:{GANG}" in place.hellos
            assert place.heard == [m.Paused(build="one", unfinished=())]

    run(place, main)


def test_a_head_of_an_older_epoch_is_ignored(place):
    async def main() -> None:
        told: list[m.Message] = []
        place.head(restart=5)
        async with place.peer(told.append):
            await until(lambda: place.hellos)
            older = place.head(restart=4)
            await until(lambda: f"4:{GANG}" in place.hellos)
            older.send(GANG, m.Pause())
            await asyncio.sleep(0.2)
            assert told == []

    run(place, main)
