"""`plexrl shares`: who has which part of a pool, who used how much of it, and what a change would mean."""

import json
import os
import time
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from plexrl.cli.books import trusted
from plexrl.types import BadInput, PlexrlError
from plexrl.wire.registry import Declared, Registry

app = typer.Typer(add_completion=False)
_HOUR_US = 3_600_000_000
_OLD_S = 60


@app.command()
def shares(
    pool: str = typer.Option("", "--pool", metavar="NAME", help="This pool; default: all."),
    config: Path | None = typer.Option(
        None, "--config", metavar="FILE", help="Tell also what parts and factors would be under this plexrl.yaml."
    ),
    registry: str = typer.Option(
        "", envvar="PLEXRL_REGISTRY", metavar="DIR", help="The site's registry of pools, or your own pools'."
    ),
    pool_uids: str = typer.Option(
        "", envvar="PLEXRL_POOL_UIDS", metavar="UID,..", help="Accounts whose registry files are believed."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Accounts and users of a pool: shares, decayed usage, fair-share factor (also after one more GPU hour), budgets.

    The factor is between 1 (nothing used) and 1/8; hrrs multiplies a job's rank with it, fair goes by used against
    part. Root and the pool's account see it, while the pool runs.
    """
    if not registry:
        raise BadInput("no registry was named", "Set PLEXRL_REGISTRY")
    books = trusted(registry, pool_uids)
    found = [_told(books, books.declared(name)) for name in ([pool] if pool else books.names())]
    found = [each for each in found if each is not None]
    if not found:
        raise BadInput(
            "no pool runs into which this account may look", "Root and a pool's own account may, while it is up"
        )
    if config is not None:
        for each in found:
            _under(each, config)
    if as_json:
        print(json.dumps(found))
        return
    for each in found:
        _show(each, config)


def read_policies(declared: Declared) -> dict[str, Any] | None:
    """What a running head says of its policies; None when there is nothing, or nothing for this account."""
    path = Path(declared.state_dir) / "run" / "policies.json"
    if os.getuid() not in (0, declared.owner_uid):
        return None
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise PlexrlError(f"{path} cannot be read ({error.strerror})") from error


def _told(books: Registry, declared: Declared) -> dict[str, Any] | None:
    told = read_policies(declared)
    return None if told is None or books.live(declared.name) is None else {"pool": declared.name, **told}


def _under(pool: dict[str, Any], file: Path) -> None:
    """Add what another file would make of the same use: `new_part`, `new_factor`. Raises BadInput."""
    from plexrl.config import load
    from plexrl.scheduler.fairshare import Shares

    config = load(file)
    if config.shares_from == "slurm":
        raise BadInput(f"{file} takes its shares from Slurm", "sacctmgr changes those; plexrl shares shows what is")
    now_us, tree = pool["now_us"], Shares(config.scheduler.half_life_us)
    for account, part in config.shares.items():
        tree.set(account, part.shares, part.users)
    for user in pool["users"]:
        tree.charge(now_us, user["account"], user["user"], round(user["usage_us"]))
    new = {(each.account, each.user): each for each in tree.tree(now_us)}
    for user in pool["users"]:
        each = new[user["account"], user["user"]]
        user |= {"new_part": each.part, "new_factor": each.factor}


def _show(pool: dict[str, Any], config: Path | None) -> None:
    console = Console()
    days = pool["half_life_us"] / 24 / _HOUR_US
    console.print(
        f"pool {pool['pool']}: order {pool['order']}, shares from {pool['shares_from']}, half-life {days:g} days"
    )
    if pool["refused"]:
        console.print(f"  its plexrl.yaml was changed and not taken up: {pool['refused']}", style="red", markup=False)
    age_s = time.time() - pool["now_us"] / 1e6
    if age_s > _OLD_S:
        console.print(f"  the head said so {age_s:.0f} s ago, and nothing since", style="red")
    names = ["account", "user", "shares", "part", "usage, GPU h", "used", "factor", "after 1 more"]
    names += ["new part", "new factor"] if config else []
    table = Table(*names, box=None)
    for account in dict.fromkeys(user["account"] for user in pool["users"]):
        mine = [user for user in pool["users"] if user["account"] == account]
        sums = {key: sum(user[key] for user in mine) for key in ("part", "usage_us", "used")}
        new = [_share(sum(user["new_part"] for user in mine)), ""] if config else []
        cells = f"{mine[0]['account_shares']:g}", *_use(sums), "", "", *new
        table.add_row(account or "(none)", "", *cells, style="bold")
        for user in mine:
            new = [_share(user["new_part"]), f"{user['new_factor']:.3f}"] if config else []
            factors = f"{user['factor']:.3f}", f"{user['next_factor']:.3f}"
            table.add_row("", user["user"], f"{user['shares']:g}", *_use(user), *factors, *new)
    console.print(table if pool["users"] else "  nobody has used it yet")
    if pool["budgets"]:
        table = Table("budget of", "GPU h", "of this pool", "in Slurm", "left", "by", box=None)
        for line in pool["budgets"]:
            hours = [f"{line[key] / 3600:.2f}" for key in ("limit_s", "pool_s", "slurm_s", "left_s")]
            whose = " of ".join(filter(None, (line["user"], line["account"])))
            table.add_row(whose, *hours, line["source"], style="red" if line["left_s"] <= 0 else "")
        console.print(table)


def _use(row: dict[str, Any]) -> list[str]:
    return [_share(row["part"]), f"{row['usage_us'] / _HOUR_US:.3f}", _share(row["used"])]


def _share(value: float) -> str:
    return f"{100 * value:.1f}%"
