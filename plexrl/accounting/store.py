"""The reports' store: what the head publishes and users read, also after the pool has ended. No head is asked.

A directory per pool: `pool.bin` is the whole, for the pool's account, root and Slurm's operators; `uid-<UID>.bin` holds
one user's own jobs, those of accounts that the user coordinates, and the pool's sums. Files belong to the pool's
account, 0600; an ACL lets those users read theirs, so it is the kernel and no filter that keeps users apart.
"""

import logging
import os
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from pathlib import Path

import msgspec

from plexrl.accounting.acl import let_read
from plexrl.accounting.ledger import Ledger, read, records_from, repair
from plexrl.accounting.published import Published, compute, for_reader, horizon
from plexrl.accounting.readers import Readers, kept
from plexrl.pool.intervals import read_intervals
from plexrl.pool.layout import Layout
from plexrl.types import BadInput, Unavailable
from plexrl.types.records import EpochEnded

__all__ = ["Ledger", "Publisher", "Store", "reports_of"]

log = logging.getLogger("plexrl.accounting")
_EVERY_US = 50_000_000  # a head that asks every ten seconds publishes each minute
_SETTLE_S = 5.0
_REPORTING_US = 15_000_000  # an agent that is alive has reported since
_MAGIC = b"plexrl report 1\n"
_WHOLE = "pool.bin"
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Published).decode


def reports_of(registry: str | os.PathLike[str], pool: str) -> Path:
    """Where a pool's reports are: `reports/<pool>` beside the registry."""
    return Path(registry).absolute().parent / "reports" / pool


