"""The channel between processes: who is let in, who is who, what a hostile client cannot do."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import zmq

from plexrl.types import BadInput, Unavailable
from plexrl.wire.channel import Client, Server
from plexrl.wire.keys import Keys

LOCAL = "tcp://127.0.0.1:0"


def run(scenario):
    ctx = zmq.Context()
    try:
        asyncio.run(scenario(ctx))
    finally:
        ctx.destroy(linger=0)


async def until(condition):
    while not condition():
        await asyncio.sleep(0.005)


class Ends:
    """A server that keeps and echoes what it gets, and its clients."""

    def __init__(self, ctx, address=LOCAL, **options):
        self.ctx = ctx
        self.keys = Keys.generate()
        self.got = []
        self.server = Server(ctx, address, self.keys, **options)
        self.server.start(self.receive)

    def receive(self, identity, key, frames):
        self.got.append((identity, key, frames))
        self.server.send(identity, frames)

    async def client(self, keys=None, server_key=None, identity=None, wait=True):
        keys = keys or Keys.generate()
        client = Client(self.ctx, self.server.address, server_key or self.keys.public, keys, identity)
        client.keys, client.got, client.events = keys, [], []
        client.start(client.got.append, lambda up, why: client.events.append((up, why)))
        if wait:
            await until(lambda: client.up)
        return client


def test_messages_go_both_ways_in_order_under_the_clients_key():
    async def scenario(ctx):
        ends = Ends(ctx)
        client = await ends.client()
        sent = [[b"%d" % number, b"x" * number] for number in range(1000)]
        for frames in sent:
            assert client.send(frames)
        await until(lambda: len(client.got) == len(sent))
        assert client.got == sent
        assert {key for _, key, _ in ends.got} == {client.keys.public}
        client.close()
        ends.server.close()

    run(scenario)


def test_a_large_body_arrives():
    async def scenario(ctx):
        ends = Ends(ctx)
        client = await ends.client()
        body = os.urandom(8 << 20)
        client.send([b"h", body])
        await until(lambda: client.got)
        assert client.got == [[b"h", body]]

    run(scenario)


def test_only_allowed_keys_get_in_and_a_failing_check_lets_nobody_in():
    async def scenario(ctx):
        friend = Keys.generate()

        def allow(key):
            if key != friend.public:
                raise KeyError(key)
            return True

        ends = Ends(ctx, allow=allow)
        stranger = await ends.client(wait=False)
        await ends.client(friend)
        await until(lambda: stranger.events)
        assert not stranger.up and not stranger.send([b"let me in"])
        assert stranger.events[0][0] is False
        assert ends.got == []

    run(scenario)


def test_a_client_of_another_servers_key_gets_nowhere():
    async def scenario(ctx):
        ends = Ends(ctx)
        client = await ends.client(server_key=Keys.generate().public, wait=False)
        await until(lambda: client.events)
        assert not client.up and not client.send([b"x"])

    run(scenario)


def test_two_servers_of_one_process_let_in_different_keys():
    async def scenario(ctx):
        one, two = Keys.generate(), Keys.generate()
        first = Ends(ctx, allow=lambda key: key == one.public)
        second = Ends(ctx, allow=lambda key: key == two.public)
        await first.client(one)
        await second.client(two)
        wrong = await second.client(one, wait=False)
        await until(lambda: wrong.events)
        assert not wrong.up
        first.server.close()  # the other server's door stays
        await second.client(two)

    run(scenario)


def test_a_client_under_anothers_routing_id_still_speaks_under_its_own_key():
    async def scenario(ctx):
        ends = Ends(ctx)
        victim = await ends.client(identity=b"agent")
        victim.send([b"mine"])
        await until(lambda: ends.got)
        thief = await ends.client(identity=b"agent")
        thief.send([b"yours"])
        await until(lambda: len(ends.got) == 2)
        assert [key for _, key, _ in ends.got] == [victim.keys.public, thief.keys.public]

    run(scenario)


def test_routing_ids_that_nobody_chose_are_long_and_differ():
    async def scenario(ctx):
        ends = Ends(ctx)
        for _ in range(3):
            client = await ends.client()
            client.send([b"x"])
        await until(lambda: len(ends.got) == 3)
        identities = {identity for identity, _, _ in ends.got}
        assert len(identities) == 3 and all(len(identity) == 17 for identity in identities)

    run(scenario)


def test_plain_clients_garbage_and_floods_do_not_hurt_the_others():
    async def scenario(ctx):
        ends = Ends(ctx, max_bytes=1 << 20)
        good = await ends.client()
        host, port = ends.server.address.removeprefix("tcp://").split(":")
        garbage = [socket.create_connection((host, int(port))) for _ in range(20)]
        for number, sock in enumerate(garbage):
            sock.sendall(os.urandom(50 * number))
        plain = ctx.socket(zmq.DEALER)
        plain.linger = 0
        plain.connect(ends.server.address)
        plain.send_multipart([b"no", b"encryption"])
        greedy = await ends.client()
        greedy.send([b"h", b"x" * (2 << 20)])
        await until(lambda: (False, "the connection ended") in greedy.events)
        odd = await ends.client()
        odd.send([b""] * 500)
        odd.send([b"\xff" * 100])
        await until(lambda: len(odd.got) == 2)
        good.send([b"still", b"here"])
        await until(lambda: good.got)
        assert {key for _, key, _ in ends.got} == {good.keys.public, odd.keys.public}
        for sock in garbage:
            sock.close()

    run(scenario)


def test_a_receiver_that_fails_on_one_message_gets_the_next():
    async def scenario(ctx):
        failures = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: failures.append(context["exception"]))
        ends = Ends(ctx)
        ends.receive, echo = None, ends.receive
        ends.server.close()
        ends.server = Server(ctx, LOCAL, ends.keys)

        def receive(identity, key, frames):
            if frames == [b"bad"]:
                raise ValueError("bad")
            echo(identity, key, frames)

        ends.server.start(receive)
        client = await ends.client()
        for frames in ([b"1"], [b"bad"], [b"bad"], [b"2"]):
            client.send(frames)
        await until(lambda: len(client.got) == 2)
        assert client.got == [[b"1"], [b"2"]] and len(failures) == 2

    run(scenario)


def test_sending_to_somebody_gone_is_told():
    async def scenario(ctx):
        ends = Ends(ctx)
        client = await ends.client()
        client.send([b"x"])
        await until(lambda: ends.got)
        identity = ends.got[0][0]
        client.close()
        await until(lambda: not ends.server.send(identity, [b"are you there?"]))

    run(scenario)


def test_the_end_of_the_server_is_noticed_and_its_return_too():
    async def scenario(ctx):
        ends = Ends(ctx)
        client = await ends.client()
        address = ends.server.address
        ends.server.close()
        await until(lambda: not client.up)
        assert client.send([b"x"]) is False
        while True:
            try:
                ends.server = Server(ctx, address, ends.keys)
                break
            except Unavailable:
                await asyncio.sleep(0.01)
        ends.server.start(ends.receive)
        await until(lambda: client.up)
        client.send([b"again"])
        await until(lambda: client.got)

    run(scenario)


def test_a_port_in_use_is_told_with_the_mend():
    async def scenario(ctx):
        ends = Ends(ctx)
        with pytest.raises(Unavailable, match="in use.*another port"):
            Server(ctx, ends.server.address, Keys.generate())
        await ends.client()  # the failed one left the first one's door alone

    run(scenario)


@pytest.mark.parametrize("address", ["127.0.0.1:80", "tcp://no.such.interface:0", "gopher://x", ""])
def test_an_address_that_makes_no_sense_is_told(address):
    async def scenario(ctx):
        with pytest.raises(BadInput, match="cannot listen"):
            Server(ctx, address, Keys.generate())

    run(scenario)


def test_ipc_wants_a_folder_of_ours_that_is_closed_to_others_and_a_free_path():
    async def scenario(ctx):
        with tempfile.TemporaryDirectory(prefix="px") as folder:
            ends = Ends(ctx, f"ipc://{folder}/s")
            await ends.client()
            with pytest.raises(Unavailable, match="in use"):
                Server(ctx, f"ipc://{folder}/s", Keys.generate())
            Path(folder).chmod(0o755)
            with pytest.raises(BadInput, match="chmod 700"):
                Server(ctx, f"ipc://{folder}/t", Keys.generate())
            with pytest.raises(BadInput, match="Make"):
                Server(ctx, f"ipc://{folder}/none/t", Keys.generate())

    run(scenario)


def test_keys_are_kept_in_private_files(tmp_path):
    keys = Keys.generate()
    path = tmp_path / "keys"
    keys.save(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert Keys.load(path) == keys
    assert keys.secret not in repr(keys)
    with pytest.raises(BadInput, match="new file"):
        keys.save(path)
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(BadInput, match="link"):
        Keys.load(tmp_path / "link")
    path.chmod(0o640)
    with pytest.raises(BadInput, match="not private"):
        Keys.load(path)
    path.chmod(0o600)
    path.write_text("{")
    with pytest.raises(BadInput, match="no keys"):
        Keys.load(path)


STOPPABLE = """
import asyncio, sys, zmq
from plexrl.wire.channel import Server
from plexrl.wire.keys import Keys

