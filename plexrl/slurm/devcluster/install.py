"""What a development cluster's daemons, jobs and users run: DIR/opt, owned by root, readable by all.

The clone and its virtual environment may lie where only root can go, so nothing in DIR/opt points back to them. Every
part has a digest of what it was made from and is made again only when that changed.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import distributions
from pathlib import Path

import plexrl
from plexrl.types import BadInput, Unavailable

_PARTS = ("plexrl", "sbatch_templates", "site_config", "slurm_plugin")
_FILES = ("setup.py", "pyproject.toml", "README.md", "LICENSE")
_BUILT = shutil.ignore_patterns("__pycache__", "*.so", "*.o", "*.egg-info")

_COMMAND = """\
#!/bin/sh
exec {python} -I -m {module} "$@"
"""


def install(opt: Path, models: Mapping[str, Path], installed: dict[str, str]) -> None:
    """Bring DIR/opt up to date. `installed` (part -> digest) is read and kept true.

    models: name -> folder, installed as opt/models/NAME. Raises BadInput and Unavailable, naming the mend.
    """
    for folder in (opt, opt / "bin", opt / "lib", opt / "models"):
        folder.mkdir(mode=0o755, exist_ok=True)
    tree = Path(plexrl.__file__).resolve().parents[1]
    packaged = not (tree / "pyproject.toml").exists()
    venv = opt / "venv"

    def part(name: str, digest: str, make: Callable[[], None]) -> None:
        if installed.get(name) != digest:
            installed.pop(name, None)
            make()
            installed[name] = digest

    before = installed.get("python")
    part("python", _dependencies_digest(packaged), lambda: _make_venv(venv, packaged))
    if installed["python"] != before:
        installed.pop("plexrl", None)
    if not packaged:
        part("plexrl", _tree_digest(tree, [*_PARTS, *_FILES]), lambda: _install_wheel(venv, tree))
    for name, module in (("plexrl", "plexrl.cli.main"), ("plexrl-attach-helper", "plexrl.attach.helper")):
        _write(opt / "bin" / name, _COMMAND.format(python=venv / "bin" / "python", module=module), 0o755)
    share = venv / "share" / "plexrl"
    part("plugin", _tree_digest(share, ["slurm_plugin"]), lambda: _make_plugin(opt / "lib", share / "slurm_plugin"))
    for name, source in models.items():
        _install_model(opt / "models", name, source.resolve(), part)


def _dependencies_digest(packaged: bool) -> str:
    lines = [f"{d.name} {d.version}" for d in distributions() if packaged or d.name != "plexrl"]
    return _digest([sys.version, *sorted(lines)])


def _tree_digest(tree: Path, names: Iterable[str]) -> str:
    lines = []
    for name in names:
        for path in sorted([tree / name] if (tree / name).is_file() else (tree / name).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts and path.suffix not in {".so", ".o", ".pyc"}:
                content = hashlib.sha256(path.read_bytes()).hexdigest()
                lines.append(f"{path.relative_to(tree)} {content}")
    return _digest(lines)


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _interpreter() -> Path:
    """A Python that every user can run and that takes this environment's compiled modules."""
    ours = "{}.{}".format(*sys.version_info[:2])
    debian = Path("/usr/bin/python3")
    if debian.exists():
        ask = [str(debian), "-I", "-c", "import sys; print('{}.{}'.format(*sys.version_info[:2]))"]
        if subprocess.run(ask, capture_output=True, text=True, timeout=30).stdout.strip() == ours:
            return debian
    running = Path(os.path.realpath(sys.executable))
    if all(folder.stat().st_mode & 0o001 for folder in [running, *running.parents]):
        return running
    raise BadInput(
        f"No Python {ours} that all users can run: /usr/bin/python3 is another one and {running} lies where they "
        "cannot go",
        "Make the virtual environment again with /usr/bin/python3 (make PYTHON=/usr/bin/python3 setup)",
    )


