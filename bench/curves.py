"""`python -m bench.curves [--out docs/img] [--json]`: draws the three pictures of docs/scheduler.md, prints rows.

score: HRRS over the waiting time, the formula alone. sharing: what a node's GPUs and its jobs get as more equal jobs
share it. quantum: what longer turns of trainers save. All is formula or simulation, so the figures are the same on
every machine.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from statistics import fmean

from msgspec import structs

from bench.ablation import FULL, jobs, quick, retrained, rolled, workload
from plexrl.scheduler.costs import hrrs
from plexrl.scheduler.fairshare import LEAST
from plexrl.sim.charts import Series, curves
from plexrl.sim.generate import step_us
from plexrl.sim.metrics import duty_cycle, stretches, switches_per_hour, use
from plexrl.sim.run import run
from plexrl.types import PlexrlError

Row = dict[str, float]

NAMESPACE = "http://www.w3.org/2000/svg"  # what makes a file of its own an SVG; nothing is fetched from there
SECOND = 1_000_000
SERVICE_US, SWITCH_US = 10 * SECOND, 5 * SECOND
QUANTA = (5, 10, 20, 60, 120)
_HEIGHT = 310  # of one chart, as charts draws it
_STYLE = (
    'svg{background:var(--ground);font-family:system-ui,"DejaVu Sans",sans-serif}text{fill:var(--text);font-size:13px}'
    ".small{font-size:11.5px;fill:var(--dim)}.tick{stroke:var(--line)}.curve{fill:none;stroke-width:2}"
)


def score_rows(until: int = 120, every: int = 10) -> list[Row]:
    """The score of three gangs with the same service, by seconds of waiting.

    overtakes_s: when the gang that needs a switch has as high a score as the resident one has after wait_s.
    """
    rows = []
    for wait in range(0, until + 1, every):
        resident = hrrs(wait * SECOND, SERVICE_US, 0, 1.0)
        rows.append(
            {
                "wait_s": wait,
                "resident": resident,
                "switch": hrrs(wait * SECOND, SERVICE_US, SWITCH_US, 1.0),
                "heavy_user": hrrs(wait * SECOND, SERVICE_US, 0, LEAST),
                "overtakes_s": (resident - 1) * (SERVICE_US + SWITCH_US) / SECOND,
            }
        )
    return rows


def sharing_rows(most: int = 5, steps: int = 8) -> list[Row]:
    """Duty cycle and mean stretch of 1 to `most` equal 7B jobs on one node, engines up.

    checked: with answers whose check, off the GPUs, takes as long as a whole step would without it.
    """
    rows = []
    for count in range(1, most + 1):
        plain = quick(jobs(count, "7B", train_share=0.2, steps=steps))
        checked = [structs.replace(plan, reward_us=round(step_us(plan))) for plan in plain]
        row: Row = {"jobs": count}
        for name, plans in (("", plain), ("checked_", checked)):
            result = run(workload(plans), FULL)
            row |= {f"{name}duty": duty_cycle(result), f"{name}stretch": fmean(stretches(result))}
        rows.append(row)
    return rows


def quantum_rows(quanta: Sequence[int] = QUANTA, steps: int = 12) -> list[Row]:
    """Switches per hour and busy share of two training loops on one node that holds not all of their states at once."""
    loops = rolled(jobs(2, "7B", train_share=0.8, steps=steps), prompts=32)
    given = workload(quick(retrained(loops, calls=48)), bytes_=60)
    rows = []
    for quantum in quanta:
        result = run(given, structs.replace(FULL, quantum_us=quantum * SECOND))
        rows.append({"quantum_s": quantum, "switches_per_hour": switches_per_hour(result), "busy": use(result)})
    return rows


def score(rows: Sequence[Row]) -> str:
    """The picture of score_rows."""
    named = {"resident": "resident", "switch": "needs a switch of 5 s", "heavy_user": "resident, F = 1/8"}
    series = _series(rows, "wait_s", named)
    return standalone([curves(series, "HRRS score over waiting time, service 10 s", "waited, seconds", "score")])


def sharing(rows: Sequence[Row]) -> str:
    """The picture of sharing_rows."""
    duty = _series(rows, "jobs", {"duty": "little checking", "checked_duty": "long checks"})
    stretch = _series(rows, "jobs", {"stretch": "little checking", "checked_stretch": "long checks"})
    return standalone(
        [
            curves(duty, "Duty cycle over the number of equal jobs", "jobs on the node", "duty cycle", 1.0),
            curves(stretch, "Mean stretch over the number of equal jobs", "jobs on the node", "mean stretch"),
        ]
    )


def quantum(rows: Sequence[Row]) -> str:
    """The picture of quantum_rows."""
    switches = _series(rows, "quantum_s", {"switches_per_hour": "switches per hour"})
    busy = _series(rows, "quantum_s", {"busy": "busy share"})
    return standalone(
        [
            curves(switches, "Switches per hour over the quantum", "quantum, seconds", "switches per hour"),
            curves(busy, "Busy share over the quantum", "quantum, seconds", "busy share", 1.0),
        ]
    )


PICTURES: dict[str, tuple[Callable[[], list[Row]], Callable[[Sequence[Row]], str]]] = {
    "score": (score_rows, score),
    "sharing": (sharing_rows, sharing),
    "quantum": (quantum_rows, quantum),
}


def standalone(charts: Sequence[str]) -> str:
    """Charts below one another as an SVG file of its own, in the light colours of the simulator's page."""
    page = (files("plexrl.sim") / "page.css").read_text(encoding="utf-8").partition("@media")[0]
    colours = dict(re.findall(r"--(\w+):(#\w+)", page))
    strokes = "".join(f".s{name[1:]}{{stroke:var(--{name})}}" for name in colours if re.fullmatch(r"c\d", name))
    values = "".join(f"--{name}:{value};" for name, value in colours.items())
    parts = (
        chart.replace("<svg ", f'<svg y="{number * _HEIGHT}" height="{_HEIGHT}" ', 1)
        for number, chart in enumerate(charts)
    )
    body = "".join(parts).replace("><", ">\n<")
    head = f'<svg xmlns="{NAMESPACE}" viewBox="0 0 1100 {len(charts) * _HEIGHT}">'
    return f"{head}\n<style>:root{{{values}}}{_STYLE}{strokes}</style>\n{body}\n</svg>\n"


def _series(rows: Sequence[Row], x: str, named: dict[str, str]) -> list[Series]:
    """One curve for each column named, over the column x."""
    return [
        Series(words, [(row[x], row[column]) for row in rows], number)
        for number, (column, words) in enumerate(named.items())
    ]


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m bench.curves", description=__doc__)
    parser.add_argument("--out", type=Path, help="folder for the pictures; default docs/img, or none with --json")
    parser.add_argument("--json", action="store_true", help="print the rows as one JSON object")
    asked = parser.parse_args()
    out = asked.out or (None if asked.json else Path("docs/img"))
    try:
        rows = {name: make() for name, (make, _) in PICTURES.items()}
        if out:
            out.mkdir(parents=True, exist_ok=True)
            for name, (_, draw) in PICTURES.items():
                (out / f"{name}.svg").write_text(draw(rows[name]), encoding="utf-8")
    except PlexrlError as error:
        print(f"bench.curves: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"bench.curves: {out}: {error.strerror}", file=sys.stderr)
        return 1
    if asked.json:
        print(json.dumps(rows))
        return 0
    for name, points in rows.items():
        print(f"{out / f'{name}.svg'}")
        for row in points:
            print("  " + "  ".join(f"{column} {value:.4g}" for column, value in row.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
