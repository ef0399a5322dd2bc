"""Preset `paper`: the paper's end-to-end experiment, with parameters that were fixed before its first run.

Split-async with one step of lag holds R + T GPUs per job. Layout `shared_training`: k jobs share T training GPUs and
keep their own R rollout GPUs, as the paper measured for k = 2. Layout `shared_all`: k jobs share one pool for both.
Beside split-async two harder baselines: `right_sized`, a split whose trainer has no more GPUs than its state and its
work need, and `colocated`, where rollout and training take turns on the T training GPUs. Builds are in all of them.
"""

from collections.abc import Sequence
from math import inf
from pathlib import Path

from msgspec import Struct, structs

from plexrl.scheduler import Policy
from plexrl.sim.baselines import baseline
from plexrl.sim.charts import Measure, bars, grid
from plexrl.sim.found import Found, Progress
from plexrl.sim.metrics import interval
from plexrl.sim.named import POLICIES
from plexrl.sim.page import section
from plexrl.sim.presets import paper_parameters as fixed
from plexrl.sim.presets.paper_jobs import (
    colocated,
    job,
    pool_of_all,
    resized,
    right_size,
    staggered,
    whole_gangs,
    workload,
)
from plexrl.sim.presets.paper_parameters import Setting
from plexrl.sim.presets.per_step import Ends, Layout, saving, stretch
from plexrl.sim.result import Result
from plexrl.sim.run import run
from plexrl.sim.table import Column
from plexrl.sim.workload import JobPlan
from plexrl.types import BadInput, JobClass

# Who shares is given here, not chosen: nobody waits for a better place. Training of one job is not broken off for
# another's rollout: a quantum is longer than any training here.
SHARED = structs.replace(POLICIES["plexrl"], sample_quantum_us=120_000_000, max_stretch=dict.fromkeys(JobClass, inf))
LAYOUTS = ("shared_training", "shared_all")
COLUMNS = (
    Column("model", "model", text=True),
    Column("layout", "layout", text=True),
    Column("k", "k"),
    Column("gpus", "GPUs"),
    Column("saving_vs_split_async", "saved vs split-async", "%"),
    Column("ci", "95 % interval", "%"),
    Column("ideal_bound", "bound", "%"),
    Column("whole_gangs", "whole gangs", "%"),
    Column("published", "published", "%"),
    Column("stretch", "stretch", ".3f"),
    Column("saving_vs_right_sized", "vs right-sized", "%"),
    Column("saving_vs_colocated", "vs colocated", "%"),
)
NOTES = [
    "Saved: GPU-hours per training step, the same steps with the same draws. Bound: if sharing stretched nobody.",
    "Whole gangs: what is left of the bound if nothing is lost but that trainers run whole and samplers stay in place: "
    "where the pool has too few GPUs for both apart, training holds up the rollouts on its GPUs (an estimate, ours).",
    "Parameters were committed before the first run (presets/paper_parameters.py); what is ours is marked there.",
]


class Baseline(Struct, frozen=True):
    """A setting's jobs without sharing: when they made their steps, and the GPUs of one of them."""

    ends: Ends
    gpus: int


class Alone:
    """The baselines of a setting for one seed. busy: GPUs that a job of split-async keeps busy, on average."""

    def __init__(self, setting: Setting, seed: int) -> None:
        self.plans = [job(setting, f"j{number}", seed) for number in range(max(fixed.JOBS))]
        count, small = len(self.plans), right_size(setting)
        split = apart(setting, "split_async", self.plans, seed)
        narrow = apart(setting, "right_sized", [resized(setting, plan, small) for plan in self.plans], seed)
        self.of = {
            "split_async": Baseline(Ends(split), setting.train_gpus + setting.sample_gpus),
            "right_sized": Baseline(Ends(narrow), small + setting.sample_gpus),
            "colocated": Baseline(Ends(*(one_pool(setting, plan, seed) for plan in self.plans)), setting.train_gpus),
        }
        self.busy = sum(one.busy_us / (one.end_us - one.placed_us) for one in split.jobs) / count
        self.step_us = sum(one.end_us - one.start_us for one in split.jobs) / (count * fixed.STEPS)


def apart(setting: Setting, name: str, plans: Sequence[JobPlan], seed: int) -> Result:
    """Jobs that each have GPUs of their own."""
    train = len(plans) * plans[0].train.gpus
    sample = len(plans) * plans[0].sample.replicas * plans[0].sample.gpus
    return baseline("split_async", workload(name, plans, seed, train=train, sample=sample), compare_alone=False)


def one_pool(setting: Setting, plan: JobPlan, seed: int) -> Result:
    """A job whose rollouts and training take turns on its T GPUs."""
    given = workload("colocated", [colocated(setting, plan)], seed, train=0, sample=0, both=setting.train_gpus)
    return baseline("colocated", given, compare_alone=False)


def layout(setting: Setting, name: str, k: int, busy: float) -> Layout:
    """The GPUs of k jobs. busy: as in Alone."""
    if name == "shared_training":
        return Layout(shared=setting.train_gpus, private=setting.sample_gpus)
    return Layout(shared=pool_of_all(setting, k, busy), private=0)


def together(
    setting: Setting, plans: Sequence[JobPlan], held: Layout, step_us: float, seed: int, policy: Policy = SHARED
) -> Result:
    """Jobs that share as the layout says."""
    jobs = staggered(plans, step_us)
    private = held.private * len(plans)
    sizes = {"train": held.shared, "sample": private} if private else {"train": 0, "sample": 0, "both": held.shared}
    return run(workload("paper", jobs, seed, **sizes), policy, compare_alone=False)


