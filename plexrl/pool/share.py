"""Where the files that stand beside the package are: installed under <prefix>/share/plexrl, else in the source tree."""

import sys
from pathlib import Path

import plexrl
from plexrl.types import BadInput


def shared(relative: str) -> Path:
    """A file or folder of sbatch_templates, site_config or slurm_plugin. Raises BadInput when it is not there."""
    for root in (Path(sys.prefix) / "share" / "plexrl", Path(plexrl.__file__).resolve().parent.parent):
        if (root / relative).exists():
            return root / relative
    raise BadInput(f"{relative} is not installed with plexrl", "Install the wheel, or run from a source tree")
