"""`plexrl simulate`: a workload on a cluster that is not there, under the live scheduler and a virtual clock."""

import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
import yaml

from plexrl.types import BadInput

app = typer.Typer(add_completion=False)

# name -> module of plexrl.sim.presets; each has preset(progress, seeds, trace) -> Found
PRESETS = {"paper": "paper", "policies": "policies", "philly": "philly"}
_EVERY_S = 20.0


@app.command()
def simulate(
    workload: str = typer.Option(
        "",
        metavar="W",
        help="A family (mixed, equal, pair), with parameters as in mixed:nodes=8,jobs=12; or a file: a workload, or a "
        "trace that a pool recorded.",
    ),
    policy: str = typer.Option(
        "plexrl",
        metavar="P",
        help="isolated, pack, spread, spread_backfill, plexrl (our best setting); colocated, split_async, rollmux or "
        "llmd, as others do it; or all.",
    ),
    seed: int | None = typer.Option(None, metavar="N", help="Of all draws; equal seeds give equal runs."),
    config: Path | None = typer.Option(
        None, metavar="plexrl.yaml", help="Take the policy `plexrl` from this file, and the shares of accounts."
    ),
    preset: str = typer.Option(
        "", metavar="NAME", help="An experiment with everything fixed: paper, policies or philly."
    ),
    seeds: int | None = typer.Option(
        None, metavar="N", min=1, help="Seeds that a preset is run with; default: its own number."
    ),
    trace: Path | None = typer.Option(None, metavar="PATH", help="The Philly trace, for --preset philly."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
    html: Path | None = typer.Option(None, metavar="FILE", help="Write a page that plays the run back, turn by turn."),
) -> None:
    """Run jobs on a simulated cluster, under the scheduler of the live pool.

    Times are of the virtual clock; nothing of the scheduler is simplified. Progress goes to stderr.
    """
    if bool(workload) == bool(preset):
        raise BadInput("neither or both of --workload and --preset", "Give one: --workload pair, or --preset paper")
    if html is not None:
        _opened(html)
    if preset:
        _unused({"--seed": seed, "--config": config, "--policy": None if policy == "plexrl" else policy}, "--preset")
        if preset not in PRESETS:
            raise BadInput(f"no preset is called {preset!r}", f"Use one of {', '.join(PRESETS)}")
        if trace is not None and preset != "philly":
            raise BadInput(f"--trace has no meaning for the preset {preset}", "Leave it out")
        module = importlib.import_module(f"plexrl.sim.presets.{PRESETS[preset]}")
        with _progress(preset) as progress:
            found = module.preset(progress, seeds, trace)
    else:
        _unused({"--seeds": seeds, "--trace": trace}, "--workload")
        from plexrl.sim.compare import compare

        given = _workload(workload, seed)
        policies, baselines, shares = _policies(policy, config)
        with _progress(given.name) as progress:
            found = compare(given, policies, baselines, progress, keep_timeline=html is not None, shares=shares)
    _tell(found, as_json, html)


def _unused(options: dict[str, object], beside: str) -> None:
    """Raises BadInput for an option that would be ignored."""
    for name, value in options.items():
        if value is not None:
            raise BadInput(f"{name} has no meaning beside {beside}", "Leave one of them out")


def _workload(text: str, seed: int | None) -> Any:
    """A family with its parameters, or a file."""
    from plexrl.sim.files import read
    from plexrl.sim.generate import FAMILIES, generate

    family, _, given = text.partition(":")
    if family in FAMILIES:
        return generate(family, seed or 0, **_parameters(given))
    if not Path(text).exists():
        families = ", ".join(FAMILIES)
        raise BadInput(f"{text!r} is neither a family of workloads nor a file", f"Families: {families}")
    return read(Path(text), seed)


def _parameters(text: str) -> dict[str, Any]:
    """nodes=8,lag=1 as values; a comma inside brackets does not part."""
    found: dict[str, Any] = {}
    for part in _parts(text):
        name, equals, value = part.partition("=")
        if not equals or not name:
            raise BadInput(f"--workload: {part!r} is no parameter", "Write name=value")
        try:
            found[name.strip()] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise BadInput(f"--workload: {name}: {value!r} is no value", "Write a number, or [low, high]") from error
    return found


def _parts(text: str) -> Iterator[str]:
    part, depth = "", 0
    for letter in text:
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and not depth:
            yield part
            part = ""
        else:
            part += letter
    if part:
        yield part


def _policies(name: str, config: Path | None) -> tuple[dict[str, Any], list[str], dict[str, Any]]:
    """The policies that are asked for, what others do, and the shares of accounts. Raises BadInput."""
    from plexrl.scheduler import Policy
    from plexrl.sim.baselines import BASELINES
    from plexrl.sim.named import POLICIES

    policies = dict(POLICIES)
    baselines = [other for other in BASELINES if other not in policies]
    shares: dict[str, Any] = {}
    if config is not None:
        from plexrl.config import load

        if name not in ("plexrl", "all"):
            raise BadInput(f"--config gives the policy plexrl, not {name}", "Leave --policy out, or give all")
        told = load(config)
        if told.shares_from == "slurm":
            raise BadInput(f"{config}: shares_from: there is no Slurm in a simulation", "Write them as `shares`")
        policies["plexrl"] = Policy(**told.scheduler.model_dump())
        shares = {account: (part.shares, part.users) for account, part in told.shares.items()}
    if name == "all":
        return policies, baselines, shares
    if name in baselines:
        return {}, [name], shares
    if name not in policies:
        raise BadInput(f"no policy is called {name!r}", f"Use one of {', '.join([*policies, *baselines])}, or all")
    return {name: policies[name]}, [], shares


@contextmanager
def _progress(what: str) -> Iterator[Callable[[float, str], None]]:
    """Tells stderr how far the work is: a bar on a terminal, else a line now and then. Called with the share done."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines(what)
        return
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=1.0)
        yield lambda share, words: bar.update(task, completed=share, description=f"{what}: {words}")


class _Lines:
    """Progress in a log: the first line after a while, so that short runs say nothing."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._told = time.monotonic()

    def __call__(self, share: float, words: str) -> None:
        now = time.monotonic()
        if now - self._told >= _EVERY_S:
            self._told = now
            print(f"{self._what}: {share:.0%}, {words}", file=sys.stderr)


def _opened(html: Path) -> None:
    """Raises BadInput where the page could not be written, before hours were spent on it."""
    try:
        html.open("a").close()
    except OSError as error:
        what = f"{html} cannot be written ({error.strerror})"
        raise BadInput(what, "Name a file in a folder of yours") from error


def _tell(found: Any, as_json: bool, html: Path | None) -> None:
    if html is not None:
        from plexrl.sim.page import document, section, table

        head = section("Figures", table(found.columns, found.rows), " ".join(found.notes))
        text = document(found.title, found.words, [head, *found.sections], found.runs)
        html.write_text(text, encoding="utf-8")
    if as_json:
        print(json.dumps({"title": found.title, "rows": found.rows, **found.more, "notes": found.notes}, indent=2))
        return
    from plexrl.sim.table import show

    show(found.title, found.columns, found.rows, found.notes)
    if html is not None:
        print(f"\n{html}: the same with curves and a player")
