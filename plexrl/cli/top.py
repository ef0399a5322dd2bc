"""`plexrl top`: a pool as it works, redrawn again and again."""

import json
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from plexrl.cli.books import trusted
from plexrl.cli.inside import own_pool
from plexrl.cli.seen import pools
from plexrl.types import BadInput, PlexrlError

app = typer.Typer(add_completion=False)
_SAVED_S = 60.0  # reports are published each minute
_NEWEST = 6
_MINUTE_US = 60_000_000


@app.command()
def top(
    pool: str = typer.Option(
        "", "--pool", metavar="NAME", help="This pool; default: the job's own, else the only one."
    ),
    every: float = typer.Option(2.0, "--every", metavar="SECONDS", min=0.2, help="Between two frames."),
    once: bool = typer.Option(False, "--once", help="Print one frame and end."),
    registry: str = typer.Option(
        "", envvar="PLEXRL_REGISTRY", metavar="DIR", help="The site's registry of pools, or your own pools'."
    ),
    pool_uids: str = typer.Option(
        "", envvar="PLEXRL_POOL_UIDS", metavar="UID,..", help="Accounts whose registry files are believed."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print one frame as JSON; what may not be seen is null."),
) -> None:
    """GPUs and who has each one's turn, how often turns change, jobs and why they wait, what was saved so far.

    Inside a job its own pool and the user's own jobs; from outside root and the pool's account see all of it. Ctrl-C
    ends it.
    """
    screen = _Screen(pool, registry, pool_uids)
    if as_json:
        print(json.dumps(screen.look()))
    elif once:
        Console().print(frame(screen.look()))
    else:
        with suppress(KeyboardInterrupt), Live(screen=True, auto_refresh=False) as live:
            while True:
                live.update(frame(screen.look()), refresh=True)
                time.sleep(every)


class _Screen:
    """Looks at one pool again and again."""

    def __init__(self, pool: str, registry: str, pool_uids: str) -> None:
        self._pool, self._registry, self._uids = pool, registry, pool_uids
        self._saved: dict[str, Any] | None = None
        self._counted = float("-inf")

    def look(self) -> dict[str, Any]:
        """What there is now. Raises BadInput when there are several pools and none was named."""
        found = pools(self._registry, self._uids, self._pool)
        if len(found) != 1:
            names = ", ".join(each["pool"] for each in found) or "none"
            raise BadInput(f"top shows one pool, and there are: {names}", "Choose one with --pool")
        (pool,) = found
        seen: dict[str, Any] = {
            "pool": pool["pool"],
            "state": pool["state"],
            "now": time.time(),
            "gpus": pool["gpus"],
            "jobs": pool["jobs"],
            "open_calls": pool["open_calls"],
            "decisions": None,
            "turns_last_minute": None,
            "saved": None,
        }
        if own_pool() and self._pool in ("", own_pool()):
            return seen
        run = Path(trusted(self._registry, self._uids).declared(pool["pool"]).state_dir) / "run"
        if pool["gpus"] is not None:
            told = decisions(run / "decisions.jsonl")
            begun = [each for each in told if each["what"] == "began"]
            holders = {each["gang"]: each["job"] for each in begun}
            newest = max((each["now_us"] for each in told), default=0)
            since_us = max(int(time.time() * 1e6), newest) - _MINUTE_US
            seen |= {
                "gpus": [{**gpu, "job": holders.get(gpu["turn"], "")} for gpu in pool["gpus"]],
                "decisions": told[-_NEWEST:],
                "turns_last_minute": sum(each["now_us"] >= since_us for each in begun),
            }
        return seen | {"saved": self._save(pool["pool"])}

    def _save(self, pool: str) -> dict[str, Any] | None:
        """The report's sums, at most a minute old; None where there is no report to read."""
        if time.monotonic() - self._counted >= _SAVED_S:
            from plexrl.accounting.figures import figures
            from plexrl.cli.reported import of_pools

            self._counted = time.monotonic()
            try:
                (reported,) = of_pools([pool], self._registry, self._uids)
                self._saved = figures(reported.published)
            except PlexrlError:
                self._saved = None
        if self._saved is None:
            return None
        return {key: self._saved[key] for key in SAVED if key in self._saved}


SAVED = (
    "saved_gpu_seconds",
    "dedicated_gpu_seconds",
    "pool_gpu_seconds",
    "charged_gpu_seconds",
    "overhead_gpu_seconds",
)


def decisions(path: Path) -> list[dict[str, Any]]:
    """Beginnings and ends of turns, oldest first; empty where there is nothing to read."""
    try:
        return [json.loads(line) for line in path.read_bytes().splitlines()]
    except OSError:
        return []


def frame(seen: dict[str, Any]) -> RenderableType:
    """One picture of what `_Screen.look` found."""
    parts: list[RenderableType] = [_head(seen)]
    if seen["gpus"] is not None:
        table = Table("GPU", "turn", "job", "phase", box=None, expand=True)
        for gpu in seen["gpus"]:
            job = gpu.get("job") or ("yours" if gpu["yours"] else "")
            table.add_row(gpu["gpu"], Text(gpu["turn"] or "-"), job or "-", gpu["phase"] or "-")
        parts += [Text(), table]
    if seen["jobs"] is not None:
        table = Table("job", "user", "calls", "models", "why it waits", box=None, expand=True)
        for job in sorted(seen["jobs"], key=lambda job: -job["open_calls"]):
            models = Text("\n".join(job["models"]) or "-")
            table.add_row(job["job"], job["user"], str(job["open_calls"]), models, Text(job["explained"] or "-"))
        parts += [Text(), table if seen["jobs"] else Text("no logical jobs")]
    if seen["decisions"]:
        table = Table("newest turns", "gang", "", "why", box=None, expand=True)
        for each in reversed(seen["decisions"]):
            at = time.strftime("%H:%M:%S", time.localtime(each["now_us"] / 1e6))
            table.add_row(at, Text(each["gang"]), each["what"], Text(each["reason"]))
        parts += [Text(), table]
    return Group(*parts)


def _head(seen: dict[str, Any]) -> Text:
    words = [f"pool {seen['pool']}: {seen['state']}", time.strftime("%H:%M:%S", time.localtime(seen["now"]))]
    if seen["gpus"] is not None:
        busy = Counter(bool(gpu["turn"]) for gpu in seen["gpus"])
        words += [f"{busy[True]} of {busy.total()} GPUs in turns", f"{seen['open_calls']} open calls"]
    if seen["turns_last_minute"] is not None:
        words.append(f"{seen['turns_last_minute']} turns began in the last minute")
    if seen["saved"] and seen["saved"].get("saved_gpu_seconds") is not None:
        words.append(f"saved so far: {seen['saved']['saved_gpu_seconds'] / 3600:.2f} GPU h")
    return Text(", ".join(words), style="bold")
