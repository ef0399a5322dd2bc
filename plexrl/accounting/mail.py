"""A month of a pool as a message that can be mailed as it is: plain text, 72 columns, subject first."""

from collections.abc import Sequence
from textwrap import wrap

from plexrl.accounting.words import Unit, clock, percent, saved_words, sure_words

_WIDTH = 72


def message(found: dict, accounts: Sequence[dict], period: str, seen: str) -> str:
    """found: figures() of the period. accounts: rows by account and user. period: 2026-12, or empty for all of it.

    seen: whose jobs it shows.
    """
    unit = Unit(max(found["pool_gpu_seconds"], found["dedicated_gpu_seconds"]))
    # Minus signs stay ASCII: mail that is not declared as UTF-8 is read as something else.
    return "\n".join(_lines(found, accounts, period, seen, unit)).replace("\u2212", "-") + "\n"


def _lines(found: dict, accounts: Sequence[dict], period: str, seen: str, unit: Unit) -> list[str]:
    when = period or f"{clock(found['from'])[:10]} to {clock(found['until'])[:10]}"
    gpus = f"{found['gpus']} GPU" + ("" if found["gpus"] == 1 else "s")
    lines = [f"Subject: Pool {found['pool']}, {when}: {unit(found['charged_gpu_seconds'])} {unit.name} charged", ""]
    lines += [f"Pool {found['pool']}, {gpus}, {clock(found['from'])} to {clock(found['until'])}", ""]
    sums = [
        ("charged to jobs", "charged_gpu_seconds"),
        ("overhead of the pool's owner", "overhead_gpu_seconds"),
        ("unattributed", "unattributed_gpu_seconds"),
        ("the pool held", "pool_gpu_seconds"),
        ("the same by Slurm's accounting", "sacct_gpu_seconds"),
        ("dedicated runs would have held", "dedicated_gpu_seconds"),
        ("saved (dedicated - held)", "saved_gpu_seconds"),
    ]
    for name, key in sums:
        if found[key] is not None:
            lines.append(f"  {name:<34}{unit(found[key]):>14} {unit.name}")
    lines += ["", *wrap(f"Saved: {saved_words(found)}.", _WIDTH)]
    lines += wrap(sure_words(found, unit), _WIDTH)
    busy, switch, kept, idle = (percent(found["shares"][name], 1) for name in ("busy", "switch", "kept", "idle"))
    lines += wrap(f"GPUs: busy {busy}, switching {switch}, kept for a job {kept}, idle {idle}.", _WIDTH)
    if accounts:
        lines += ["", f"  {'account':<14}{'user':<14}{'jobs':>5}{'charged':>12}{'dedicated':>12}{'saved':>12}"]
        for row in accounts:
            cells = "".join(f"{unit(row[name]):>12}" for name in ("charged", "dedicated", "saved"))
            lines.append(f"  {row['account'][:13]:<14}{row['user'][:13]:<14}{row['jobs']:>5}{cells}")
        lines += ["", *wrap(f"In {unit.name}. A job's saving is without the pool owner's overhead.", _WIDTH)]
    for note in found["notes"]:
        lines += wrap(f"Note: {note}", _WIDTH)
    lines += wrap(seen, _WIDTH)
    return lines
