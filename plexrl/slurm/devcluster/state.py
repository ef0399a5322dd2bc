"""What a development cluster remembers between commands: DIR/devcluster.json, written atomically, mode 0644."""

import os
from pathlib import Path
from typing import Self

import msgspec
from msgspec import Struct, field

from plexrl.types import BadInput


class Started(Struct, frozen=True, kw_only=True):
    """A process that `up` started. Pids are reused; (boot, pid, start ticks) are not."""

    name: str
    pid: int
    ticks: int
    boot: str

    @classmethod
    def of(cls, name: str, pid: int) -> Self:
        """Identify a running process; ProcessLookupError when it has ended."""
        ticks = start_ticks(pid)
        if ticks is None:
            raise ProcessLookupError(pid)
        return cls(name=name, pid=pid, ticks=ticks, boot=boot_id())

    def alive(self) -> bool:
        """Whether this very process (not another with its pid) still runs."""
        return self.boot == boot_id() and start_ticks(self.pid) == self.ticks


class State(Struct, kw_only=True):
    """ports: by daemon name. started: in this order. installed: part -> digest of what it was made from."""

    nodes: int = 0
    gpus_per_node: int = 0
    ports: dict[str, int] = field(default_factory=dict)
    started: list[Started] = field(default_factory=list)
    installed: dict[str, str] = field(default_factory=dict)


def boot_id() -> str:
    """The kernel's name for this boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def start_ticks(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; None when there is none, or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def load(path: Path) -> State | None:
    """Read the file; None when there is none, BadInput when it is not ours."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=State)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        mend = "Restore it, or end the daemons by hand and remove the directory"
        raise BadInput(f"{path} is not a development cluster's state file ({error})", mend) from error


def save(path: Path, state: State) -> None:
    """Replace the file atomically."""
    temp = path.with_name(f".{path.name}.new")
    temp.write_bytes(msgspec.json.format(msgspec.json.encode(state), indent=2))
    temp.chmod(0o644)
    os.replace(temp, path)
