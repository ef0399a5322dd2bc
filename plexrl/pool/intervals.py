"""An agent's own measure of how long it held its GPUs, kept apart from what the head writes.

One JSON line per GPU and report; the last line of a (GPU, start) wins. Accounting sums these and compares the sum with
sacct's: the two have nothing in common but the allocation's StartTime.
"""

from pathlib import Path

import msgspec

from plexrl.types.records import AgentInterval

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(AgentInterval).decode


class IntervalLog:
    """Appends the growing interval of each GPU of one agent."""

    def __init__(self, folder: Path, node: str, slurm_job: int, start_us: int, gpus: tuple[str, ...]):
        self._path = folder / f"{node}-{slurm_job}-{start_us}.jsonl"
        self._node, self._slurm_job, self._start_us, self._gpus = node, slurm_job, start_us, gpus

    def extend(self, now_us: int, final: bool) -> None:
        """Write that every GPU was held until now_us."""
        with self._path.open("ab") as file:
            for gpu in self._gpus:
                interval = AgentInterval(
                    now_us=now_us,
                    node=self._node,
                    gpu=gpu,
                    slurm_job=self._slurm_job,
                    start_us=self._start_us,
                    end_us=now_us,
                    final=final,
                )
                file.write(_encode(interval) + b"\n")


def read_intervals(folder: Path) -> list[AgentInterval]:
    """The last interval of every (GPU, start), by start. A cut last line (a killed agent) is not counted."""
    last: dict[tuple[str, int], AgentInterval] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_bytes().splitlines(keepends=True):
            if line.endswith(b"\n"):
                interval = _decode(line)
                last[(interval.gpu, interval.start_us)] = interval
    return sorted(last.values(), key=lambda i: (i.start_us, i.gpu))
