"""Where a pool keeps its files. All of it belongs to the service account, 0700."""

import os
import re
import shutil
from pathlib import Path

from plexrl.types import BadInput

_CHECKPOINT = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")


class Layout:
    """Folders and files under a pool's state_dir."""

    def __init__(self, state_dir: str | Path):
        self.root = Path(state_dir)
        self.journal = self.root / "journal"
        self.ledger = self.root / "ledger"
        self.agents = self.root / "agents"
        self.checkpoints = self.root / "checkpoints"
        self.run = self.root / "run"
        self.logs = self.root / "logs"
        self.control = self.run / "control.json"
        self.keys = self.run / "keys.json"

    def make(self) -> None:
        """Create what is missing. Raises BadInput when the folder is not ours alone."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = self.root.stat()
        if status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise BadInput(
                f"state_dir {self.root} belongs to uid {status.st_uid} with mode {status.st_mode & 0o777:o}",
                f"It must belong to uid {os.getuid()} and have mode 700",
            )
        for folder in (self.journal, self.ledger, self.agents, self.checkpoints, self.run, self.logs):
            folder.mkdir(mode=0o700, exist_ok=True)

    def sweep(self) -> None:
        """Remove the half-written files of a head that was killed."""
        for path in self.run.glob(".*"):
            path.unlink(missing_ok=True)

    def clear(self) -> None:
        """The pool has ended in order: nothing stays in run/."""
        for path in self.run.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def checkpoint(self, uid: int, model: str, kind: str, name: str) -> Path:
        """The folder of a checkpoint, always under its owner's. Raises BadInput for a name that could escape it."""
        for part in (kind, name):
            if not _CHECKPOINT.match(part):
                raise BadInput(
                    f"checkpoint name {part!r} is not allowed",
                    "Use letters, digits, '.', '_' and '-', at most 128, not beginning with a dot",
                )
        return self.checkpoints / str(uid) / re.sub(r"[^A-Za-z0-9._-]", "+", model) / kind / name


def meta_of(checkpoint: Path) -> Path:
    """The file beside a checkpoint that says what model it is of (its name cannot be a checkpoint's)."""
    return checkpoint.with_name(f".{checkpoint.name}.meta")
