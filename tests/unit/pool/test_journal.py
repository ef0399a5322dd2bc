"""The journal: what was acknowledged is there, a torn tail is not missed, corruption is named."""

import asyncio
import os

import pytest

from plexrl.pool import journal
from plexrl.pool.journal import Journal, epoch_of, epochs, replay
from plexrl.types import BadInput, Epoch, PlexrlError, records

EPOCH = Epoch(10, 0, 0)


def record(number: int, size: int = 10) -> records.Record:
    return records.JobEnded(now_us=number, job=f"{number}.0", reason="x" * size)


def write(root, count: int, epoch: Epoch = EPOCH) -> list[records.Record]:
    written = [record(i) for i in range(count)]

    async def main() -> None:
        book = Journal(root, epoch, asyncio.get_running_loop(), pytest.fail)
        for one in written:
            await book.append(one)
        book.close()

    asyncio.run(main())
    return written


def segment(root, epoch: Epoch = EPOCH):
    return root / str(epoch) / "000001.log"


def test_what_was_written_is_replayed_over_all_epochs_in_order(tmp_path):
    later = write(tmp_path, 3, Epoch(11, 5, 0))
    earlier = write(tmp_path, 2, Epoch(10, 7, 1))
    assert epochs(tmp_path) == [Epoch(10, 7, 1), Epoch(11, 5, 0)]
    assert list(replay(tmp_path)) == earlier + later
    assert segment(tmp_path, Epoch(11, 5, 0)).stat().st_mode & 0o777 == 0o600


def test_records_of_a_burst_share_syncs_and_keep_their_order(tmp_path):
    order = []

    async def main() -> int:
        book = Journal(tmp_path, EPOCH, asyncio.get_running_loop(), pytest.fail)
        futures = []
        for i in range(300):
            future = book.append(record(i), durable=i % 3 != 0)
            if future is not None:
                future.add_done_callback(lambda _, i=i: order.append(i))
                futures.append(future)
        await asyncio.gather(*futures)
        book.close()
        return book.syncs

    syncs = asyncio.run(main())
    assert syncs < 100
    assert order == [i for i in range(300) if i % 3]
    assert [r.now_us for r in replay(tmp_path)] == list(range(300))


def test_a_record_that_nobody_waits_for_is_on_disk_after_the_end(tmp_path):
    async def main() -> None:
        book = Journal(tmp_path, EPOCH, asyncio.get_running_loop(), pytest.fail)
        assert book.append(record(1), durable=False) is None
        book.close()

    asyncio.run(main())
    assert list(replay(tmp_path)) == [record(1)]


def test_a_tail_cut_anywhere_is_not_missed(tmp_path):
    written = write(tmp_path, 3)
    path = segment(tmp_path)
    whole = path.read_bytes()
    frame = (len(whole) - len(journal.MAGIC)) // 3
    for cut in range(1, frame + 1):
        path.write_bytes(whole[:-cut])
        assert list(replay(tmp_path)) == written[:2], cut
    path.write_bytes(whole + b"\0" * 4096)  # pages that were allotted and never written
    assert list(replay(tmp_path)) == written
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert list(replay(tmp_path)) == written[:2]
    path.write_bytes(journal.MAGIC[:5])
    assert list(replay(tmp_path)) == []


def test_damage_before_the_tail_is_named(tmp_path):
    write(tmp_path, 3)
    path = segment(tmp_path)
    whole = bytearray(path.read_bytes())
    frame = (len(whole) - len(journal.MAGIC)) // 3
    whole[len(journal.MAGIC) + frame + 12] ^= 1
    path.write_bytes(whole)
    with pytest.raises(PlexrlError, match=f"000001.log is damaged at byte {len(journal.MAGIC) + frame}"):
        list(replay(tmp_path))
    path.write_bytes(b"something else altogether")
    with pytest.raises(PlexrlError, match="is no journal of this version"):
        list(replay(tmp_path))


def test_segments_roll_over_and_only_the_last_may_be_torn(tmp_path, monkeypatch):
    monkeypatch.setattr(journal, "SEGMENT_BYTES", 200)
    written = write(tmp_path, 12)
    paths = sorted((tmp_path / str(EPOCH)).glob("*.log"))
    assert len(paths) > 2
    assert list(replay(tmp_path)) == written
    paths[0].write_bytes(paths[0].read_bytes()[:-1])
    with pytest.raises(PlexrlError, match="000001.log is damaged"):
        list(replay(tmp_path))


def test_a_full_disk_is_told_and_acknowledges_nothing(tmp_path):
    async def main() -> list[OSError]:
        failures: list[OSError] = []
        told = asyncio.Event()
        loop = asyncio.get_running_loop()
        book = Journal(tmp_path, EPOCH, loop, lambda error: (failures.append(error), told.set()))
        await book.append(record(1))
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, book._fd)
        os.close(full)
        lost = book.append(record(2))
        await told.wait()
        after = book.append(record(3))
        await asyncio.sleep(0.05)
        assert not lost.done() and not after.done()
        book.close()
        return failures

    (failure,) = asyncio.run(main())
    assert "No space left" in str(failure)
    assert list(replay(tmp_path)) == [record(1)]


def test_a_journal_that_cannot_begin_leaves_nothing(tmp_path, monkeypatch):
    def full(fd: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    async def main() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(journal, "_write", full)
            with pytest.raises(OSError, match="No space left"):
                Journal(tmp_path, EPOCH, asyncio.get_running_loop(), pytest.fail)
        assert list(tmp_path.iterdir()) == []
        Journal(tmp_path, EPOCH, asyncio.get_running_loop(), pytest.fail).close()

    asyncio.run(main())


@pytest.mark.parametrize("name", ["10-0", "10-0-x", "a", "10-0-0-0"])
def test_folders_of_other_names_are_refused(name):
    with pytest.raises(BadInput, match="is not named"):
        epoch_of(name)
