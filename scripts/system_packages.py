"""Sees to the Debian packages that Slurm and the plugin need: installs them where it may, else says which they are.

Exit status: 0 all there, 1 something is missing.
"""

import sys

from plexrl.slurm.devcluster import packages
from plexrl.types import PlexrlError

RULE = "-" * 100

try:
    if packages.missing():
        print(f"plexrl: installing Debian packages: {' '.join(packages.missing())}", file=sys.stderr)
    packages.ensure()
except PlexrlError as error:
    sys.exit(f"{RULE}\nplexrl: Slurm cannot be run here. {error}\n{RULE}")