class Publisher:
    """The writing end, for the account that the pool runs as. folder: the pool's own, made when it is missing.

    device_bytes: of one GPU, so that the baseline knows whether trainer and sampler fit beside each other; None: as
    published before, else they are taken to fit (the smaller baseline). pretend: GPUs are cores; None: as before.
    """

    def __init__(
        self,
        layout: Layout,
        folder: str | os.PathLike[str],
        device_bytes: int | None = None,
        pretend: bool | None = None,
    ) -> None:
        self._layout = layout
        self._folder = Path(folder)
        self._device_bytes = device_bytes
        self._pretend = pretend
        self._read: dict[Path, int] = {}  # ledger file -> bytes looked at for an epoch's end
        self._next_us = 0
        try:
            for missing in (self._folder.parent, self._folder):
                if not missing.exists():
                    missing.mkdir(mode=0o755, parents=True)
                    missing.chmod(0o755)  # whatever the umask
        except OSError as error:
            uid = os.geteuid()
            raise Unavailable(
                f"the folder of the reports, {self._folder}, cannot be made ({error.strerror})",
                f"Have the admin run: install -d -o {uid} -m 0755 {self._folder}",
            ) from error

    def publish(self, now_us: int) -> None:
        """For a head: bring all reports up to date, but once a minute only, unless its epoch has ended.

        Done by a process of its own at low priority, so that neither the head's thread nor its memory pays for a long
        ledger; a ledger that takes long is published less often (a twentieth of the time). A failure is logged: a pool
        does not stop because its reports cannot be written.
        """
        ended = self._epoch_ended()
        if ended:
            now_us = self._settle(now_us)
        elif now_us < self._next_us:
            return
        begun = time.monotonic()
        command = [sys.executable, "-I", "-m", "plexrl.accounting.publish", self._layout.root, self._folder]
        command += [str(now_us), str(self._device_bytes or 0), "pretend" if self._pretend else "real"]
        command.append("last" if ended else "more")
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if done.returncode:
            log.error("the reports were not published: %s", done.stderr.strip()[-2000:])
        self._next_us = now_us + max(_EVERY_US, round(20e6 * (time.monotonic() - begun)))

    def _epoch_ended(self) -> bool:
        """Whether an epoch's end was written since the last call."""
        ended = False
        for path in self._layout.ledger.glob("*.log"):
            for record, at in records_from(path, self._read.get(path, 0)):
                ended |= isinstance(record, EpochEnded)
                self._read[path] = at
        return ended

    def _settle(self, now_us: int) -> int:
        """Wait a moment for the agents that still report: their last seconds belong into the last report. Returns now.

        Head and agents are told to end together, so this holds the allocation no longer than they do.
        """
        deadline = time.monotonic() + _SETTLE_S
        while time.monotonic() < deadline:
            open_ = [
                i for i in read_intervals(self._layout.agents) if not i.final and now_us - i.now_us < _REPORTING_US
            ]
            if not open_:
                break
            time.sleep(0.1)
        return max(now_us, time.time_ns() // 1000)

    def write(self, now_us: int, ask: Callable[[], Readers] | None = None) -> Published:
        """Bring all reports up to date, here and now. ask: who sees more than own jobs; None: as before."""
        if self._device_bytes is None or self._pretend is None:
            before = _load(self._folder / _WHOLE, frozenset((os.geteuid(), 0)))
            if before is not None:
                self._device_bytes = self._device_bytes or before.device_bytes
                self._pretend = before.pretend if self._pretend is None else self._pretend
        records, intervals = read(self._layout.ledger), read_intervals(self._layout.agents)
        whole = compute(records, intervals, now_us, self._device_bytes, bool(self._pretend))
        readers = ask() if ask else kept(self._folder)
        self._write(_WHOLE, whole, readers.operators)
        coordinated = {
            uid: accounts & {job.account for job in whole.jobs} for uid, accounts in readers.coordinated.items()
        }
        seen = {job.uid for job in whole.jobs} | {uid for uid, accounts in coordinated.items() if accounts}
        for uid in sorted(seen):
            self._write(_name(uid), for_reader(whole, uid, coordinated.get(uid, ())), {uid})
        for path in self._folder.glob("uid-*.bin"):  # of who coordinates no more
            if path.name not in map(_name, seen):
                path.unlink()
        return whole

    def repair(self) -> None:
        """Take from the journal what a killed head had not written to the ledger. Only while no head runs."""
        if self._layout.ledger.is_dir():
            repair(self._layout.ledger, self._layout.journal)

    def catch_up(self, now_us: int) -> None:
        """Publish once more when no head does so any more. While one is at work nothing happens."""
        running = horizon(read(self._layout.ledger), read_intervals(self._layout.agents), now_us)[1]
        if not running:
            self.repair()
            self.write(now_us)

    def _write(self, name: str, published: Published, uids: Collection[int]) -> None:
        fd, temporary = tempfile.mkstemp(prefix=f".{name}.", dir=self._folder)
        try:
            with os.fdopen(fd, "wb") as file:
                let_read(fd, uids, str(self._folder))
                file.write(_MAGIC + _encode(published))
            os.rename(temporary, self._folder / name)
        except BaseException:
            os.unlink(temporary)
            raise


class Store:
    """The reading end. owner_uid: the account that the pool was declared for; its files and root's are believed."""

    def __init__(self, folder: str | os.PathLike[str], owner_uid: int) -> None:
        self._folder = Path(folder)
        self._trusted = frozenset((owner_uid, 0))

    def read(self) -> Published:
        """The whole where this process may read it, else the part of its user and the accounts that it coordinates.

        Raises Unavailable when nothing was published that it may read, BadInput for a file that is not believed.
        """
        uid = os.geteuid()
        for name in (_WHOLE, _name(uid)):
            try:
                found = _load(self._folder / name, self._trusted)
            except PermissionError:
                continue
            if found is not None:
                return found
        raise Unavailable(
            f"{self._folder} has no report that uid {uid} may read",
            "A pool publishes one to each user whose job has attached to it, within a minute",
        )


def _name(uid: int) -> str:
    return f"uid-{uid}.bin"


def _load(path: Path, trusted: frozenset[int]) -> Published | None:
    """None when there is no such file. Raises PermissionError where the kernel says so."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except PermissionError:
        raise
    except OSError as error:
        raise BadInput(f"{path} cannot be opened ({error.strerror})", "It must be a plain file and no link") from error
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        # With an ACL the group bits show its mask, which is read only.
        if status.st_uid not in trusted or status.st_mode & 0o022 or not stat.S_ISREG(status.st_mode):
            raise BadInput(f"{path} was not written by the pool (owner uid {status.st_uid})", "Remove it")
        data = file.read()
    if not data.startswith(_MAGIC):
        raise BadInput(f"{path} is no report of this version of plexrl", "Read it with the version that wrote it")
    try:
        return _decode(data[len(_MAGIC) :])
    except msgspec.MsgspecError as error:
        raise BadInput(f"{path} is damaged: {error}", "It is written anew when the pool runs") from error
