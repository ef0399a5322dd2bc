"""A door to test: registry, fake attach helpers, plugstack.conf and job_submit.lua of a real development cluster."""

import json
import os
import re
import subprocess
import time
from pathlib import Path

import plexrl
from plexrl.slurm.devcluster.cluster import Cluster

PLUGIN_SOURCE = Path(plexrl.__file__).parents[1] / "slurm_plugin"
USER = "alice"

# What the real helper prints, and a stand-in for the proxy that it leaves running: it ends with the lifeline.
GOOD_HELPER = """\
#!/bin/sh
{ printf '%s\\n' "$@"; env; echo "uid=$(id -u)"; ls /proc/self/fd; } > SEEN/$SLURM_JOB_ID.part
mv SEEN/$SLURM_JOB_ID.part SEEN/$SLURM_JOB_ID.helper
setsid sh -c 'echo $$ > SEEN/'$SLURM_JOB_ID'.proxy; cat <&3' </dev/null >/dev/null 2>&1 &
cat <<END
TINKER_BASE_URL=http://127.0.0.1:4711
TINKER_API_KEY=tml-secret
OPENAI_BASE_URL=http://127.0.0.1:4711/oai/api/v1
OPENAI_API_KEY=tml-secret
NO_PROXY=127.0.0.1
no_proxy=127.0.0.1
SLURM_PLEXRL_POOL=demo
END
"""


