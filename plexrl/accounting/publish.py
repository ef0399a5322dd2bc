"""What `Publisher.publish` runs.

Arguments: state_dir, folder of the reports, now in microseconds, bytes of one GPU or 0, `pretend` or `real` GPUs, and
whether it is the `last` time or `more` will come.
"""

import os
import sys
from pathlib import Path

from plexrl.accounting.readers import asked
from plexrl.accounting.store import Publisher
from plexrl.pool.layout import Layout
from plexrl.slurm.commands import SlurmCommands


def main(state_dir: str, folder: str, now_us: str, device_bytes: str, device: str, when: str) -> None:
    """Publish once, behind everything else that this machine has to do."""
    os.nice(15)
    publisher = Publisher(Layout(state_dir), folder, int(device_bytes) or None, device == "pretend")
    publisher.write(int(now_us), asked(SlurmCommands(), Path(folder), when == "last"))


if __name__ == "__main__":
    main(*sys.argv[1:])