def _make_venv(venv: Path, packaged: bool) -> None:
    """A virtual environment holding this one's packages: hard links where the file system allows, else copies."""
    shutil.rmtree(venv, ignore_errors=True)
    _run([str(_interpreter()), "-I", "-m", "venv", "--without-pip", str(venv)], "python3 -m venv")
    target = next(venv.glob("lib/python3.*/site-packages"))
    source = Path(sysconfig.get_path("purelib"))
    one_file_system = source.stat().st_dev == venv.stat().st_dev
    copy = ["cp", "-a", "--no-preserve=ownership", *(["--link"] if one_file_system else ["--reflink=auto"])]
    _run([*copy, f"{source}/.", str(target)], "copying the installed packages")
    if packaged:
        shutil.copytree(Path(sys.prefix, "share", "plexrl"), venv / "share" / "plexrl")
    else:
        for path in target.glob("*plexrl*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    _run(["chmod", "-R", "go+rX", str(target)], "chmod")


def _install_wheel(venv: Path, tree: Path) -> None:
    """Build the wheel from a copy of the tree, so that builds of several clusters do not meet, and install it."""
    with tempfile.TemporaryDirectory(prefix="plexrl-wheel-") as temp:
        copy = Path(temp, "tree")
        copy.mkdir()
        for name in _PARTS:
            if (tree / name).exists():
                shutil.copytree(tree / name, copy / name, ignore=_BUILT)
        for name in _FILES:
            shutil.copy2(tree / name, copy / name)
        pip = [sys.executable, "-I", "-m", "pip", "--disable-pip-version-check"]
        _run([*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", temp, str(copy)], "building the wheel")
        wheel = str(next(Path(temp).glob("*.whl")))
        install = [*pip, "--python", str(venv / "bin" / "python"), "install", "-q", "--no-deps", "--no-index"]
        shutil.rmtree(venv / "share" / "plexrl", ignore_errors=True)
        _run([*install, "--force-reinstall", wheel], "installing the wheel")
    _run(["chmod", "-R", "go+rX", str(venv)], "chmod")


def _make_plugin(lib: Path, source: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="plexrl-plugin-") as temp:
        copy = Path(temp, "slurm_plugin")
        shutil.copytree(source, copy, ignore=_BUILT)
        _run(["make", "-s", "-C", str(copy)], "building the SPANK plugin")
        for name in ("spank_plexrl.so", "plexrl.lua"):
            # Replaced, never rewritten: slurmstepd may have the old file mapped.
            shutil.copy(copy / name, lib / f".{name}.new")
            (lib / f".{name}.new").chmod(0o644)
            os.replace(lib / f".{name}.new", lib / name)


def _install_model(models: Path, name: str, source: Path, part: Callable[[str, str, Callable[[], None]], None]) -> None:
    if not (source / "config.json").is_file():
        raise BadInput(
            f"{source} is not a model folder: there is no config.json in it", "plexrl model --help makes one"
        )
    files = sorted(path for path in source.rglob("*") if path.is_file())
    stats = [f"{path.relative_to(source)} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in files]

    def make() -> None:
        target = models / name
        shutil.rmtree(target, ignore_errors=True)
        one_file_system = source.stat().st_dev == models.stat().st_dev
        copy = ["cp", "-rL", "--preserve=mode,timestamps", "--link" if one_file_system else "--reflink=auto"]
        _run([*copy, str(source), str(target)], f"copying the model {name}")
        _run(["chmod", "-R", "go+rX,go-w", str(target)], "chmod")

    part(f"model {name}", _digest(stats), make)


def _write(path: Path, text: str, mode: int) -> None:
    temp = path.with_name(f".{path.name}.new")
    temp.write_text(text)
    temp.chmod(mode)
    os.replace(temp, path)


def _run(command: list[str], what: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd="/")
    if done.returncode:
        words = "\n".join((done.stderr or done.stdout).strip().splitlines()[-8:])
        raise Unavailable(f"{what} failed:\n{words}", f"The command was: {' '.join(command)}")
