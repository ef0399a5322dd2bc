"""`plexrl demo`: two RL jobs of two users share two pretend GPUs on a real Slurm, and what that saved."""

import json
import os
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

import msgspec
import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from plexrl.accounting.ledger import read
from plexrl.accounting.overlap import stall_overlap, switch_totals
from plexrl.accounting.words import percent, size
from plexrl.config.engines import mend_of, missing
from plexrl.slurm.adapter import JobInfo
from plexrl.slurm.devcluster import DEFAULT_DIR, Cluster
from plexrl.types import BadInput, PlexrlError, Role, SpanClass, Unavailable, records

app = typer.Typer(add_completion=False)

POOL = "demo"
MODEL = "smollm2-135m"
_PATIENCE_S = 120.0
ENDED = frozenset("COMPLETED FAILED CANCELLED TIMEOUT NODE_FAIL OUT_OF_MEMORY BOOT_FAIL DEADLINE".split())


class Submission(msgspec.Struct, frozen=True):
    """A logical job of the demo. steps: by default. options: of the program."""

    user: str
    program: str
    steps: int
    options: tuple[str, ...]


# The first computes all the time, in small steps; the second waits for a tool in each of its large ones.
JOBS = (
    Submission("alice", "grpo_lora", 40, ("--lr", "1e-4")),
    Submission("bob", "grpo_full", 20, ("--tool-seconds", "8")),
)

CONFIG = """\
# Written by `plexrl demo`. Two nodes with one pretend GPU each; {what}.
state_dir: {state}
models:
  {model}:
    path: {path}
    accounts: [ml, bio]
    max_context: 128
    micro_batch_tokens: 128
    train: {{gpus: {gpus}, engine: {trainer}}}
    sample: {{replicas: 1, engine: {engine}, kv_bytes: 64MiB, max_batch: 32}}
    lora: {{max_rank: 16, slots: 1}}
device: {{kind: cpu, bytes: 2816MiB, cores: {{n1: [0], n2: [1]}}}}
host: {{bytes: 4096MiB}}
limits: {{versions_per_model: 1}}
scheduler: {{placement: {placement}, anticipation: 20ms, gradient_anticipation: 1s, quantum: 10s, sample_quantum: 10s}}
service_user: plexrl
munge_socket: {munge}
"""