def rows(progress: Progress, seeds: Sequence[int]) -> list[dict]:
    """One row per model, layout and k; figures are means over the seeds, `ci` the 95 % interval of the first."""
    todo = len(fixed.SETTINGS) * len(seeds) * (1 + len(LAYOUTS) * len(fixed.JOBS))
    found, done = [], 0
    for setting in fixed.SETTINGS:
        seen: dict[tuple[str, int], list[dict[str, float]]] = {}
        for seed in seeds:
            progress(done / todo, f"{setting.model}, seed {seed}, without sharing")
            alone = Alone(setting, seed)
            done += 1
            for name in LAYOUTS:
                for k in fixed.JOBS:
                    progress(done / todo, f"{setting.model}, seed {seed}, {name}, {k} jobs")
                    seen.setdefault((name, k), []).append(_measure(setting, alone, name, k, seed))
                    done += 1
        found += [_row(setting, name, k, values) for (name, k), values in seen.items()]
    return found


def _measure(setting: Setting, alone: Alone, name: str, k: int, seed: int) -> dict[str, float]:
    held = layout(setting, name, k, alone.busy)
    ends = Ends(together(setting, alone.plans[:k], held, alone.step_us, seed))
    own = setting.train_gpus + setting.sample_gpus
    figures = {
        "gpus": held.held(k),
        "ideal_bound": 1.0 - held.held(k) / (k * own),
        "whole_gangs": 1.0 - whole_gangs(setting, held.shared, k, held.private) * held.held(k) / (k * own),
        "stretch": stretch(ends, alone.of["split_async"].ends),
    }
    for against, it in alone.of.items():
        figures[f"saving_vs_{against}"] = saving(ends, held, it.ends, it.gpus)
    return figures


def _row(setting: Setting, name: str, k: int, values: Sequence[dict[str, float]]) -> dict:
    mean = {key: sum(value[key] for value in values) / len(values) for key in values[0]}
    over_seeds = interval([value["saving_vs_split_async"] for value in values])
    measured = name == "shared_training" and k == 2
    return {
        "model": setting.model,
        "k": k,
        "layout": name,
        **mean,
        "gpus": round(mean["gpus"]),
        "ci": [over_seeds.mean - over_seeds.half, over_seeds.mean + over_seeds.half],
        "published": setting.published if measured else None,
        "seeds": len(values),
    }


def sensitivity(progress: Progress, setting: Setting = fixed.SETTINGS[0], seed: int = 1) -> list[dict]:
    """Saving of two jobs on one training pool, by training's share of a step and the variation of steps' lengths."""
    held = layout(setting, "shared_training", 2, 0.0)
    found = []
    for row, duty in enumerate(fixed.GRID_DUTY):
        progress(row / len(fixed.GRID_DUTY), f"sensitivity, training share {duty:.0%}")
        for variation in fixed.GRID_VARIATION:
            plans = [job(setting, f"j{number}", seed, duty=duty, variation=variation) for number in range(2)]
            alone = apart(setting, "split_async", plans, seed)
            step_us = sum(one.end_us - one.start_us for one in alone.jobs) / (2 * fixed.STEPS)
            ends = Ends(together(setting, plans, held, step_us, seed))
            value = saving(ends, held, Ends(alone), setting.train_gpus + setting.sample_gpus)
            found.append({"training_share": duty, "variation": variation, "saving_vs_split_async": value})
    return found


def preset(progress: Progress, seeds: int | None, trace: Path | None) -> Found:
    """As the command line asks for it. Raises BadInput for a trace, which it has no use for."""
    if trace is not None:
        raise BadInput("--trace has no meaning for the preset paper", "Leave it out")
    chosen = fixed.SEEDS if seeds is None else range(1, seeds + 1)
    found = rows(lambda share, words: progress(0.9 * share, words), chosen)
    swept = sensitivity(lambda share, words: progress(0.9 + 0.1 * share, words))
    return Found(
        title="PlexRL's three settings: GPU-hours per training step",
        words="Jobs of one model share a training pool, or all GPUs, instead of holding R + T GPUs each.",
        columns=COLUMNS,
        rows=found,
        notes=NOTES,
        more={"sensitivity": swept},
        sections=[_bars(found), _grid(swept)],
    )


def _bars(found: Sequence[dict]) -> str:
    measures = []
    for row in found:
        marks = [(row["ideal_bound"], "the bound")]
        words = f"{100 * row['saving_vs_split_async']:.1f} % of at most {100 * row['ideal_bound']:.1f} %"
        if row["published"] is not None:
            marks.append((row["published"], "published"))
            words += f"; published {100 * row['published']:.1f} %"
        name = f"{row['model']}, {row['layout'].replace('_', ' ')}, {row['k']} jobs"
        measures.append(Measure(name, row["saving_vs_split_async"], words, LAYOUTS.index(row["layout"]), tuple(marks)))
    words = "Ticks: the bound, and what the paper publishes for two jobs that share the training pool."
    return section("Saved against split-async", bars(measures, "Savings"), words)


def _grid(swept: Sequence[dict]) -> str:
    values = {(one["training_share"], one["variation"]): one["saving_vs_split_async"] for one in swept}
    cells = [[values[duty, variation] for variation in fixed.GRID_VARIATION] for duty in fixed.GRID_DUTY]
    columns = [f"{variation:.1f}" for variation in fixed.GRID_VARIATION]
    rows_ = [f"{duty:.0%}" for duty in fixed.GRID_DUTY]
    drawn = grid(columns, rows_, cells, "variation of the lengths of steps (sd / mean)", "training's share of a step")
    return section(
        "Sensitivity", drawn, "Two 7B jobs share the training pool; both axes are ours to choose (trap B26)."
    )
