"""Order of the tests, what happens without Slurm or a GPU, and the models that tests load."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings

# A machine may be busy: no test is judged by its time. The same examples in every run; `make soak` draws others.
settings.register_profile("plexrl", deadline=None, derandomize="PLEXRL_SEEDS" not in os.environ)
settings.load_profile("plexrl")

ROOT = Path(__file__).parent.parent
QUICK_FIRST = ("unit", "property", "wire", "gateway", "engines", "pool", "attach", "slurm", "security", "e2e", "gpu")


def pytest_configure(config: pytest.Config) -> None:
    """A terminated run is an interrupted one: pools and clusters of its fixtures end with it."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=_rank)
    for what, why in (("slurm", _no_slurm), ("slurm2511", _no_slurm_2511), ("gpu", _no_gpu)):
        needing = [item for item in items if _folder(item) == what or item.get_closest_marker(what)]
        reason = why() if needing else ""
        if reason:
            config.hook.pytest_deselected(items=needing)
            said = f"{len(needing)} tests were left out: they need {what.upper()} on this machine. {reason}"
            config.stash.setdefault(MISSING, {})[what] = said
            items[:] = [item for item in items if item not in set(needing)]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for what, said in config.stash.get(MISSING, {}).items():
        terminalreporter.section(f"{what.upper()} IS MISSING", red=True, bold=True)
        terminalreporter.line(said)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    session.config.stash[OUTCOME] = int(exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Leave at once when all is told: transport threads of the SDK under test can abort an interpreter's exit."""
    if "tinker" in sys.modules and OUTCOME in config.stash:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(config.stash[OUTCOME])


MISSING = pytest.StashKey[dict[str, str]]()
OUTCOME = pytest.StashKey[int]()


def _folder(item: pytest.Item) -> str:
    return item.path.relative_to(ROOT / "tests").parts[0]


def _rank(item: pytest.Item) -> int:
    folder = _folder(item)
    return QUICK_FIRST.index(folder) if folder in QUICK_FIRST else QUICK_FIRST.index("slurm") - 1


def _no_slurm_2511() -> str:
    """Why pyslurm cannot be tried here and the mend; empty when it can."""
    prefix, python = os.environ.get("PLEXRL_SLURM2511"), os.environ.get("PLEXRL_PYSLURM_PYTHON")
    if not prefix or not python:
        return (
            "Set PLEXRL_SLURM2511 to the prefix of a Slurm 25.11 built from source, and PLEXRL_PYSLURM_PYTHON to an "
            "interpreter that has pyslurm 25.11 and plexrl."
        )
    return _no_slurm()


def _no_slurm() -> str:
    """Why no development cluster can be had here and the mend; empty when it can."""
    from plexrl.slurm.devcluster import packages

    if missing := packages.missing():
        return f"As root, run: apt-get install {' '.join(missing)}"
    if os.geteuid() != 0:
        return "The development cluster makes users of its own: run the tests as root."
    return ""


def _no_gpu() -> str:
    """Why nothing can run on a GPU here; empty when it can."""
    import torch

    if not torch.cuda.is_available():
        return "torch sees none here: run `pytest -m gpu` where it does."
    return ""


def _made(*arguments: str | Path) -> None:
    subprocess.run([sys.executable, "-m", "plexrl.cli.main", "model", *arguments], check=True, timeout=110)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct as a model folder; made once per clone."""
    folder = ROOT / ".cache" / "models" / "smollm2-135m"
    _made("smollm2", folder)
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers with one token per byte."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    _made("tiny", folder)
    return folder
