"""Credentials of a real munged, one of these tests' own: its key, socket and log live in a temporary folder."""

import asyncio
import json
import os
import secrets
import subprocess
import time
from pathlib import Path

import pytest

from plexrl.types import BadInput, PlexrlError, Unavailable
from plexrl.wire import messages, munge
from plexrl.wire.registry import Declared
from tests.unit.attach.fakehead import FakeHead, new_pool, proxy

ALICE, SERVICE, MALLORY = 61_001, 61_002, 61_003


@pytest.fixture(scope="module")
def munged(tmp_path_factory):
    """The socket of a munged."""
    folder = tmp_path_factory.mktemp("munge")
    for above in (folder, *folder.parents[:2]):
        above.chmod(0o711)
    key = folder / "key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    files = {name: folder / name for name in ("socket", "pid-file", "seed-file", "log-file")}
    options = [f"--{name}={path}" for name, path in files.items()]
    daemon = subprocess.Popen(["/usr/sbin/munged", "--foreground", "--force", f"--key-file={key}", *options])
    while not files["socket"].exists():
        assert daemon.poll() is None, files["log-file"].read_text()
        time.sleep(0.02)
    yield str(files["socket"])
    daemon.terminate()
    daemon.wait()


def as_uid(uid, function):
    """What the function returns, or the text of its PlexrlError, when another account calls it."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        try:
            told = {"value": function()}
        except PlexrlError as error:
            told = {"error": f"{type(error).__name__}: {error}"}
        os.write(writing, json.dumps(told).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        told = json.loads(answer.read())
    os.waitpid(child, 0)
    return told.get("value", told.get("error"))


def read(credential, socket):
    """Decode, in a form that crosses a pipe."""
    found = munge.decode(credential, socket)
    return [found.uid, found.gid, found.payload.hex()]


@pytest.mark.parametrize("payload", [b"", b"hello", b"\n\n", b"UID: 0\n\n\x00\xff" * 50, os.urandom(2000)])
def test_the_restricted_account_learns_maker_and_payload(munged, payload):
    credential = as_uid(ALICE, lambda: munge.encode(payload, SERVICE, socket=munged))
    assert as_uid(SERVICE, lambda: read(credential, munged)) == [ALICE, ALICE, payload.hex()]


def test_nobody_else_can_decode_it_and_so_pass_it_on(munged):
    credential = as_uid(ALICE, lambda: munge.encode(b"x", SERVICE, socket=munged))
    assert "Unauthorized credential" in as_uid(MALLORY, lambda: read(credential, munged))


def test_a_credential_is_good_once(munged):
    credential = as_uid(ALICE, lambda: munge.encode(b"x", SERVICE, socket=munged))
    assert as_uid(SERVICE, lambda: read(credential, munged))[0] == ALICE
    assert "BadInput: replayed credential" in as_uid(SERVICE, lambda: read(credential, munged))


def test_a_credential_expires(munged):
    credential = as_uid(ALICE, lambda: munge.encode(b"x", SERVICE, ttl=1, socket=munged))
    time.sleep(2.1)
    assert "BadInput: expired credential" in as_uid(SERVICE, lambda: read(credential, munged))


@pytest.mark.parametrize("forge", [lambda _: "MUNGE:AAAA:", lambda _: "", lambda text: text[:20] + "A" + text[21:]])
def test_a_forged_credential_is_refused(munged, forge):
    credential = as_uid(ALICE, lambda: munge.encode(b"x", SERVICE, socket=munged))
    assert "BadInput" in as_uid(SERVICE, lambda: read(forge(credential), munged))


def test_a_credential_for_anybody_is_refused(munged):
    command = ["munge", f"--socket={munged}", "--string=x"]
    credential = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    with pytest.raises(BadInput, match="not restricted"):
        munge.decode(credential, munged)


def test_without_a_daemon_the_mend_is_named(tmp_path):
    with pytest.raises(Unavailable, match=r"munge -n \| unmunge"):
        munge.encode(b"x", 0, socket=str(tmp_path / "none"))


def test_the_socket_may_stand_in_the_environment(munged, monkeypatch):
    monkeypatch.setenv("PLEXRL_MUNGE_SOCKET", munged)
    assert munge.decode(munge.encode(b"x", os.geteuid())).payload == b"x"


def test_a_site_pools_proxy_proves_who_it_is_by_which_key_to_which_head(munged):
    async def scenario(pool):
        pool.registry.declare(
            Declared(name="lab", kind="site", owner_uid=os.geteuid(), config="/c.yaml", state_dir="/s")
        )
        head = FakeHead(pool, "one")
        async with proxy(pool, munge_socket=munged) as running:
            assert (await running.post("get_info")).status_code == 200
            credential = munge.decode(head.hellos[0].credential, munged)
            proof = messages.decode_proof(credential.payload)
            assert credential.uid == os.geteuid()
            (key,) = head.welcomed
            assert proof == messages.Proof("lab", "one", "nonce of one", 7, 0, key)

    with new_pool() as pool:
        asyncio.run(scenario(pool))


def test_a_site_pools_proxy_without_munged_does_not_start():
    async def scenario(pool):
        pool.registry.declare(
            Declared(name="lab", kind="site", owner_uid=os.geteuid(), config="/c.yaml", state_dir="/s")
        )
        FakeHead(pool, "one")
        with pytest.raises(Unavailable, match="munged runs on this node"):
            async with proxy(pool, munge_socket=str(Path(pool.folder) / "none")):
                raise AssertionError("admitted")

    with new_pool() as pool:
        asyncio.run(scenario(pool))
