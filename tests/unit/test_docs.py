"""The documents hold what they promise: short README, live links, no foreign host named."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SKIPPED = {".venv", ".git", ".cache", "build", "dist", "demo-out", ".pytest_cache"}
# Where a document may lead: papers, standards, and addresses of this machine or of nobody.
HOSTS = re.compile(r"127\.[\d.]+|hub|.*\.example|www\.w3\.org|www\.apache\.org|semver\.org|keepachangelog\.com")
URL = re.compile(r"https?://([A-Za-z0-9.-]+)")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")

DOCUMENTS = sorted(path for path in ROOT.rglob("*.md") if not SKIPPED & set(path.relative_to(ROOT).parts))


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_lead_somewhere(path):
    for target in LINK.findall(path.read_text(encoding="utf-8")):
        if "://" in target or target.startswith(("#", "mailto:")):
            continue
        file, _, anchor = target.partition("#")
        there = path.parent / file
        assert there.exists(), f"{path}: {target} does not exist"
        if anchor and there.suffix == ".md":
            assert anchor in anchors(there), f"{path}: {target}: no such heading"


def anchors(path: Path) -> set[str]:
    """The anchors of a document's headings, as the usual renderers make them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_no_foreign_host_is_named():
    """Sites choose their own registries and mirrors; the project leads to none."""
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    for name in filter(None, tracked.decode().split("\0")):
        path = ROOT / name
        if path.is_file():
            for host in URL.findall(path.read_bytes().decode("utf-8", errors="ignore")):
                assert HOSTS.fullmatch(host), f"{name} names {host}"
