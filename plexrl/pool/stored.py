"""How much of the pool's disk checkpoints take, by user and account, and which have grown too old."""

import json
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from plexrl.pool.book import Book
from plexrl.pool.layout import Layout, meta_of

KINDS = ("weights", "sampler_weights")


class Kept(NamedTuple):
    """A checkpoint. account: of the job that saved it; user: whose it is; "" where not known. saved: unix time."""

    folder: Path
    uid: int
    account: str
    bytes: int
    saved: float
    user: str = ""
    qos: str = ""

    @property
    def model(self) -> str:
        """The id of the deployment: in its folder's name colons are plus signs."""
        return self.folder.parent.parent.name.replace("+", ":")

    @property
    def path(self) -> str:
        """What its user calls it."""
        return f"tinker://{self.model}/{self.folder.parent.name}/{self.folder.name}"


class Stored:
    """What the last look at the disk found."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._bytes: Counter[tuple[str, str]] = Counter()
        self.kept: list[Kept] = []

    def of(self, kind: str, name: str) -> int:
        """Bytes of a user (kind `users`) or an account (`accounts`)."""
        return self._bytes[kind, name]

    def note(self, found: list[Kept], book: Book) -> None:
        """Take what a look found. The book knows the names of uids, and the accounts of models."""
        users = {job.attached.uid: job.attached.user for job in book.jobs.values()}
        self.kept, self._bytes = [], Counter()
        for each in found:
            model = book.models.get(each.model)
            account = each.account or (model.created.account if model else "")
            self.kept.append(each._replace(account=account, user=users.get(each.uid, "")))
            for kind, name in (("accounts", account), ("users", users.get(each.uid, ""))):
                self._bytes[kind, name] += each.bytes

    def look(self) -> list[Kept]:
        """Read the disk; called in a thread, changes nothing."""
        found = []
        for root in self._layout.checkpoints.iterdir():
            if not root.name.isdigit():
                continue
            for kind in KINDS:
                for folder in root.glob(f"*/{kind}/*"):
                    if not folder.name.startswith("."):
                        found += _kept(folder, int(root.name))
        return found


def _kept(folder: Path, uid: int) -> list[Kept]:
    """One, or none where it is deleted meanwhile."""
    try:
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        saved = folder.stat().st_mtime
        meta = json.loads(meta_of(folder).read_text()) if meta_of(folder).is_file() else {}
    except (OSError, ValueError):
        return []
    return [Kept(folder, uid, str(meta.get("account", "")), size, saved)]
