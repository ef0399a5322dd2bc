"""Ledger and reports on disk: who can read them, and what a kill leaves."""

import errno
import os
import shutil
import struct
import tempfile
import threading
import warnings
import zlib
from pathlib import Path

import msgspec
import pytest

from plexrl.accounting import acl
from plexrl.accounting.ledger import Ledger, read, repair, slim
from plexrl.accounting.store import Publisher, Store, reports_of
from plexrl.pool.journal import MAGIC
from plexrl.pool.layout import Layout
from plexrl.types import BadInput, PlexrlError, Unavailable
from plexrl.types import records as r


@pytest.fixture
def layout(tmp_path):
    layout = Layout(tmp_path / "state")
    layout.make()
    return layout


@pytest.fixture
def open_folder():
    """A folder that other uids can reach, as pytest's own are not."""
    folder = Path(tempfile.mkdtemp(prefix="plexrl-reports-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def write(layout, scene, records=None):
    ledger = Ledger(layout.ledger)
    for record in scene.records if records is None else records:
        ledger.take(record)
    ledger.close()


def test_the_ledger_keeps_what_accounting_needs_and_no_more(layout, scene):
    scene.add(r.ModelEnded, 90, model="m", reason="x")
    write(layout, scene)
    assert read(layout.ledger) == [kept for record in scene.records if (kept := slim(record)) is not None]
    assert not any(isinstance(record, r.ModelEnded) for record in read(layout.ledger))
    assert b"secret" not in b"".join(path.read_bytes() for path in layout.ledger.iterdir())
    assert {path.stat().st_mode & 0o777 for path in layout.ledger.iterdir()} == {0o600}


def test_the_ledger_reaches_the_disk_each_second_and_at_the_end(layout, scene):
    ledger = Ledger(layout.ledger)
    for record in scene.records[:-1]:
        ledger.take(record)
    assert 0 < len(read(layout.ledger)) < len(scene.records)
    ledger.take(scene.records[-1])
    assert isinstance(read(layout.ledger)[-1], r.EpochEnded)
    ledger.close()


def test_a_torn_frame_is_not_counted_a_damaged_one_is_named(layout, scene):
    write(layout, scene)
    (path,) = layout.ledger.iterdir()
    whole = path.read_bytes()
    before = read(layout.ledger)
    path.write_bytes(whole[:-3])
    assert read(layout.ledger) == before[:-1]
    path.write_bytes(whole[:4] + b"\xc1" + whole[5:])
    with pytest.raises(PlexrlError, match="damaged at byte 0"):
        read(layout.ledger)


def test_what_a_killed_head_had_not_written_comes_from_the_journal(layout, scene):
    payloads = [msgspec.msgpack.encode(record) for record in scene.records]
    epoch = scene.records[0].epoch
    folder = layout.journal / str(epoch)
    folder.mkdir()
    frames = b"".join(struct.pack("<II", len(p), zlib.crc32(p)) + p for p in payloads)
    (folder / "000001.log").write_bytes(MAGIC + frames)
    write(layout, scene, scene.records[:20])
    assert repair(layout.ledger, layout.journal)
    assert len(read(layout.ledger)) == len(scene.records)
    assert not repair(layout.ledger, layout.journal)


def publish(layout, scene, folder):
    write(layout, scene)
    for interval in scene.intervals(96):
        with (layout.agents / f"{interval.node}.jsonl").open("ab") as file:
            file.write(msgspec.json.encode(interval) + b"\n")
    return Publisher(layout, folder, 1000).write(scene.us(100))


def test_published_reports_are_read_without_a_pool(layout, scene, tmp_path):
    folder = reports_of(tmp_path / "registry", "lab")
    whole = publish(layout, scene, folder)
    shutil.rmtree(layout.root)
    assert Store(folder, os.geteuid()).read() == whole
    assert sorted(path.name for path in folder.iterdir()) == ["pool.bin", "uid-1001.bin", "uid-1002.bin"]
    assert folder == tmp_path / "reports" / "lab"
    assert folder.stat().st_mode & 0o777 == 0o755


def test_catching_up_keeps_the_device_and_leaves_a_running_pool_alone(layout, scene, tmp_path):
    folder = tmp_path / "reports"
    publish(layout, scene, folder)
    before = (folder / "pool.bin").stat().st_ino
    Publisher(layout, folder).catch_up(scene.us(200))
    assert (folder / "pool.bin").stat().st_ino != before
    assert Store(folder, os.geteuid()).read().device_bytes == 1000
    scene.epoch(100, 102)
    write(layout, scene, scene.records[-1:])
    before = (folder / "pool.bin").stat().st_ino
    Publisher(layout, folder).catch_up(scene.us(110))
    assert (folder / "pool.bin").stat().st_ino == before


def test_a_head_publishes_each_minute_and_at_its_end(layout, scene, tmp_path):
    folder = tmp_path / "reports"
    publisher = Publisher(layout, folder, 1000)
    ledger = Ledger(layout.ledger)

    def until():
        return Store(folder, os.geteuid()).read().until_us

    for record in scene.records[:-1]:
        ledger.take(record)
    ledger.flush()
    publisher.publish(scene.us(91))
    first = (folder / "pool.bin").stat().st_ino
    publisher.publish(scene.us(94))
    assert (folder / "pool.bin").stat().st_ino == first
    ledger.take(scene.records[-1])
    publisher.publish(scene.us(95))
    assert (folder / "pool.bin").stat().st_ino != first
    last = until()
    publisher.publish(scene.us(99))
    assert until() == last


def test_the_last_report_waits_for_the_agents_that_are_ending(layout, scene, tmp_path):
    write(layout, scene)
    path = layout.agents / "n1.jsonl"
    growing, last = scene.intervals(93)[0], scene.intervals(96)[0]
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(growing, final=False)) + b"\n")
    ends = threading.Timer(0.3, lambda: path.open("ab").write(msgspec.json.encode(last) + b"\n"))
    ends.start()
    Publisher(layout, tmp_path / "reports").publish(scene.us(95))
    ends.join()
    assert Store(tmp_path / "reports", os.geteuid()).read().until_us == scene.us(96)