class Door:
    """The cluster's door with a fake helper. Everything that a test changes, `reset` puts back.

    The plugin is loaded as `optional`, as sites do, where Slurm ignores what a plugin returns.
    """

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        self.etc = cluster.directory / "etc"
        self.registry, self.seen, self.out = folder / "registry", folder / "seen", folder / "out"
        self.bin, self.module, self.plugin = folder / "bin", folder / "plexrl.lua", folder / "spank_plexrl.so"
        self.helper = self.bin / "attach-helper"
        self._stamp = 0
        self._saved = {name: (self.etc / name).read_text() for name in ("plugstack.conf", "job_submit.lua")}
        for path in (folder, self.bin):
            path.mkdir(mode=0o755, parents=True)
        for path in (self.seen, self.out):
            path.mkdir()
            path.chmod(0o1777)
        # For sbatch only, which takes the names of GRES from its own slurm.conf: those that other sites have.
        conf = (self.etc / "slurm.conf").read_text()
        (folder / "slurm.conf").write_text(conf.replace("GresTypes=gpu", "GresTypes=gpu,lscratch,fpga,shard,mps"))
        self.more_gres = {"SLURM_CONF": str(folder / "slurm.conf")}
        build = ["make", "-s", "-C", str(PLUGIN_SOURCE), f"BUILD={folder}"]
        subprocess.run(build, check=True, capture_output=True, text=True, timeout=60)

    def reset(self) -> None:
        """A sound door: two declared pools, the good helper, the module as shipped."""
        subprocess.run(["rm", "-rf", str(self.registry)], check=True)
        self.registry.mkdir(mode=0o755)
        for pool in ("demo", "lab"):
            (self.registry / f"{pool}.json").write_text("{}")
        (self.registry / "demo.live.json").write_text("{}")
        self.bin.chmod(0o755)
        self.write_helper(GOOD_HELPER)
        self.module.write_text((PLUGIN_SOURCE / "plexrl.lua").read_text())
        self.write_site_lua()
        self.write_plugstack()

    def restore(self) -> None:
        """The cluster's own door again."""
        for name, text in self._saved.items():
            self._write(self.etc / name, text)

    def write_helper(self, text: str) -> None:
        """Put a root-owned helper in place."""
        self.helper.unlink(missing_ok=True)
        self.helper.write_text(text.replace("SEEN", str(self.seen)))
        self.helper.chmod(0o755)

    def write_plugstack(self, **changes: str | None) -> None:
        """The plugin's line; `None` leaves an argument out."""
        arguments = {"registry": self.registry, "helper": self.helper, "pool_uids": "0", "deadline": "20"} | changes
        line = " ".join(f"{key}={value}" for key, value in arguments.items() if value is not None)
        self._write(self.etc / "plugstack.conf", f"optional {self.plugin} {line}\n")

    def write_site_lua(self, rules: str = "", table: str = "nil", after: str = "") -> None:
        """job_submit.lua from the shipped example; rules, after: the site's own around ours; table: fourth argument."""
        text = (PLUGIN_SOURCE / "job_submit.lua.example").read_text()
        text = text.replace("/usr/share/plexrl/plexrl.lua", str(self.module))
        text = text.replace("(the site's rules come first)", f"\n{rules}\n")
        text = text.replace("return slurm.SUCCESS\nend", f"do {after} end\nreturn slurm.SUCCESS\nend", 1)
        text = text.replace(
            "plexrl.submit(job_desc, part_list, submit_uid)", f"plexrl.submit(job_desc, part_list, submit_uid, {table})"
        )
        self._write(self.etc / "job_submit.lua", text)

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text)
        # slurmctld loads job_submit.lua anew when its time stamp, in whole seconds, is later than what it loaded last
        self._stamp = max(self._stamp + 1, int(time.time()) + 3)
        os.utime(path, (self._stamp, self._stamp))

    def submit(
        self, *options: str, script: str = "true", user: str = USER, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """`sbatch OPTIONS` of a script; its output goes to self.out."""
        common = ["--parsable", f"--output={self.out}/%j", "--time=5"]
        return self.cluster.run(
            user, ["sbatch", *common, *options], stdin=f"#!/bin/bash\n{script}\n", env=env, check=False, timeout=30
        )

    def run(self, *options: str, script: str = "true", **more) -> "Job":
        """Submit, which must succeed, and wait for the end."""
        done = self.submit(*options, script=script, **more)
        assert done.returncode == 0, done.stderr
        return self.job(done).wait()

    def job(self, done: subprocess.CompletedProcess[str]) -> "Job":
        """The job of an accepted submission."""
        return Job(self, int(done.stdout.strip()), done.stderr)

    def jobs(self) -> set[str]:
        """Ids of all jobs that slurmctld knows."""
        done = self.cluster.run("root", ["squeue", "-h", "-t", "all", "-o", "%A"])
        return set(done.stdout.split())


class Job:
    """A submitted job."""

    def __init__(self, door: Door, number: int, stderr: str) -> None:
        self.door, self.number, self.stderr = door, number, stderr

    def show(self) -> dict[str, str]:
        """The fields of `scontrol show job`."""
        text = self.door.cluster.run("root", ["scontrol", "show", "job", str(self.number)]).stdout
        return dict(re.findall(r"(\S+?)=(.*?)(?=\s+\S+?=|\s*$)", text))

    def wait(self, *states: str, seconds: float = 45) -> "Job":
        """Wait for one of `states`, or for an end."""
        ends = states or ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        until = time.monotonic() + seconds
        while (state := self.show()["JobState"]) not in ends:
            assert time.monotonic() < until, f"job {self.number} is {state}, not {ends}: {self.output}"
            time.sleep(0.1)
        return self

    def wait_for(self, path: Path, seconds: float = 20) -> str:
        """Wait until a file has something in it."""
        until = time.monotonic() + seconds
        while not (path.exists() and path.read_text()):
            assert time.monotonic() < until, f"{path} did not come: {self.output}"
            time.sleep(0.05)
        return path.read_text()

    def cancel(self) -> None:
        """scancel, as the user."""
        self.door.cluster.run(USER, ["scancel", str(self.number)])

    @property
    def output(self) -> str:
        """What the script printed."""
        path = self.door.out / str(self.number)
        return path.read_text() if path.exists() else ""

    @property
    def note(self) -> dict:
        """What AdminComment remembers."""
        return json.loads(self.show()["AdminComment"].partition("PXL1:")[2])

    @property
    def environment(self) -> dict[str, str]:
        """The variables of a job whose script ran `env`."""
        return dict(line.split("=", 1) for line in self.output.splitlines() if "=" in line)

    @property
    def proxy(self) -> int:
        """The pid of the stand-in for the proxy."""
        return int(self.wait_for(self.door.seen / f"{self.number}.proxy"))


def ends(pid: int, seconds: float = 10) -> bool:
    """Whether a process is gone within `seconds`."""
    until = time.monotonic() + seconds
    while Path(f"/proc/{pid}").exists():
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True
