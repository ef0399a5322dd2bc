"""What `Publisher.publish` runs.

Arguments: state_dir, folder of the reports, now in microseconds, bytes of one GPU or 0, `pretend` or `real` GPUs, and
whether it is the `last` time or `more` will come.
"""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from plexrl.accounting.readers import asked
from plexrl.accounting.store import Publisher
from plexrl.pool.layout import Layout
from plexrl.slurm.commands import SlurmCommands


def main(state_dir: str, folder: str, now_us: str, device_bytes: str, device: str, when: str) -> None:
    """Publish once, behind everything else that this machine has to do; the last time the allocation waits for it."""
    last = when == "last"
    if not last:
        os.nice(15)
    publisher = Publisher(Layout(state_dir), folder, int(device_bytes) or None, device == "pretend")
    with ThreadPoolExecutor(1) as beside:  # Slurm is asked while the reports are computed
        publisher.write(int(now_us), beside.submit(asked, SlurmCommands(), Path(folder), last).result)


if __name__ == "__main__":
    main(*sys.argv[1:])