class Demo:
    """One run: the cluster, the pool, the jobs, and what is printed of them."""

    def __init__(self, cluster: Cluster, placement: str, engine: str, trainer: str, out: Path, steps: int | None):
        self._cluster = cluster
        self._placement = placement
        self._engines = {"engine": engine, "trainer": trainer}
        self._out = out
        self._jobs_of = tuple(msgspec.structs.replace(job, steps=steps or job.steps) for job in JOBS)
        self._state = cluster.pools / POOL
        self._jobs: dict[int, Submission] = {}
        self.console = Console()

    def run(self, model: Path) -> dict[str, object]:
        """Everything, from the cluster's start to its end. Raises PlexrlError when a job fails."""
        cluster = self._cluster
        with ExitStack() as after:
            self._say(f"starting a development cluster in {cluster.directory}")
            after.callback(self._down)
            cluster.up(2, 1, models={MODEL: model.resolve()})
            self._clear()
            self._declare()
            self._say(f"starting pool {POOL!r} on 2 nodes with 1 GPU each, under the account plexrl")
            self._say("{engine} samples, {trainer} trains".format(**self._engines))
            self._plexrl("pool", "start", POOL, "--nodes", "2", "--gpus-per-node", "1")
            pool_job = self._live()["slurm_job"]
            for job in self._jobs_of:
                number = self._submit(job)
                self._jobs[number] = job
                self._say(f"{job.user}: sbatch --plexrl-pool={POOL} {job.program}.sbatch -> job {number}")
            self._watch()
            self._say("stopping the pool")
            self._plexrl("pool", "stop", POOL)
            found = self._summary(pool_job)
            self._print(found, pool_job)
        return found

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _clear(self) -> None:
        """End jobs that a demo left which was itself killed; Slurm takes them up again with the cluster."""
        slurm = self._cluster.slurm()
        deadline = time.monotonic() + 60
        while left := slurm.active():
            if time.monotonic() > deadline:
                raise PlexrlError(f"jobs {left} of an earlier demo do not end", "plexrl devcluster down --purge")
            slurm.cancel(*left)
            time.sleep(1)

    def _declare(self) -> None:
        shared = self._placement == "pack"
        config = self._cluster.pools / "demo.yaml"
        config.write_text(
            CONFIG.format(
                what="both jobs train on both" if shared else "each job has one of its own",
                state=self._state,
                model=MODEL,
                path=self._cluster.opt / "models" / MODEL,
                gpus=2 if shared else 1,
                placement=self._placement,
                **self._engines,
                munge=self._cluster.munge_socket,
            )
        )
        config.chmod(0o644)
        # A demo begins with an empty ledger; the last one's figures are in its own summary.
        self._plexrl("pool", "declare", POOL, "--config", str(config), "--fresh")

    def _submit(self, job: Submission) -> int:
        cluster = self._cluster
        steps = self._steps_file(job)
        steps.unlink(missing_ok=True)
        templates = cluster.opt / "venv" / "share" / "plexrl" / "sbatch_templates"
        arguments = ["--steps", str(job.steps), "--out", str(steps), *job.options]
        done = cluster.run(
            job.user,
            ["sbatch", "--parsable", f"--plexrl-pool={POOL}", str(templates / f"{job.program}.sbatch"), *arguments],
            env={"PYTHON": str(cluster.opt / "venv" / "bin" / "python"), "PROGRAMS": str(templates)},
        )
        return int(done.stdout.strip().partition(";")[0])

    def _watch(self) -> None:
        """Show who is on which GPU and how the rewards go, until both jobs have ended."""
        slurm = self._cluster.slurm()
        shown: dict[str, int] = {}
        began = heard = time.monotonic()
        jobs: dict[int, JobInfo] = {}
        with Live(console=self.console, refresh_per_second=2, transient=True) as live:
            while True:
                try:
                    jobs, heard = slurm.jobs(self._jobs), time.monotonic()
                except Unavailable:
                    # Two cores do all the work of this cluster; slurmctld may have to wait for its turn.
                    if time.monotonic() - heard > _PATIENCE_S:
                        raise
                live.update(self._picture(jobs, time.monotonic() - began))
                if not self.console.is_terminal:
                    self._lines(shown)
                ended = {i: jobs[i].state if i in jobs else "UNKNOWN" for i in self._jobs}
                for number, state in ended.items():
                    if state in ENDED and state != "COMPLETED":
                        raise PlexrlError(f"job {number} of {self._jobs[number].user} is {state}", self._output(number))
                if all(state in ENDED for state in ended.values()):
                    return
                time.sleep(1.0)

    def _picture(self, jobs: dict, seconds: float) -> Group:
        gpus = Table("GPU", "turn", "", title=f"pool {POOL}, {self._placement}, {seconds:.0f} s", title_justify="left")
        for gpu, what in (self._status().get("gpus") or {}).items():
            gpus.add_row(gpu, what["turn"] or "-", what["phase"])
        rewards = Table("job", "user", "Slurm", "steps", "reward of the last five", "")
        for number, job in self._jobs.items():
            steps = self._read_steps(job)
            mean = _mean([s["reward"] for s in steps[-5:]])
            state = jobs[number].state if number in jobs else "ended"
            bar = Text("#" * int(30 * mean), style="green")
            rewards.add_row(str(number), job.user, state, f"{len(steps)}/{job.steps}", f"{mean:.2f}", bar)
        return Group(gpus, rewards)

    def _lines(self, shown: dict[str, int]) -> None:
        """Without a terminal: one line per step."""
        for number, job in self._jobs.items():
            steps = self._read_steps(job)
            for step in steps[shown.get(number, 0) :]:
                turns = {gpu: what["turn"] or "-" for gpu, what in (self._status().get("gpus") or {}).items()}
                told = f"step {step['step']:2d}  reward {step['reward']:.2f}  {step['seconds']:5.1f} s"
                print(f"{job.user:6s} {told}  {turns}", flush=True)
            shown[number] = len(steps)

    # -- reading -------------------------------------------------------------------------------------------------------

    def _steps_file(self, job: Submission) -> Path:
        return Path(self._cluster.as_user(job.user)["cwd"]) / f"{job.program}.jsonl"

    def _read_steps(self, job: Submission) -> list[dict]:
        path = self._steps_file(job)
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]

    def _status(self) -> dict:
        try:
            return msgspec.json.decode((self._state / "run" / "status.json").read_bytes())
        except (FileNotFoundError, msgspec.DecodeError):
            return {}

    def _live(self) -> dict:
        return json.loads((self._cluster.registry / f"{POOL}.live.json").read_text())

    def _output(self, number: int) -> str:
        home = Path(self._cluster.as_user(self._jobs[number].user)["cwd"])
        ends = [path.read_text()[-2000:] for path in home.glob(f"*-{number}.out")]
        return "Its output ends with:\n" + "\n".join(ends)

    def _summary(self, pool_job: int) -> dict[str, object]:
        kept = read(self._state / "ledger")
        jobs = []
        names = {
            record.slurm_job: record.job
            for record in kept
            if isinstance(record, records.JobAttached) and record.slurm_job in self._jobs
        }
        for number, job in self._jobs.items():
            rewards = [step["reward"] for step in self._read_steps(job)]
            jobs.append(
                {
                    "slurm_id": number,
                    "user": job.user,
                    "program": job.program,
                    "steps": len(rewards),
                    "reward_first5": _mean(rewards[:5]),
                    "reward_last5": _mean(rewards[-5:]),
                    "rewards": rewards,
                }
            )
        stalls = [(s["tool_start"], s["tool_end"]) for s in self._read_steps(self._jobs_of[1])]
        first, second = (names[number] for number in self._jobs)
        switches, moved = switch_totals(kept)
        self._out.mkdir(parents=True, exist_ok=True)
        page = self._out / ("report.html" if self._placement == "pack" else "isolated.html")
        # The page is written by root into the caller's folder; the figures are those of the pool's own account.
        report = self._plexrl("report", "--pool", POOL, "--json", "--html", str(page.resolve()))
        trainers = [
            record.spec.device_bytes
            for record in kept
            if isinstance(record, records.GroupPlaced) and record.spec.role is Role.TRAIN
        ]
        return {
            "placement": self._placement,
            **self._engines,
            "pool_job": pool_job,
            "jobs": jobs,
            "switches": switches,
            "switched_bytes": moved,
            "smaller_trainer_bytes": min(trainers),
            "gpus_that_served_both": sorted(_served_both(kept, first, second)),
            "stall_overlap": stall_overlap(kept, stalls, second, first),
            "report": json.loads(report),
            "html": str(page),
        }

    # -- telling -------------------------------------------------------------------------------------------------------

    def _print(self, found: dict, pool_job: int) -> None:
        console = self.console
        table = Table(
            "job", "user", "steps", "reward, first 5", "reward, last 5", title="Learning", title_justify="left"
        )
        for job in found["jobs"]:
            table.add_row(
                str(job["slurm_id"]),
                job["user"],
                str(job["steps"]),
                f"{job['reward_first5']:.2f}",
                f"{job['reward_last5']:.2f}",
            )
        console.print(table)
        table = Table(
            "job", "account", "user", "state", "elapsed s", "GPUs", "nodes", title="sacct", title_justify="left"
        )
        for row in self._cluster.slurm().sacct([pool_job, *self._jobs]):
            cells = (row.job, row.account, row.user, row.state, row.elapsed, row.gpus, ",".join(row.nodes))
            table.add_row(*(str(cell) for cell in cells))
        console.print(table)
        print(self._plexrl("report", "--pool", POOL))
        report = found["report"]
        exposed = ", ".join(f"{job['user']} {job['switch']:.1f}" for job in report["jobs"])
        console.print(
            f"{found['switches']} switches moved {size(found['switched_bytes'])}; exposed, GPU-seconds: {exposed}, "
            f"{percent(report['shares']['switch'], 1)} of the pool; copies beside work: "
            f"{report['moved']['hidden_gpu_seconds']:.1f}; GPUs that served both jobs: "
            f"{', '.join(found['gpus_that_served_both']) or 'none'}; during {found['stall_overlap']:.0%} of bob's tool "
            "seconds alice's job was busy on the same GPUs"
        )
        name = "summary.json" if self._placement == "pack" else "isolated.json"
        (self._out / name).write_text(json.dumps(found, indent=2))
        console.print(f"figures: {self._out / name}   page: {found['html']}")
        other = self._out / ("isolated.json" if self._placement == "pack" else "summary.json")
        if other.exists():
            theirs = json.loads(other.read_text())
            console.print(
                f"{theirs['placement']}: pool {theirs['report']['pool_gpu_seconds']:.0f} GPU-seconds, here "
                f"({self._placement}): {found['report']['pool_gpu_seconds']:.0f}"
            )

    def _say(self, text: str) -> None:
        self.console.print(f"[bold]>[/bold] {text}", highlight=False)

    def _plexrl(self, *arguments: str) -> str:
        """A verb of ours as root, from what is installed for everybody."""
        command = [str(self._cluster.opt / "venv" / "bin" / "plexrl"), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=self._cluster.env(), timeout=420)
        if done.returncode:
            raise PlexrlError(f"plexrl {' '.join(arguments)} ended with {done.returncode}", done.stderr.strip())
        return done.stdout

    def _down(self) -> None:
        self._say("ending the development cluster")
        self._cluster.down()


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _served_both(kept: list, first: str, second: str) -> set[str]:
    served: dict[str, set[str]] = {first: set(), second: set()}
    for record in kept:
        if isinstance(record, records.SpanClosed) and record.span.kind is SpanClass.BUSY:
            for job, _ in record.span.shares:
                if job in served:
                    served[job].add(record.span.gpu)
    return served[first] & served[second]


