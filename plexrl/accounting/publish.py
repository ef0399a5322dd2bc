"""What `Publisher.publish` runs: state_dir, folder of the reports, now in microseconds, bytes of one GPU or 0."""

import os
import sys

from plexrl.accounting.store import Publisher
from plexrl.pool.layout import Layout


def main(state_dir: str, folder: str, now_us: str, device_bytes: str) -> None:
    """Publish once, behind everything else that this machine has to do."""
    os.nice(15)
    Publisher(Layout(state_dir), folder, int(device_bytes) or None).write(int(now_us))


if __name__ == "__main__":
    main(*sys.argv[1:])
