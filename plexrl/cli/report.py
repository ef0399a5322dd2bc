"""`plexrl report`: what a pool's GPUs went to, and what sharing them saved."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import typer

from plexrl.accounting.explain import chain, explained, find
from plexrl.accounting.figures import chosen, figures
from plexrl.accounting.groups import as_csv, parsed, rows
from plexrl.accounting.mail import message
from plexrl.accounting.window import Window, window
from plexrl.accounting.words import seen_words
from plexrl.cli.reported import Reported, from_file, of_pools
from plexrl.types import BadInput

app = typer.Typer(add_completion=False)


@app.command()
def report(
    pool: list[str] = typer.Option(
        [], envvar="SLURM_PLEXRL_POOL", metavar="NAME", help="The pool, or several, or `all`; default: the only one."
    ),
    user: str | None = typer.Option(None, metavar="USER", help="Show this user's jobs only; a name or a uid."),
    account: str | None = typer.Option(None, metavar="NAME", help="Show this account's jobs only."),
    since: str | None = typer.Option(
        None, metavar="TIME", help="Count from here: 2026-11-01, 2026-11-01T08:30, or 90m, 24h, 7d, 2w ago."
    ),
    until: str | None = typer.Option(None, metavar="TIME", help="Count up to here."),
    month: str | None = typer.Option(None, metavar="YYYY-MM", help="Count this month."),
    group_by: str | None = typer.Option(
        None, metavar="KEY,..", help="Add up by user, account, qos, partition, pool, model, month, job."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON, in GPU-seconds."),
    as_csv_: bool = typer.Option(False, "--csv", help="Print the jobs, or the groups, as CSV, in GPU-seconds."),
    html: Path | None = typer.Option(
        None, "--html", metavar="FILE", help="Write a page with the timeline of the GPUs and other drawings."
    ),
    mail: bool = typer.Option(False, "--mail", help="Print a plain-text message, ready to mail."),
    explain: str | None = typer.Option(
        None, metavar="JOB", help="Print the arithmetic of one job: its charge and its dedicated run, line by line."
    ),
    file: Path | None = typer.Option(
        None, "--from", metavar="FILE", help="Report on what plexrl ledger export wrote, without a pool."
    ),
    registry: str = typer.Option(
        "", envvar="PLEXRL_REGISTRY", metavar="DIR", help="The site's registry of pools, or your own pools'."
    ),
    pool_uids: str = typer.Option(
        "", envvar="PLEXRL_POOL_UIDS", metavar="UID,..", help="Accounts whose registry files are believed."
    ),
) -> None:
    """GPU time charged to jobs, what dedicated runs would have held, and the difference.

    Works while the pool runs and after it has ended. As in Slurm, you see your own jobs and those of accounts that you
    coordinate, beside the sums of the whole pool; operators, root and the pool's account see all jobs.
    """
    if sum((as_json, as_csv_, mail, explain is not None and not as_json)) > 1:
        raise BadInput("--json, --csv, --mail and --explain are one form each", "Give one of them")
    if explain is not None and (as_csv_ or mail or group_by or html):
        raise BadInput("--explain tells of one job", "Leave the other forms out")
    keys = parsed(group_by) if group_by else ()
    asked = window(since, until, month)
    found = [from_file(file)] if file is not None else of_pools(pool, registry, pool_uids)
    if len(found) > 1 and not keys:
        if html is not None or mail or explain is not None:
            raise BadInput("that is of one pool", f"Choose one with --pool: {', '.join(_names(found))}")
        keys = ("pool",)
    if explain is not None:
        _explain(found[0], explain, as_json)
    elif keys:
        _grouped(found, asked, keys, user, account, as_json, as_csv_, html)
    else:
        _whole(found[0], asked, user, account, as_json, as_csv_, html, mail)


def _names(found: Sequence[Reported]) -> list[str]:
    return [each.published.pool for each in found]


def _whole(
    of: Reported,
    asked: Window,
    user: str | None,
    account: str | None,
    as_json: bool,
    csv: bool,
    html: Path | None,
    mail: bool,
) -> None:
    """One pool, its jobs one by one."""
    published = of.published
    found = figures(published, asked, user, of.sacct(), account)
    if html is not None:
        _page(html, found, of, asked, user, account)
    if as_json:
        print(json.dumps(found, indent=2))
    elif csv:
        sys.stdout.write(as_csv(found["jobs"]))
    elif mail:
        jobs = chosen(published, asked, user, account)
        lines = rows([(published, jobs)], asked, ("account", "user"))
        sys.stdout.write(message(found, lines, asked.name, seen_words(published.uid, published.accounts)))
    else:
        from plexrl.accounting.table import show

        show(found, seen_words(published.uid, published.accounts))
        if html is not None:
            print(f"\n{html}: the same with drawings")


def _grouped(
    found: Sequence[Reported],
    asked: Window,
    keys: Sequence[str],
    user: str | None,
    account: str | None,
    as_json: bool,
    csv: bool,
    html: Path | None,
) -> None:
    """Sums of one pool or several."""
    pools = [(each.published, chosen(each.published, asked, user, account)) for each in found]
    lines = rows(pools, asked, keys)
    if html is not None:
        if len(found) > 1:
            raise BadInput("a page is of one pool", f"Choose one with --pool: {', '.join(_names(found))}")
        _page(html, figures(found[0].published, asked, user, found[0].sacct(), account), found[0], asked, user, account)
    if as_json:
        print(json.dumps({"pools": _names(found), "group_by": list(keys), "rows": lines}, indent=2))
    elif csv:
        sys.stdout.write(as_csv(lines))
    else:
        from plexrl.accounting.sums import show

        show(lines, keys, any(each.published.uid is not None for each in found))


def _page(html: Path, found: dict, of: Reported, asked: Window, user: str | None, account: str | None) -> None:
    from plexrl.accounting.page import page

    jobs = chosen(of.published, asked, user, account)
    text = page(found, of.published, rows([(of.published, jobs)], asked, ("account",)))
    try:
        html.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BadInput(f"{html} cannot be written ({error.strerror})", "Name a file in a folder of yours") from error


def _explain(of: Reported, name: str, as_json: bool) -> None:
    job = find(of.published, name)
    legs = chain(*of.made_of, of.published, job) if of.made_of else ()
    if as_json:
        import msgspec

        print(json.dumps({"job": msgspec.to_builtins(job), "chain": msgspec.to_builtins(legs)}, indent=2))
    else:
        print("\n".join(explained(of.published, job, legs)))
