"""The arithmetic of one job's charge and baselines, line by line; every sum stands under what it was added up from."""

from collections.abc import Iterable, Sequence

from plexrl.accounting.basis import Group, Legs
from plexrl.accounting.published import Job, Published, dedicated, horizon
from plexrl.accounting.replay import Leg
from plexrl.accounting.words import clock, minus, percent, size
from plexrl.types import BadInput
from plexrl.types import records as r

_MINUTES = 30  # more of them are told by the hour


def find(published: Published, name: str) -> Job:
    """A job by its Slurm id or `<id>.<restart>`; of several runs the last. Raises BadInput."""
    runs = [job for job in published.jobs if name in (job.job, str(job.slurm_id))]
    if not runs:
        who = "that you may see" if published.uid is not None else "in its report"
        raise BadInput(f"pool {published.pool} has no job {name} {who}", "plexrl report lists them")
    return runs[-1]


def chain(
    records: Sequence[r.Record], intervals: Sequence[r.AgentInterval], published: Published, job: Job
) -> Sequence[Leg]:
    """The whole chain of the colocated baseline, again from what the report was made of."""
    told = [record for record in records if record.now_us <= published.now_us]
    until, _ = horizon(told, intervals, published.now_us)
    found = dedicated(told, until, published.device_bytes, published.pretend)
    return next(together.legs for trace, together, _, _ in found if trace.job == job.job)


def explained(published: Published, job: Job, legs: Sequence[Leg] = ()) -> list[str]:
    """Lines of text. legs: the whole chain of the colocated baseline, where the ledger is at hand."""
    lines = [f"Job {job.job} of {job.user}, account {job.account}, in pool {published.pool}"]
    lines += ["", *_charge(job), "", *_baseline(published, job), "", *_result(job)]
    if legs:
        lines += ["", "The chain of calls behind the colocated wall time", *_chain(legs)]
    return lines


def _charge(job: Job) -> list[str]:
    """Closed minutes to the charge."""
    rows = [(at, *parts[:3]) for at, *parts in job.minutes if any(parts[:3])]
    step = 60 if len(rows) <= _MINUTES else 3600
    sums: dict[int, list[int]] = {}
    for at, *parts in rows:
        key = at // 1_000_000 // step * step
        sums[key] = [a + b for a, b in zip(sums.get(key, [0, 0, 0]), parts, strict=True)]
    lines = ["Charge, GPU-seconds: closed intervals, never changed later"]
    lines.append(f"  {'':<22}{'busy':>12}{'switch':>12}{'kept':>12}{'sum':>12}")
    for key, parts in sorted(sums.items()):
        lines.append(f"  {clock(key):<22}" + _cells([*parts, sum(parts)]))
    total = [sum(parts[i] for parts in sums.values()) for i in range(3)]
    return [*lines, f"  {'charged':<22}" + _cells([*total, sum(total)])]


def _cells(parts: Iterable[int]) -> str:
    return "".join(f"{part / 1e6:>12.3f}" for part in parts)


def _baseline(published: Published, job: Job) -> list[str]:
    """Groups, models, both walls, and what caps them."""
    lines = ["Baseline: its own recorded calls, alone, through a model fitted to what calls took"]
    for group in job.basis.groups:
        lines += _group(group)
    gpus = [(group.role.value, group.gang_size * group.gangs) for group in job.basis.groups]
    told = ", ".join(f"{role} {count}" for role, count in gpus) or "none"
    lines += ["", f"  GPUs used by its groups: {told}"]
    lines += _wall("colocated", job.basis.colocated, job.replayed_us, job.gpus, "the largest of them")
    lines += _wall("split", job.basis.split, job.basis.split_wall_us, job.gpus_split, "their sum")
    if published.device_bytes is not None and len(job.basis.groups) > 1:
        need = sum(group.device_bytes for group in job.basis.groups)
        fit = "fit" if need <= published.device_bytes else "do not fit"
        words = f"  Colocated groups take {size(need)} of a GPU's {size(published.device_bytes)}: they {fit} together"
        lines.append(words + (", so hand-overs cost nothing" if fit == "fit" else ", so hand-overs move state"))
    if job.declared_gpus:
        used, asked = job.gpus, job.declared_gpus
        more = max(0, asked - used)
        beyond = more * job.replayed_us / 1e6
        lines.append(
            f"  Its script asked for {asked} GPUs; {used} count, because it used no more. Beyond that, in no sum:"
        )
        lines.append(f"  {more} x {job.replayed_us / 1e6:.3f} s = {beyond:.3f} GPU-s (declared)")
    return lines


def _group(group: Group) -> list[str]:
    gpus = f"{group.gangs} x {group.gang_size} GPU"
    lines = [f"  {group.group}: {group.role.value} of {group.base}, {gpus}, {group.calls} calls"]
    if group.error is None:
        return [*lines, "    no model was fitted: recorded seconds are used as they are"]
    terms = ", ".join(f"{name} {value:.6g}" for name, value in group.service.items()) or "nothing"
    lines.append(f"    model: {terms}")
    words = f"    predicts a call with a mean error of {percent(group.error, 1)}"
    if group.contention is not None:
        words += f"; worked {group.contention:.2f} s for each second computed"
    moved = f"built in {group.build_us / 1e6:.3f} s, in and out again in {group.switch_us / 1e6:.3f} s"
    return [*lines, words, f"    {moved}"]


def _wall(name: str, legs: Legs, wall_us: int, gpus: int, why: str) -> list[str]:
    lines = [f"  {name}: the chain of {legs.calls} calls that its wall time consists of, seconds"]
    parts = [("the program's own time between them", legs.think_us), ("waiting for its own other calls", legs.wait_us)]
    parts += [("engines built", legs.build_us), ("state moved", legs.move_us)]
    parts += [(f"{kind} calls", us) for kind, us in sorted(legs.run_us.items())]
    parts += [("from its last result to its end", legs.tail_us)]
    lines += [f"    {words:<40}{us / 1e6:>14.3f}" for words, us in parts if us]
    lines.append(f"    {'wall time':<40}{wall_us / 1e6:>14.3f}")
    return [*lines, f"    x {gpus} GPUs ({why}) = {gpus * wall_us / 1e6:.3f} GPU-s"]


def _result(job: Job) -> list[str]:
    charged = sum(sum(row[1:4]) for row in job.minutes)
    saved = job.gpus * job.replayed_us - charged
    words = minus(f"{saved / 1e6:.3f}")
    lines = [
        f"Saved: {job.gpus * job.replayed_us / 1e6:.3f} dedicated - {charged / 1e6:.3f} charged = {words} GPU-s "
        f"({job.basis.confidence})"
    ]
    if job.replayed_us:
        stretch = job.wall_us / job.replayed_us
        lines.append(f"Stretch: {job.wall_us / 1e6:.3f} s shared / {job.replayed_us / 1e6:.3f} s alone = {stretch:.3f}")
    return lines


def _chain(legs: Iterable[Leg]) -> list[str]:
    lines = [f"  {'at':>12}{'think':>10}{'wait':>10}{'build':>10}{'move':>10}{'run':>10}  call"]
    at = 0
    for leg in legs:
        at += leg.us
        parts = (leg.think_us, leg.wait_us, leg.build_us, leg.move_us, leg.run_us)
        cells = "".join(f"{part / 1e6:>10.3f}" for part in parts)
        lines.append(f"  {at / 1e6:>12.3f}{cells}  {leg.kind} {leg.call}".rstrip())
    return lines