def test_a_report_that_cannot_be_written_is_logged(layout, scene, tmp_path, caplog):
    write(layout, scene)
    publisher = Publisher(layout, tmp_path / "reports")
    (tmp_path / "reports" / "pool.bin").mkdir()
    publisher.publish(scene.us(95))
    assert "the reports were not published" in caplog.text


def as_uid(uid, act):
    """The exit code of act() in a child that is another user: 0 fine, 13 not permitted."""
    child = os.fork()
    if child == 0:
        code = 99
        try:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            act()
            code = 0
        except PermissionError:
            code = 13
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_the_kernel_keeps_users_apart(layout, scene, open_folder):
    publish(layout, scene, open_folder)
    path = open_folder / "uid-1001.bin"
    assert os.getxattr(path, "system.posix_acl_access") == acl.readable_by(1001)
    assert path.stat().st_mode & 0o777 == 0o640  # the group bits show the ACL's mask; the group itself has nothing
    assert "system.posix_acl_access" not in os.listxattr(open_folder / "pool.bin")
    if os.geteuid() == 0:  # only root can become somebody else
        assert as_uid(1001, path.read_bytes) == 0
        assert as_uid(1002, path.read_bytes) == 13
        assert as_uid(1001, (open_folder / "pool.bin").read_bytes) == 13
        assert as_uid(1001, lambda: path.open("ab")) == 13

        def own():
            found = Store(open_folder, 0).read()
            assert found.uid == 1001 and [job.user for job in found.jobs] == ["ada"]

        assert as_uid(1001, own) == 0

        def nothing():
            with pytest.raises(Unavailable, match="uid 4711"):
                Store(open_folder, 0).read()

        assert as_uid(4711, nothing) == 0


def test_the_acl_is_what_setfacl_would_write():
    value = acl.readable_by(1001)
    assert value[:4] == b"\2\0\0\0"
    entries = [struct.unpack_from("<HHI", value, 4 + 8 * i) for i in range(5)]
    assert entries == [(1, 6, 2**32 - 1), (2, 4, 1001), (4, 0, 2**32 - 1), (16, 4, 2**32 - 1), (32, 0, 2**32 - 1)]


def test_without_acls_it_warns_and_only_the_account_reads(tmp_path, monkeypatch):
    def none(*_):
        raise OSError(errno.ENOTSUP, "not supported")

    monkeypatch.setattr(os, "setxattr", none)
    with open(tmp_path / "x", "wb") as file, pytest.warns(acl.NoAcl, match="without POSIX ACLs"):
        acl.let_read(file.fileno(), {os.geteuid() + 1}, "here")
    with open(tmp_path / "x", "wb") as file, warnings.catch_warnings():
        warnings.simplefilter("error")
        acl.let_read(file.fileno(), {os.geteuid()}, "here")


def test_a_report_that_the_pool_did_not_write_is_not_believed(layout, scene, tmp_path):
    publish(layout, scene, tmp_path / "r")
    path = tmp_path / "r" / "pool.bin"
    path.chmod(0o666)
    with pytest.raises(BadInput, match="not written by the pool"):
        Store(tmp_path / "r", os.geteuid()).read()
    path.chmod(0o600)
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    with pytest.raises(BadInput, match="damaged"):
        Store(tmp_path / "r", os.geteuid()).read()
    path.write_bytes(b"plexrl report 9\n")
    with pytest.raises(BadInput, match="this version"):
        Store(tmp_path / "r", os.geteuid()).read()
    path.unlink()
    path.symlink_to("/etc/passwd")
    with pytest.raises(BadInput, match="no link"):
        Store(tmp_path / "r", os.geteuid()).read()


def test_a_pool_without_reports_says_so(tmp_path):
    with pytest.raises(Unavailable, match="no report"):
        Store(tmp_path / "none", os.geteuid()).read()
