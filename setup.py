"""Installs, beside the package, what Slurm and the admin need as files: <prefix>/share/plexrl/.

Everything else stands in pyproject.toml.
"""

from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
SHARED = ("sbatch_templates", "site_config", "slurm_plugin")
BUILT = {".o", ".so"}


def shared_files() -> list[tuple[str, list[str]]]:
    """(target folder, files) for each folder below SHARED; what a build left there is not shipped."""
    found: dict[str, list[str]] = {}
    for top in SHARED:
        for path in sorted((ROOT / top).rglob("*")):
            relative = path.relative_to(ROOT)
            if path.is_file() and path.suffix not in BUILT and "__pycache__" not in relative.parts:
                found.setdefault(f"share/plexrl/{relative.parent}", []).append(str(relative))
    return list(found.items())


setup(data_files=shared_files())