async def main():
    server = Server(zmq.Context(), "tcp://127.0.0.1:0", Keys(*sys.argv[1:]))
    server.start(lambda identity, key, frames: server.send(identity, frames))
    print(server.address, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_a_server_that_falls_silent_is_noticed_though_its_connection_stands():
    async def scenario(ctx):
        keys = Keys.generate()
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", STOPPABLE, keys.public, keys.secret, stdout=subprocess.PIPE
        )
        try:
            address = (await process.stdout.readline()).decode().strip()
            client = Client(ctx, address, keys.public, Keys.generate())
            client.start(lambda frames: None)
            await until(lambda: client.up)
            process.send_signal(signal.SIGSTOP)
            await until(lambda: not client.up)
            process.send_signal(signal.SIGCONT)
            await until(lambda: client.up)
        finally:
            process.kill()
            await process.wait()

    run(scenario)


BLOCKED = """
import asyncio, sys, time, zmq
from plexrl.wire.channel import Server
from plexrl.wire.keys import Keys

async def main():
    server = Server(zmq.Context(), "tcp://127.0.0.1:0", Keys(*sys.argv[1:]))

    def receive(identity, key, frames):
        if frames == [b"block"]:
            time.sleep(1.5)
        server.send(identity, frames)

    server.start(receive)
    print(server.address, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_a_client_that_floods_a_busy_server_with_pings_and_leaves_does_not_end_it():
    async def scenario(ctx):
        keys, own = Keys.generate(), Keys.generate()
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", BLOCKED, keys.public, keys.secret, stdout=subprocess.PIPE
        )
        try:
            address = (await process.stdout.readline()).decode().strip()
            hostile = ctx.socket(zmq.DEALER)
            hostile.curve_serverkey = keys.public.encode()
            hostile.curve_publickey, hostile.curve_secretkey = own.public.encode(), own.secret.encode()
            hostile.heartbeat_ivl, hostile.sndhwm = 20, 0
            hostile.connect(address)
            hostile.send(b"block")
            for _ in range(20_000):
                hostile.send_multipart([b"h", b"x" * 200])
            await asyncio.sleep(1.0)
            hostile.close(0)
            answers = []
            client = Client(ctx, address, keys.public, Keys.generate())
            client.start(answers.append)
            await until(lambda: client.up)
            client.send([b"are you there?"])
            await until(lambda: answers or process.returncode is not None)
            assert process.returncode is None
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()

    run(scenario)
