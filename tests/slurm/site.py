"""A site with a pool: the development cluster, a declared pool of the tiny model, users who submit programs to it."""

import json
import shutil
import subprocess
import time
from pathlib import Path

import psutil

from plexrl.slurm.devcluster import Cluster

POOL = "test"
PROGRAMS = Path(__file__).parent.parent / "e2e" / "programs"

CONFIG = """\
state_dir: {state}
models:
  tiny:
    path: {model}
    accounts: [ml, bio]
    max_context: 128
    micro_batch_tokens: 256
    train: {{gpus: 2}}
    sample: {{replicas: 2, kv_bytes: 2MiB, max_batch: 16}}
    lora: {{max_rank: 8, slots: 1}}
device: {{kind: cpu, bytes: {device}, cores: {{n1: [0], n2: [1]}}}}
host: {{bytes: 128MiB}}
scheduler: {{placement: pack, quantum: 500ms, min_turn_factor: 1.0}}
service_user: plexrl
munge_socket: {munge}
"""


class Site:
    """Starts and stops the pool, submits jobs, reads what came of them."""

    def __init__(self, cluster: Cluster, tiny_model: Path):
        self.cluster = cluster
        self.python = cluster.opt / "venv" / "bin" / "python"
        self.programs = cluster.opt / "tests"
        model = cluster.opt / "models" / "tiny"
        shutil.copytree(tiny_model, model, dirs_exist_ok=True)
        shutil.copytree(PROGRAMS, self.programs, dirs_exist_ok=True)
        for folder in (model.parent, model, self.programs):
            folder.chmod(0o755)
        self.state = cluster.pools / POOL
        self.config = cluster.pools / "test.yaml"
        self.configure("6MiB")

    def configure(self, device: str) -> None:
        """Write plexrl.yaml; device: bytes of a pretend GPU."""
        text = CONFIG.format(
            state=self.state,
            model=self.cluster.opt / "models" / "tiny",
            device=device,
            munge=self.cluster.munge_socket,
        )
        self.config.write_text(text)
        self.config.chmod(0o644)

    def plexrl(self, *arguments: str, user: str = "root", check: bool = True) -> subprocess.CompletedProcess[str]:
        """A verb of ours, installed for everybody."""
        return self.cluster.run(user, ["plexrl", *arguments], timeout=300, check=check)

    def start(self) -> int:
        """Start the pool; its Slurm job."""
        self.plexrl("pool", "start", POOL, "--nodes", "2", "--gpus-per-node", "1")
        return self.live()["slurm_job"]

    def stop(self) -> None:
        """Stop it and wait for its Slurm job."""
        self.plexrl("pool", "stop", POOL)

    def live(self) -> dict:
        """The pool's live file."""
        return json.loads((self.cluster.registry / f"{POOL}.live.json").read_text())

    def submit(self, user: str, program: str, *arguments: str, options: tuple[str, ...] = ()) -> int:
        """sbatch --plexrl-pool of a program of tests/e2e/programs, as it is."""
        command = f"exec {self.python} {self.programs / program} {' '.join(arguments)}"
        done = self.cluster.run(
            user,
            ["sbatch", "--parsable", f"--plexrl-pool={POOL}", "--gres=gpu:1", "--output=%j.out", *options,
             f"--wrap={command}"],
            env={"TINKER_TELEMETRY": "0", "PYTHONWARNINGS": "ignore"},
        )  # fmt: skip
        return int(done.stdout.strip())

    def state_of(self, job: int) -> str:
        """A job's state as slurmctld or slurmdbd knows it."""
        found = self.cluster.slurm().job(job)
        if found is not None:
            return found.state
        rows = self.cluster.slurm().sacct([job])
        return rows[-1].state if rows else "UNKNOWN"

    def output(self, user: str, job: int) -> str:
        """What a job printed."""
        path = Path(self.cluster.as_user(user)["cwd"]) / f"{job}.out"
        return path.read_text() if path.exists() else ""

    def result(self, user: str, job: int, timeout: float = 100) -> dict:
        """Wait for a job that must complete; the JSON of its last line."""
        self.wait_until(
            f"job {job} ends", lambda: self.state_of(job) not in ("PENDING", "RUNNING", "COMPLETING"), timeout
        )
        assert self.state_of(job) == "COMPLETED", self.output(user, job) + self.pool_output()
        return json.loads(self.output(user, job).strip().splitlines()[-1])

    def pool_output(self) -> str:
        """The ends of the pool's logs."""
        paths = [*sorted(self.state.glob("pool-*.out")), *sorted((self.state / "logs").glob("*.log"))]
        return "\n".join(f"--- {path.name}\n{path.read_text()[-2000:]}" for path in paths)

    def processes(self, user: str) -> list[psutil.Process]:
        """Everything that runs under a user."""
        return [p for p in psutil.process_iter(["username"]) if p.info["username"] == user]

    def head(self) -> psutil.Process:
        """The head's process."""
        commands = {p: p.cmdline() for p in self.processes("plexrl")}
        heads = [p for p, line in commands.items() if "python" in line[0] and line[-5:-2] == ["pool", "head", POOL]]
        assert len(heads) == 1, commands
        return heads[0]

    def wait_until(self, what: str, holds, timeout: float = 60.0) -> None:
        """Wait for a condition; on time-out fail with the pool's logs."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if holds():
                return
            time.sleep(0.2)
        raise AssertionError(f"not within {timeout:.0f} s: {what}\n{self.pool_output()}")
