"""Who may import whom.

cli -> gateway, accounting -> pool, sim -> scheduler, memory, engines, slurm -> wire -> config -> types

A room imports only rooms further right. In the box (scheduler, memory, engines, slurm) only engines reads memory;
attach reads wire and types; the head gets the gateway from cli. All imports of a file count, wherever they stand.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import plexrl

PACKAGE = Path(plexrl.__file__).parent
BELOW_THE_BOX = {"wire", "config", "types"}
BOX = {"scheduler", "memory", "engines", "slurm"}

ALLOWED = {
    "types": set(),
    "config": {"types"},
    "wire": {"config", "types"},
    "scheduler": BELOW_THE_BOX,
    "memory": BELOW_THE_BOX,
    "slurm": BELOW_THE_BOX,
    "engines": BELOW_THE_BOX | {"memory"},
    "pool": BELOW_THE_BOX | BOX,
    "sim": BELOW_THE_BOX | BOX,
    "gateway": BELOW_THE_BOX | BOX | {"pool", "sim"},
    "accounting": BELOW_THE_BOX | BOX | {"pool", "sim"},
    "attach": {"wire", "types"},
    "cli": BELOW_THE_BOX | BOX | {"pool", "sim", "gateway", "accounting", "attach"},
}
HEAVY = {"torch", "transformers", "peft", "accelerate", "vllm", "deepspeed"}
WITHOUT_TORCH = {"types", "config", "wire", "scheduler", "attach"}

FILES = sorted(PACKAGE.rglob("*.py"))


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, absolute module name) of every import in a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import; write the absolute name"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def room(path: Path) -> str:
    """The room a file stands in; empty for the package's own __init__.py."""
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else ""


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_arrows_point_downward(path):
    here = room(path)
    assert here in ALLOWED or not here, f"{here} is no room of the plan"
    for line, name in imports(path):
        top, *rest = name.split(".")
        if top != "plexrl" or not rest or rest[0] not in ALLOWED:
            continue
        allowed = ALLOWED.get(here, set()) | {here}
        assert rest[0] in allowed, f"{path}:{line}: {here} may not import {rest[0]}, only {', '.join(sorted(allowed))}"


@pytest.mark.parametrize(
    "path", [path for path in FILES if room(path) in WITHOUT_TORCH], ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_no_torch_here(path):
    for line, name in imports(path):
        assert name.split(".")[0] not in HEAVY, f"{path}:{line}: {room(path)} may not import {name}"


def test_scheduler_has_no_clock_and_no_sockets():
    forbidden = {"time", "datetime", "socket", "asyncio", "threading", "zmq"}
    for path in FILES:
        if room(path) == "scheduler":
            for line, name in imports(path):
                assert name.split(".")[0] not in forbidden, f"{path}:{line}: the scheduler gets time as an argument"


def test_gateway_has_no_sockets():
    for path in FILES:
        if room(path) == "gateway":
            for line, name in imports(path):
                assert name.split(".")[0] not in {"socket", "zmq", "asyncio"}, f"{path}:{line}: the gateway translates"