def shortfalls(found: dict, sharing: bool) -> list[str]:
    """What a run of the demo should show and did not."""
    report = found["report"]
    missing = [
        f"the mean reward of {job['user']}'s last five steps is not 0.15 above the first five"
        for job in found["jobs"]
        if job["reward_last5"] < job["reward_first5"] + 0.15
    ]
    if report["sacct_gpu_seconds"] is None:
        missing.append("sacct told nothing of the pool's job")
    else:
        apart = abs(report["charged_gpu_seconds"] + report["overhead_gpu_seconds"] - report["sacct_gpu_seconds"])
        if apart > 2 * report["gpus"]:
            missing.append(f"charged and overhead differ from sacct by {apart:.1f} GPU-seconds")
    if sharing:
        if len(found["gpus_that_served_both"]) < report["gpus"]:
            missing.append("not every GPU served both jobs")
        if found["switches"] < 10 or found["switched_bytes"] < 10 * found["smaller_trainer_bytes"]:
            missing.append("too little was switched")
        if found["stall_overlap"] < 0.2:
            missing.append("the tool's waiting was not filled by the other job")
    return missing


@app.command()
def demo(
    model: Path = typer.Option(..., metavar="DIR", help="SmolLM2-135M-Instruct, as `plexrl model smollm2` makes it."),
    placement: str = typer.Option("pack", help="pack: both jobs share both GPUs; isolated: each has its own."),
    engine: str = typer.Option("torch", help="Who samples: torch or vllm."),
    trainer: str = typer.Option("torch", help="Who trains: torch or deepspeed."),
    out: Path = typer.Option(Path("demo-out"), metavar="DIR", help="Where summary.json and the page go."),
    directory: Path = typer.Option(DEFAULT_DIR, "--dir", metavar="DIR", help="Where the development cluster lives."),
    steps: int | None = typer.Option(None, min=10, help="Steps of each job; default: 40 and 20."),
) -> None:
    """Two RL jobs of two users learn on one pool of two pretend GPUs, on a real Slurm of this machine.

    The first trains a LoRA; the second all parameters, and waits for a tool in each step, which the first job's work
    fills. Ends with the rewards, Slurm's accounting, and the GPU hours saved. Everything that it started is ended.
    """
    if placement not in ("pack", "isolated"):
        raise typer.BadParameter(f"{placement!r} is neither pack nor isolated", param_hint="--placement")
    for name, value, other in (("--engine", engine, "vllm"), ("--trainer", trainer, "deepspeed")):
        if value not in ("torch", other):
            raise typer.BadParameter(f"{value!r} is neither torch nor {other}", param_hint=name)
        if value == other and (why := missing(other, "cpu")):
            raise BadInput(why, mend_of(other, "cpu"))
    os.umask(0o022)
    found = Demo(Cluster(directory), placement, engine, trainer, out, steps).run(model)
    short = shortfalls(found, placement == "pack")
    for what in short:
        print(f"plexrl demo: {what}")
    raise typer.Exit(1 if short else 0)
